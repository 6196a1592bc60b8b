"""How often each tier saves: what moves the intervals, what bounds them, and what a decision says."""

import math
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.cost import goodput_ratio, optimal_interval_seconds, overhead_ratio
from orchestrator.decide.failure_rate import FailureRate
from orchestrator.decide.hazard import Prior
from orchestrator.decide.tuner import (
    MISSES_ALONE,
    MISSES_REPLICATED,
    IntervalDecision,
    Limits,
    TierName,
    Tuner,
)

HOUR = 3600.0
FREE = Limits(durable_overhead_max=None, memory_overhead_max=None, memory_steps_min=1)


def tuner(limits: Limits = FREE, *, memory: bool = False, mtbf: float = 2 * HOUR, failures: int = 20) -> Tuner:
    """Of a run that has failed so often, on average every `mtbf`, each time a process; its gaps are as those of
    memoryless failures."""
    subject = Tuner(FailureRate(Prior(failures_per_second=1 / mtbf), ranks=8), limits=limits, memory=memory)
    gaps = [-mtbf * math.log((index + 0.5) / failures) for index in range(failures)]  # the quantiles
    random.Random(0).shuffle(gaps)
    for at in accumulate(gaps):
        subject.failed(at, cause="signal", domain="process")
    return subject


def saves(
    subject: Tuner, *, stall: float = 1.0, durable: float = 20.0, tier: TierName = "durable", times: int = 5
) -> None:
    for _ in range(times):
        subject.saved(tier, stall_seconds=stall, durable_seconds=durable)


def decided(subject: Tuner, at: float = 40 * HOUR, tier: TierName = "durable") -> IntervalDecision:
    subject.decide(at)
    decision = subject.current(tier)
    assert decision is not None
    return decision


# ---------------------------------------------------------------- the best interval


def test_the_interval_is_the_best_one_for_what_was_measured() -> None:
    subject = tuner()
    saves(subject)
    decision = decided(subject)
    inputs = decision.inputs
    assert (inputs.cost.stall_seconds, inputs.cost.durable_seconds) == (1.0, 20.0)
    assert 1 / inputs.failures_per_second == pytest.approx(2 * HOUR, rel=0.5)
    assert decision.interval_seconds == optimal_interval_seconds(inputs.cost, inputs.failures_per_second)
    assert decision.bounds == ()


def test_interference_counts_like_stall() -> None:
    stalling, slowing = tuner(), tuner()
    saves(stalling, stall=3.0)
    slowing.saved("durable", stall_seconds=1.0, durable_seconds=18.0, interference_seconds=2.0)
    assert decided(slowing).interval_seconds == pytest.approx(decided(stalling).interval_seconds, rel=1e-3)


def test_a_decision_says_what_half_and_double_the_interval_would_cost() -> None:
    subject = tuner()
    saves(subject)
    subject.restarted("durable", 77.0)
    decision = decided(subject)
    inputs = decision.inputs
    assert inputs.restart_seconds == 77.0
    for factor, found in (
        (1.0, decision.goodput_ratio),
        (0.5, decision.goodput_ratio_half),
        (2.0, decision.goodput_ratio_double),
    ):
        expected = goodput_ratio(
            inputs.cost, factor * decision.interval_seconds, inputs.failures_per_second, inputs.restart_seconds
        )
        assert found == expected
    assert decision.goodput_ratio > max(decision.goodput_ratio_half, decision.goodput_ratio_double)


def test_intervals_are_whole_steps_at_least_one() -> None:
    subject = tuner()
    subject.steps_took([7.0] * 5)
    saves(subject)
    decision = decided(subject)
    assert decision.interval_steps is not None
    assert decision.interval_seconds == 7.0 * decision.interval_steps
    assert decision.interval_seconds == pytest.approx(decision.best_seconds, abs=3.5)
    slow = tuner()
    slow.steps_took([HOUR] * 5)
    saves(slow)
    assert decided(slow).interval_steps == 1


def test_nothing_is_decided_before_a_save_was_measured() -> None:
    subject = tuner(memory=True)
    assert subject.decide(HOUR * 40) == ()
    saves(subject)
    assert [decision.tier for decision in subject.decide(40 * HOUR)] == ["durable"]
    saves(subject, tier="memory", stall=0.1, durable=0.5)
    assert [decision.tier for decision in subject.decide(40 * HOUR)] == ["memory"]


# ---------------------------------------------------------------- two tiers


def test_memory_is_for_failures_of_processes_and_disk_for_those_of_nodes() -> None:
    subject = tuner(memory=True)
    for tier in ("memory", "durable"):
        saves(subject, tier=tier, stall=1.0, durable=1.0)
    memory, durable = decided(subject, tier="memory"), decided(subject, tier="durable")
    assert 1 / memory.inputs.failures_per_second == pytest.approx(2 * HOUR, rel=0.5)
    assert durable.interval_seconds > 3 * memory.interval_seconds  # no node was ever lost
    at = 40 * HOUR
    for _ in range(10):
        at += 0.5 * HOUR
        subject.failed(at, cause="agent_lost", domain="node")
    assert decided(subject, at, "durable").interval_seconds < memory.interval_seconds


def test_copies_on_other_nodes_make_durable_saves_rarer() -> None:
    intervals = []
    for misses in (MISSES_ALONE, MISSES_REPLICATED):
        subject = Tuner(FailureRate(Prior(failures_per_second=1 / HOUR)), limits=FREE, memory_misses=misses)
        saves(subject)
        intervals.append(decided(subject, 0.0).interval_seconds)
    assert intervals[1] > 3 * intervals[0]


@pytest.mark.parametrize("missed", [0.0, 1.0])
def test_a_tier_that_nothing_is_restored_from_is_refused(missed: float) -> None:
    with pytest.raises(ValueError, match="memory_misses is"):
        Tuner(FailureRate(Prior(failures_per_second=1.0)), memory_misses={"process": missed, "node": missed})


def test_without_memory_every_failure_counts() -> None:
    alone, beside = tuner(), tuner(memory=True)
    for subject in (alone, beside):
        saves(subject)
    assert decided(alone).interval_seconds < decided(beside).interval_seconds


# ---------------------------------------------------------------- bounds


def test_the_ceiling_on_overhead_bounds_and_says_what_it_costs() -> None:
    subject = tuner(Limits(), mtbf=HOUR)
    saves(subject, stall=30.0, durable=30.0)
    decision = decided(subject, 20 * HOUR)
    assert overhead_ratio(decision.inputs.cost, decision.interval_seconds) == pytest.approx(0.01)
    (bound,) = decision.bounds
    assert bound.name == "overhead"
    inputs = decision.inputs
    best = goodput_ratio(inputs.cost, decision.best_seconds, inputs.failures_per_second, inputs.restart_seconds)
    assert bound.goodput_cost_ratio == pytest.approx(best - decision.goodput_ratio)
    assert bound.goodput_cost_ratio > 0.05
    assert decision.goodput_ratio_half > decision.goodput_ratio


def test_a_ceiling_that_is_not_reached_is_not_named() -> None:
    subject = tuner(Limits(), mtbf=100 * HOUR)
    saves(subject, stall=0.1)
    decision = decided(subject, 2000 * HOUR)
    assert decision.bounds == ()
    assert decision.interval_seconds == decision.best_seconds


def test_a_save_begins_only_when_the_one_before_can_be_restored() -> None:
    subject = tuner()
    saves(subject, stall=0.1, durable=500.0)
    decision = decided(subject)
    assert [bound.name for bound in decision.bounds] == ["bandwidth"]
    assert decision.interval_seconds == pytest.approx(499.9)
    subject.steps_took([60.0] * 5)
    assert decided(subject).interval_steps == 9


def test_a_disk_without_room_is_tried_rarely_until_it_has_room_again() -> None:
    subject = tuner()
    saves(subject)
    before = decided(subject).interval_seconds
    subject.room(free_bytes=9e9, save_bytes=1e10)
    decision = decided(subject)
    assert [bound.name for bound in decision.bounds] == ["disk"]
    assert decision.interval_seconds == pytest.approx(4 * before)
    subject.room(free_bytes=2e10, save_bytes=1e10)
    assert decided(subject).interval_seconds == pytest.approx(before)


def test_slots_serve_snapshots_only_so_many_steps_apart() -> None:
    subject = tuner(Limits(memory_overhead_max=None, memory_steps_min=2), memory=True)
    subject.steps_took([100.0] * 5)
    saves(subject, stall=0.01, durable=0.02, tier="memory")
    decision = decided(subject, tier="memory")
    assert decision.interval_steps == 2
    assert [bound.name for bound in decision.bounds] == ["memory"]


def test_rounding_to_steps_oversteps_no_bound() -> None:
    subject = tuner(Limits(durable_overhead_max=0.3257))
    subject.steps_took([941.0] * 3)
    saves(subject, stall=1932.0, durable=1932.0)
    decision = decided(subject)
    assert 4 * 941.0 < 1932.0 * (1 / 0.3257 - 1) < decision.best_seconds < 4.5 * 941.0
    assert overhead_ratio(decision.inputs.cost, decision.interval_seconds) <= 0.3257


def test_of_several_bounds_the_strictest_comes_first_and_holds() -> None:
    subject = tuner(Limits())
    saves(subject, stall=10.0, durable=500.0)
    decision = decided(subject)
    assert [bound.name for bound in decision.bounds] == ["overhead", "bandwidth"]
    assert decision.interval_seconds == decision.bounds[0].interval_seconds == pytest.approx(990.0)


measured = st.floats(0.0, 1e4)


@given(measured, measured, st.floats(1e-3, 1e3), st.floats(0.001, 1.0), st.integers(0, 20), st.floats(0, 1e6))
def test_no_bound_is_ever_overstepped(
    stall: float, durable: float, step: float, ceiling: float, failures: int, age: float
) -> None:
    subject = tuner(Limits(durable_overhead_max=ceiling), failures=failures)
    subject.steps_took([step] * 3)
    saves(subject, stall=stall, durable=durable)
    decision = decided(subject, 2 * HOUR * failures + age)
    assert decision.interval_steps is not None
    assert decision.interval_steps >= 1
    cost = decision.inputs.cost
    assert overhead_ratio(cost, decision.interval_seconds) <= ceiling * (1 + 1e-9)
    assert decision.interval_seconds >= cost.exposed_seconds * (1 - 1e-9)


# ---------------------------------------------------------------- changes and noise


def test_a_disk_that_turns_ten_times_slower_counts_from_the_first_save_on_it() -> None:
    subject = tuner()
    saves(subject, durable=60.0, times=30)
    before = decided(subject)
    saves(subject, durable=600.0, times=1)
    after = decided(subject)
    assert before.interval_seconds < after.interval_seconds == pytest.approx(599.0)
    saves(subject, durable=60.0, times=2)
    assert decided(subject).interval_seconds == pytest.approx(before.interval_seconds, rel=0.01)


def test_a_stall_that_grows_ten_times_counts_from_the_first_save_on() -> None:
    subject = tuner()
    saves(subject, times=30)
    before = decided(subject)
    saves(subject, stall=10.0, times=1)
    assert decided(subject).interval_seconds == pytest.approx(10**0.5 * before.interval_seconds, rel=0.05)


def test_a_single_save_that_took_for_ever_is_not_believed_beyond_ten_times() -> None:
    subject = tuner()
    saves(subject, times=30)
    before = decided(subject)
    saves(subject, stall=5000.0, times=1)
    assert decided(subject).interval_seconds < 4 * before.interval_seconds
    saves(subject, stall=5000.0, times=1)
    assert decided(subject).interval_seconds > 10 * before.interval_seconds


def test_a_failure_counts_at_the_next_decision() -> None:
    subject = tuner(mtbf=10 * HOUR, failures=3)
    saves(subject)
    at = 40 * HOUR
    before = decided(subject, at)
    for _ in range(6):
        at += HOUR * 0.8
        subject.failed(at, cause="signal", domain="process")
        after = decided(subject, at)
    assert after.interval_seconds < 0.6 * before.interval_seconds


def test_a_run_that_grows_saves_more_often_at_once() -> None:
    subject = tuner()
    saves(subject, durable=1.0)
    before = decided(subject)
    subject.resized(40 * HOUR, 800)
    assert decided(subject).interval_seconds == pytest.approx(before.interval_seconds / 10, rel=0.1)


def test_while_nothing_fails_saves_become_rarer() -> None:
    subject = tuner(mtbf=HOUR, failures=2)
    saves(subject)
    intervals = []
    at = 2 * HOUR
    for _ in range(2000):
        decision = decided(subject, at)
        intervals.append(decision.interval_seconds)
        at += decision.interval_seconds + 1.0
    assert intervals == sorted(intervals)
    assert intervals[-1] > 2 * intervals[0]


def test_after_clustered_failures_the_rate_counts_from_when_the_save_can_be_restored() -> None:
    best = []
    for durable in (1.0, 1200.0):
        subject, rng, at = tuner(failures=0), random.Random(3), 0.0
        for _ in range(200):
            at += rng.weibullvariate(2 * HOUR / math.gamma(1 + 1 / 0.6), 0.6)
            subject.failed(at, cause="signal", domain="process")
        saves(subject, durable=durable)
        best.append(decided(subject, at + 60.0).best_seconds)
    assert best[1] > 1.3 * best[0]


def test_before_it_wants_to_look_again_nothing_is_decided() -> None:
    subject = tuner()
    saves(subject)
    decided(subject, 40 * HOUR)
    held = subject.current("durable")
    assert subject.review_at > 40 * HOUR
    assert subject.decide(subject.review_at - 1.0) == ()
    assert subject.current("durable") is held


@pytest.mark.parametrize("limits", [FREE, Limits()])
def test_noise_hardly_ever_changes_the_interval(limits: Limits) -> None:
    rng = random.Random(2)
    subject = tuner(limits)
    subject.steps_took([0.5] * 5)
    changes = 0
    for _ in range(1000):
        factor = rng.uniform(0.7, 1.3)
        subject.saved("durable", stall_seconds=5.0 * factor, durable_seconds=60.0 * rng.uniform(0.7, 1.3))
        subject.steps_took([0.5 * rng.uniform(0.8, 1.2)])
        changes += len(subject.decide(40 * HOUR))
    assert 1 <= changes <= 20


def test_half_of_all_saves_being_outliers_upsets_nothing_for_long() -> None:
    subject = tuner()
    saves(subject, times=30)
    usual = decided(subject).interval_seconds
    for _ in range(20):
        saves(subject, stall=40.0, times=1)
        decided(subject)
        saves(subject, times=1)
        assert decided(subject).interval_seconds == pytest.approx(usual)


@pytest.mark.parametrize("value", [0.0, 1.5, -0.1])
def test_limits_that_make_no_sense_are_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="durable_overhead_max is"):
        Limits(durable_overhead_max=value)
    with pytest.raises(ValueError, match="memory_overhead_max is"):
        Limits(memory_overhead_max=value)
    with pytest.raises(ValueError, match="memory_steps_min is 0"):
        Limits(memory_steps_min=0)
