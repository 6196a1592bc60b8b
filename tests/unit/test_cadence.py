"""How often snapshots that stay in memory are taken: as often as they may cost, and not changed by noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.cadence import Change, SnapshotCadence, steps_between


def told(cadence: SnapshotCadence, copy_seconds: float, *, step: int, generation: int = 1) -> Change | None:
    return cadence.copied(generation, step, copy_seconds)


def measured(copy_seconds: float, step_seconds: float = 0.1) -> SnapshotCadence:
    cadence = SnapshotCadence("auto", 0.02)
    cadence.steps_took([step_seconds] * 5)
    told(cadence, copy_seconds, step=10)
    return cadence


@given(st.floats(0, 100), st.floats(1e-4, 100), st.floats(0.001, 1))
def test_copies_cost_at_most_what_is_allowed_and_are_as_frequent_as_that_lets(
    copy: float, step: float, overhead: float
) -> None:
    steps = steps_between(copy, step, overhead)
    assert copy <= overhead * step * steps * (1 + 1e-9)
    assert steps == 2 or copy > overhead * step * (steps - 1) * (1 - 1e-9)


def test_a_decision_names_its_inputs() -> None:
    cadence = SnapshotCadence("auto", 0.02)
    cadence.steps_took([0.1, 0.1, 0.2, 0.1])
    change = told(cadence, 0.05, step=10)
    assert change == Change(steps=25, copy_seconds=0.05, step_seconds=0.1, overhead_max=0.02)
    assert cadence.steps == 25


def test_the_slowest_rank_counts_at_each_step() -> None:
    cadence = SnapshotCadence("auto", 0.02)
    cadence.steps_took([0.1] * 5)
    assert told(cadence, 0.01, step=10) is not None
    change = told(cadence, 0.1, step=10)
    assert change is not None
    assert change.steps == 50


def test_a_copy_that_costs_next_to_nothing_is_made_after_every_second_step() -> None:
    assert measured(0.0).steps == 2


def test_noise_does_not_change_it_and_a_lasting_change_does() -> None:
    cadence = measured(0.05)
    assert cadence.steps == 25
    assert told(cadence, 0.06, step=35) is None
    changes = [told(cadence, 0.2, step=step) for step in range(60, 300, 25)]
    assert [change.steps for change in changes if change][-1] == 100
    assert cadence.steps == 100


def test_one_slow_copy_among_others_changes_nothing() -> None:
    cadence = measured(0.05)
    for step in (35, 60):
        assert told(cadence, 0.05, step=step) is None
    assert told(cadence, 5.0, step=85) is None


def test_before_steps_are_measured_nothing_is_decided() -> None:
    cadence = SnapshotCadence("auto", 0.02)
    assert told(cadence, 5.0, step=10) is None
    assert cadence.steps == 10


@pytest.mark.parametrize("every", [None, 7])
def test_what_the_user_fixed_stays(every: int | None) -> None:
    cadence = SnapshotCadence(every, 0.02)
    cadence.steps_took([0.1] * 5)
    assert told(cadence, 5.0, step=10) is None
    assert cadence.steps == every


def test_a_coordinator_that_comes_back_goes_on_with_what_held() -> None:
    assert SnapshotCadence("auto", 0.02, before=40).steps == 40
    assert SnapshotCadence(7, 0.02, before=40).steps == 7
