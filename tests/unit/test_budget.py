"""When a failing run is tried again, and when it is stopped."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.budget import FailureBudget, Retry, Stop


def budget(max_failures: int | None = None, seed: int = 0) -> FailureBudget:
    return FailureBudget(max_failures, rng=random.Random(seed))


def fail(subject: FailureBudget, cause: str, *, restored: int, step: int) -> Retry | Stop:
    subject.generation_started(restored)
    return subject.failure(cause, step)


def test_the_first_retry_is_immediate() -> None:
    assert fail(budget(), "exception", restored=0, step=0) == Retry(delay_seconds=0.0)


@pytest.mark.parametrize("cause", ["drain", "controller"])
def test_what_was_announced_or_is_counted_elsewhere_costs_nothing(cause: str) -> None:
    subject = budget(1)
    for _ in range(20):
        assert fail(subject, cause, restored=0, step=0) == Retry(delay_seconds=0.0)
    assert fail(subject, "signal", restored=0, step=0) == Retry(delay_seconds=0.0)


def test_a_loop_that_fails_before_any_step_is_stopped_at_the_second_failure_however_large_the_budget() -> None:
    subject = budget(100)
    assert isinstance(fail(subject, "exception", restored=0, step=0), Retry)
    verdict = fail(subject, "exception", restored=0, step=0)
    assert verdict == Stop(reason="it failed 2 times in a row before it finished a step")


def test_a_loop_that_fails_right_after_every_restore_is_stopped_as_quickly() -> None:
    subject = budget(100)
    assert isinstance(fail(subject, "exit", restored=40, step=40), Retry)
    assert isinstance(fail(subject, "exit", restored=40, step=40), Stop)


def test_a_loop_that_fails_after_the_same_step_each_time_is_stopped_at_the_third_failure() -> None:
    subject = budget(100)
    verdicts = [fail(subject, "exception", restored=20, step=35) for _ in range(3)]
    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Stop]


def test_failures_of_the_loop_at_different_steps_use_up_the_budget_only() -> None:
    subject = budget(3)
    verdicts = [fail(subject, "exception", restored=20, step=step) for step in (35, 30, 35, 30)]
    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Retry, Stop]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_max_failures_of_a_cause_are_survived_and_one_more_is_not(limit: int) -> None:
    subject = budget(limit)
    verdicts = [fail(subject, "signal", restored=0, step=10 + number) for number in range(limit + 1)]
    assert [type(verdict) for verdict in verdicts] == [Retry] * limit + [Stop]


def test_causes_are_counted_apart() -> None:
    subject = budget(1)
    assert isinstance(fail(subject, "signal", restored=0, step=5), Retry)
    assert isinstance(fail(subject, "agent_lost", restored=0, step=6), Retry)
    assert isinstance(fail(subject, "signal", restored=0, step=7), Stop)


def test_a_newer_checkpoint_refills_the_budget_and_an_old_one_does_not() -> None:
    subject = budget(1)
    assert isinstance(fail(subject, "signal", restored=0, step=25), Retry)
    subject.committed(20)
    assert isinstance(fail(subject, "signal", restored=20, step=30), Retry)
    subject.committed(20)
    verdict = fail(subject, "signal", restored=20, step=31)
    assert verdict == Stop(reason="it failed 2 times (signal) since step 20 was saved, and max_failures is 1")


def test_without_a_limit_a_run_that_gets_nowhere_is_stopped_whatever_the_cause() -> None:
    subject = budget(None)
    verdicts = [fail(subject, "signal", restored=20, step=35) for _ in range(11)]
    assert [type(verdict) for verdict in verdicts] == [Retry] * 10 + [Stop]


def test_without_a_limit_a_run_that_gets_further_each_time_goes_on() -> None:
    subject = budget(None)
    assert all(isinstance(fail(subject, "signal", restored=0, step=step), Retry) for step in range(1, 200))


def test_waits_double_while_no_step_is_finished_and_end_when_one_is() -> None:
    subject = budget(1000)
    verdicts = [fail(subject, "signal", restored=20, step=20) for _ in range(12)]
    delays = [verdict.delay_seconds for verdict in verdicts if isinstance(verdict, Retry)]
    assert delays[0] == 0.0
    for number, delay in enumerate(delays[1:]):
        longest = min(60.0, 2.0**number)
        assert longest / 2 <= delay <= longest
    assert fail(subject, "signal", restored=20, step=21) == Retry(delay_seconds=0.0)


def test_two_runs_do_not_wait_equally_long() -> None:
    def third_delay(seed: int) -> float:
        subject = budget(10, seed)
        verdict = [fail(subject, "signal", restored=0, step=0) for _ in range(3)][-1]
        assert isinstance(verdict, Retry)
        return verdict.delay_seconds

    assert third_delay(1) != third_delay(2)


def test_a_negative_limit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_failures is -1"):
        budget(-1)


@given(st.lists(st.tuples(st.sampled_from(["exception", "signal"]), st.integers(0, 3)), min_size=60, max_size=60))
def test_a_run_that_saves_nothing_new_always_stops(failures: list[tuple[str, int]]) -> None:
    subject = budget(None)
    assert any(isinstance(fail(subject, cause, restored=0, step=step), Stop) for cause, step in failures)
