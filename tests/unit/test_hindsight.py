"""How often a run should have saved, once its failures are known."""

import math
import random
from typing import Any

import pytest

from orchestrator.decide.cost import SaveCost, optimal_interval_seconds
from orchestrator.observe.run_report.hindsight import Hindsight, Stretch, hindsight, stretches_of

COST = SaveCost(2.0, 5.0, 1.0)


def walked(stretches: list[Stretch], cost: SaveCost, interval: float) -> float:
    """The same as the model, save by save."""
    waste = 0.0
    for stretch in stretches:
        at, trained, kept = 0.0, 0.0, 0.0
        while at + interval < stretch.seconds - 1e-9:
            at += interval
            trained += interval
            if at + max(cost.stall_seconds, cost.durable_seconds) <= stretch.seconds + 1e-9:
                kept = trained
            paused = min(cost.cost_seconds, stretch.seconds - at)
            at += paused
            waste += paused
        if stretch.failed:
            waste += trained + (stretch.seconds - at) - kept
    return waste


def found(stretches: list[Stretch], cost: SaveCost = COST, **options: Any) -> Hindsight:
    options = {"step_seconds": 0.5, "as_run_seconds": 40.0} | options
    one = hindsight("durable", stretches, cost, **options)
    assert one is not None
    return one


def drawn(seed: int, failures: int, mean: float) -> list[Stretch]:
    rng = random.Random(seed)
    return [Stretch(rng.expovariate(1 / mean), rng.random() < 0.9) for _ in range(failures)]


@pytest.mark.parametrize("seed", range(5))
def test_waste_is_what_walking_from_save_to_save_gives(seed: int) -> None:
    stretches = drawn(seed, 30, 400.0)
    one = found(stretches)
    for interval, waste in one.curve[::7]:
        assert waste == pytest.approx(walked(stretches, COST, interval), abs=1e-6)
    assert one.as_run_waste_seconds == pytest.approx(walked(stretches, COST, 40.0), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_no_interval_of_a_fine_grid_beats_the_best(seed: int) -> None:
    stretches = drawn(seed, 12, 300.0)
    one = found(stretches)
    grid = [1.0 + 0.25 * n for n in range(2000)]
    assert one.best_waste_seconds <= min(walked(stretches, COST, interval) for interval in grid) + 1e-6
    assert one.best_waste_seconds == pytest.approx(walked(stretches, COST, one.best_seconds), abs=1e-6)
    assert one.best_waste_seconds <= min(one.formula_waste_seconds, one.as_run_waste_seconds or math.inf)


def test_one_failure_is_best_met_by_one_save_that_is_just_ready() -> None:
    """Stretch of 100 s: a save that begins at 95 s can be restored at 100 s, and costs 3 s; nothing else is lost but
    the 2 s after that."""
    one = found([Stretch(100.0, True)])
    assert one.best_seconds == pytest.approx(95.0)
    assert one.best_waste_seconds == pytest.approx(5.0)


def test_without_failures_no_save_had_been_needed() -> None:
    one = found([Stretch(500.0, False)])
    assert math.isinf(one.best_seconds) and one.best_waste_seconds == 0.0
    assert one.as_run_waste_seconds == pytest.approx(walked([Stretch(500.0, False)], COST, 40.0))


def test_with_many_even_failures_it_comes_near_the_formula() -> None:
    stretches = drawn(3, 3000, 3600.0)
    one = found([Stretch(stretch.seconds, True) for stretch in stretches])
    rate = len(stretches) / sum(stretch.seconds for stretch in stretches)
    assert one.formula_seconds == pytest.approx(optimal_interval_seconds(COST, rate))
    assert one.best_waste_seconds == pytest.approx(one.formula_waste_seconds, rel=0.05)


def test_nothing_is_said_of_no_training_or_free_saves() -> None:
    assert hindsight("durable", [], COST, step_seconds=1.0, as_run_seconds=None) is None
    free = SaveCost(0.0)
    assert hindsight("durable", [Stretch(9.0, True)], free, step_seconds=1.0, as_run_seconds=None) is None


def entry(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, **fields}


def generation(at: float, number: int, source: str) -> dict[str, Any]:
    return entry("generation", at, generation=number, ranks=1, source=source)


def first_step(at: float, number: int) -> dict[str, Any]:
    return entry("first_step", at, generation=number, rank=0, step=1, at_step=at)


def test_stretches_end_with_failures_and_know_what_answered_them() -> None:
    entries = [
        generation(0, 1, "fresh"),
        first_step(10, 1),
        entry("failure", 51, generation=1, failed_at=50),
        generation(52, 2, "memory"),
        entry("failure", 53, generation=2, failed_at=53),  # before it had done a step
        generation(54, 3, "checkpoint"),
        first_step(60, 3),
        entry("commit", 90),
        generation(500, 4, "checkpoint"),  # the driver had ended without a word
        first_step(510, 4),
        entry("finished", 600),
    ]
    assert stretches_of(entries) == [(40.0, "memory"), (30.0, None), (90.0, None)]
    assert stretches_of(entries[:3]) == [(40.0, None)]
