"""What saving costs and spares: the formulas against closed forms, published ones, and training played out by hand."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.cost import (
    SaveCost,
    Tier,
    daly_first_order_interval_seconds,
    daly_interval_seconds,
    first_order_goodput_ratio,
    goodput_ratio,
    interval_range_within,
    lost_seconds_per_failure,
    optimal_interval_seconds,
    overhead_ratio,
    two_tier_goodput_ratio,
    two_tier_intervals_seconds,
    young_interval_seconds,
)

HOUR = 3600.0

costs = st.builds(SaveCost, st.floats(1e-3, 1e3), st.floats(0.0, 1e4), st.floats(0.0, 1e3))
rates = st.floats(1e-8, 1e-2)


def played_out(cost: SaveCost, interval: float, rate: float, restart: float, *, seed: int, failures: int) -> float:
    """Goodput, save by save and failure by failure: interference slows training evenly over the interval."""
    rng = random.Random(seed)
    time_passed = kept = 0.0
    for _ in range(failures):
        until = rng.expovariate(rate)
        time_passed += until
        at, saved, unsaved = restart, 0.0, []
        while True:
            boundary = at + interval + cost.interference_seconds
            if boundary > until:
                break
            unsaved.append(boundary + max(cost.stall_seconds, cost.durable_seconds))
            at = boundary + cost.stall_seconds
        saved = interval * sum(restorable <= until for restorable in unsaved)
        kept += saved
    return kept / time_passed


def two_tiers_played_out(memory: Tier, every: float, durable: Tier, durable_every: float, *, failures: int) -> float:
    """Goodput with both tiers: each stops training after its own interval; a failure goes back to the newest save of
    the tier that it is restored from, or of a durable one if that is newer, and what is repeated is trained again."""
    rng = random.Random(5)
    time_passed = 0.0
    progress = in_memory = on_disk = 0.0  # what has been trained, and what of it was saved where
    to_memory, to_disk = every, durable_every
    total = memory.failures_per_second + durable.failures_per_second
    until = rng.expovariate(total)
    for _ in range(failures):
        while True:
            stretch = min(to_memory, to_disk)
            due_memory, due_disk = stretch == to_memory, stretch == to_disk
            stall = memory.cost.stall_seconds * due_memory + durable.cost.stall_seconds * due_disk
            if until < stretch + stall:
                break
            until -= stretch + stall
            time_passed += stretch + stall
            progress += stretch
            to_memory, to_disk = to_memory - stretch, to_disk - stretch
            if due_memory:
                in_memory, to_memory = progress, every
            if due_disk:
                in_memory = on_disk = progress
                to_disk = durable_every
        time_passed += until
        node = rng.random() < durable.failures_per_second / total
        progress = on_disk if node else in_memory
        in_memory = progress
        to_memory, to_disk = every, max(durable_every - (progress - on_disk), 1e-9)
        restart = durable.restart_seconds if node else memory.restart_seconds
        until = rng.expovariate(total)
        while until < restart:
            time_passed += until
            until = rng.expovariate(total)
        time_passed += restart
        until -= restart
    return progress / time_passed


def test_thirty_seconds_every_ten_minutes_cost_4_76_percent_and_five_minutes_of_training_a_failure() -> None:
    cost = SaveCost(30.0)
    assert overhead_ratio(cost, 600.0) == pytest.approx(0.0476, abs=5e-5)
    assert lost_seconds_per_failure(cost, 600.0) == 300.0


def test_what_was_trained_while_a_save_was_written_is_lost_too() -> None:
    assert lost_seconds_per_failure(SaveCost(5.0, 100.0), 600.0) == 300.0 + 95.0
    assert lost_seconds_per_failure(SaveCost(30.0, 30.0), 600.0) == 300.0  # nothing was, while it stood still


def test_youngs_and_dalys_intervals_are_the_published_ones() -> None:
    assert young_interval_seconds(300.0, 24 * HOUR) == pytest.approx(math.sqrt(2 * 300 * 86400))
    assert daly_first_order_interval_seconds(300.0, 24 * HOUR) == pytest.approx(math.sqrt(2 * 300 * 86400) - 300)
    # The captions of his figures: 5 min for a dump; MTBFs of 24 h, 6 h and 15 min; 117, 57 and 9.1 min.
    assert daly_interval_seconds(300.0, 24 * HOUR) / 60 == pytest.approx(117, abs=0.6)
    assert daly_interval_seconds(300.0, 6 * HOUR) / 60 == pytest.approx(57, abs=0.6)
    assert daly_interval_seconds(300.0, 900.0) / 60 == pytest.approx(9.1, abs=0.06)
    assert daly_interval_seconds(200.0, 99.0) == 99.0


@given(costs, rates)
def test_the_optimum_solves_its_equation_and_dalys_estimate_comes_as_close_as_he_says(
    cost: SaveCost, rate: float
) -> None:
    best = optimal_interval_seconds(cost, rate)
    c, x = cost.cost_seconds, rate * cost.cost_seconds
    if x < 20:
        assert (1 - rate * best) * math.exp(rate * best + x) == pytest.approx(1.0, rel=1e-6)
    assert daly_interval_seconds(c, 1 / rate) == pytest.approx(best, rel=0.006 if x <= 0.5 else 0.07)
    if x < 1e-6:
        assert young_interval_seconds(c, 1 / rate) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("x", [1e-16, 1e-13, 1e-10, 1e-7, 1e-5, 1e-3, 0.1, 3.0, 25.0])
def test_the_optimum_is_the_root_that_bisection_finds(x: float) -> None:
    low, high = 0.0, 1.0
    for _ in range(200):
        y = (low + high) / 2
        # ln(1 - y) + y, by its series where floats would cancel.
        left = math.log1p(-y) + y if y > 0.01 else -sum(y**k / k for k in range(2, 12))
        low, high = (y, high) if left + x > 0 else (low, y)
    assert optimal_interval_seconds(SaveCost(x * 100.0), 0.01) == pytest.approx(100.0 * low, rel=1e-6)
    assert optimal_interval_seconds(SaveCost(5000.0), 0.01) == 100.0


@given(costs, rates, st.floats(0.0, 1e4), st.floats(0.2, 5.0))
def test_no_interval_beats_the_best_one_and_the_restart_does_not_move_it(
    cost: SaveCost, rate: float, restart: float, factor: float
) -> None:
    best = optimal_interval_seconds(cost, rate)
    at_best = goodput_ratio(cost, best, rate, restart)
    assert goodput_ratio(cost, factor * best, rate, restart) <= at_best * (1 + 1e-12)
    assert 0.0 <= at_best <= 1.0


def test_without_failures_nothing_is_saved_and_what_is_free_is_saved_always() -> None:
    assert optimal_interval_seconds(SaveCost(1.0), 0.0) == math.inf
    assert goodput_ratio(SaveCost(1.0), math.inf, 0.0, 10.0) == 1.0
    assert goodput_ratio(SaveCost(1.0), 9.0, 0.0, 10.0) == 0.9
    assert optimal_interval_seconds(SaveCost(0.0), 1e-3) == 0.0
    assert goodput_ratio(SaveCost(0.0), 0.0, 1e-3, 10.0) == pytest.approx(math.exp(-0.01))
    assert goodput_ratio(SaveCost(0.0), 1e-6, 1e-3, 10.0) == pytest.approx(math.exp(-0.01))
    assert goodput_ratio(SaveCost(1.0), 0.0, 1e-3, 10.0) == 0.0
    assert goodput_ratio(SaveCost(1.0), 1e9, 1e-3, 10.0) == 0.0


@pytest.mark.parametrize("interval", [200.0, 600.0, 2000.0])
@pytest.mark.parametrize("cost", [SaveCost(20.0), SaveCost(5.0, 100.0), SaveCost(5.0, 100.0, 15.0)])
def test_goodput_is_what_training_played_out_gives(cost: SaveCost, interval: float) -> None:
    rate, restart = 1 / 5000.0, 60.0
    played = played_out(cost, interval, rate, restart, seed=1, failures=20_000)
    assert goodput_ratio(cost, interval, rate, restart) == pytest.approx(played, rel=0.01)


def test_goodput_is_the_inverse_of_dalys_solution_time() -> None:
    """T = M e^(R/M) (e^((t + C)/M) - 1) Ts / t, Daly 2006, for saves that block."""
    mtbf, restart, interval, stall = 6 * HOUR, 600.0, 57 * 60.0, 300.0
    slowdown = mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf) / interval
    assert goodput_ratio(SaveCost(stall, stall), interval, 1 / mtbf, restart) == pytest.approx(1 / slowdown)


def test_goodput_is_metas_published_ettr_where_that_holds() -> None:
    """Free saves, a job that never queues, failures far apart: 1 - N r_f (u + dt / 2)."""
    nodes, per_node_day, restart, interval = 128, 6.5e-3, 300.0, HOUR
    rate = nodes * per_node_day / 86400.0
    published = 1 - nodes * per_node_day * (restart + interval / 2) / 86400.0
    assert first_order_goodput_ratio(SaveCost(0.0), interval, rate, restart) == pytest.approx(published)
    assert goodput_ratio(SaveCost(0.0), interval, rate, restart) == pytest.approx(published, abs=3e-4)


@given(costs, st.floats(1e-9, 1e-7), st.floats(0.0, 600.0))
def test_for_rare_failures_each_loss_counts_on_its_own(cost: SaveCost, rate: float, restart: float) -> None:
    interval = 50.0 * cost.cost_seconds
    exact = goodput_ratio(cost, interval, rate, restart)
    first_order = first_order_goodput_ratio(cost, interval, rate, restart)
    wasted = 1 - first_order
    assert exact == pytest.approx(first_order, abs=2 * wasted * wasted)


@given(costs, rates, st.floats(0.5, 0.9999))
def test_intervals_within_the_range_cost_no_more_than_it_says_and_the_optimum_is_flat(
    cost: SaveCost, rate: float, ratio: float
) -> None:
    if rate * cost.cost_seconds > 5:
        return
    best = optimal_interval_seconds(cost, rate)
    low, high = interval_range_within(ratio, cost, rate, 10.0)
    assert low < best < high
    wanted = ratio * goodput_ratio(cost, best, rate, 10.0)
    assert goodput_ratio(cost, low, rate, 10.0) == pytest.approx(wanted, rel=1e-6)
    assert goodput_ratio(cost, high, rate, 10.0) == pytest.approx(wanted, rel=1e-6)


def test_twice_or_half_the_best_interval_wastes_a_quarter_more() -> None:
    cost, rate = SaveCost(1.0), 1e-6
    best = optimal_interval_seconds(cost, rate)
    waste = 1 - goodput_ratio(cost, best, rate, 0.0)
    for factor in (0.5, 2.0):
        assert 1 - goodput_ratio(cost, factor * best, rate, 0.0) == pytest.approx(1.25 * waste, rel=0.01)


def test_two_tiers_give_what_training_played_out_with_both_gives() -> None:
    memory = Tier(SaveCost(0.5), 1 / 4000.0, 10.0)
    durable = Tier(SaveCost(8.0), 1 / 20000.0, 90.0)
    every, durable_every = two_tier_intervals_seconds(memory, durable)
    assert every == pytest.approx(63.1, abs=0.5)
    played = two_tiers_played_out(memory, every, durable, durable_every, failures=20_000)
    assert two_tier_goodput_ratio(memory, every, durable, durable_every) == pytest.approx(played, rel=0.01)


def test_a_tier_that_costs_nothing_and_restores_nothing_changes_nothing() -> None:
    durable = Tier(SaveCost(8.0), 1 / 20000.0, 90.0)
    free = Tier(SaveCost(0.0), 0.0, 0.0)
    assert two_tier_goodput_ratio(free, 10.0, durable, 500.0) == durable.goodput_ratio(500.0)
    assert two_tier_goodput_ratio(durable, 500.0, free, 10.0) == durable.goodput_ratio(500.0)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="stall_seconds is -1"):
        SaveCost(-1.0)
    with pytest.raises(ValueError, match="durable_seconds is nan"):
        replace(SaveCost(1.0), durable_seconds=math.nan)
    with pytest.raises(ValueError, match="failures_per_second is -1"):
        Tier(SaveCost(1.0), -1.0, 0.0)
    with pytest.raises(ValueError, match="ratio is 0"):
        interval_range_within(0.0, SaveCost(1.0), 1e-3, 0.0)
