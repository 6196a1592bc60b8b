"""When a failing run is tried again, and when it is stopped."""

import random
import signal
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.budget import FailureBudget, Retry, Stop
from orchestrator.decide.causes import CAUSES, UNCHARGED


def budget(max_failures: int | Mapping[str, int] | None = None, seed: int = 0) -> FailureBudget:
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


def test_a_loop_that_fails_right_after_every_restore_is_given_one_more_try_from_an_older_checkpoint() -> None:
    subject = budget(100)
    verdicts = [fail(subject, "exit", restored=40, step=40) for _ in range(2)]
    verdicts.append(fail(subject, "exit", restored=30, step=30))
    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Stop]


def test_a_hang_after_the_same_step_is_given_more_tries_than_an_exception_and_not_without_end() -> None:
    subject = budget(100)
    verdicts = [fail(subject, "hang", restored=20, step=35) for _ in range(5)]
    assert [type(verdict) for verdict in verdicts] == [Retry] * 4 + [Stop]


def test_a_signal_that_was_sent_says_nothing_about_the_step_and_one_of_a_crash_does() -> None:
    def tries(number: int) -> int:
        subject = budget(100)
        subject.generation_started(20)
        verdicts = [subject.failure("signal", 35, -number) for _ in range(20)]
        return next((n for n, verdict in enumerate(verdicts) if isinstance(verdict, Stop)), 20)

    assert tries(signal.SIGKILL) == 20
    assert tries(signal.SIGSEGV) == 4


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


def test_limits_may_be_set_for_some_causes_and_the_others_keep_to_the_rule_of_progress() -> None:
    subject = budget({"signal": 1})
    assert isinstance(fail(subject, "signal", restored=20, step=35), Retry)
    verdicts = [fail(subject, "agent_lost", restored=20, step=35) for _ in range(10)]
    assert [type(verdict) for verdict in verdicts] == [Retry] * 9 + [Stop]
    assert fail(budget({"signal": 0}), "signal", restored=0, step=5) == Stop(
        reason="it failed 1 times (signal) before anything was saved, and max_failures is 0"
    )


def test_notice_that_a_node_is_drained_costs_nothing_and_waits_for_nothing() -> None:
    subject = budget(0)
    assert all(fail(subject, "drain", restored=20, step=20) == Retry(delay_seconds=0.0) for _ in range(100))
    assert isinstance(fail(subject, "signal", restored=20, step=20), Stop)


def test_a_checkpoint_that_cannot_be_restored_costs_no_wait_and_is_no_standstill() -> None:
    subject = budget(None)
    assert all(fail(subject, "restore_failed", restored=20, step=0) == Retry(delay_seconds=0.0) for _ in range(50))
    assert fail(subject, "signal", restored=10, step=10) == Retry(delay_seconds=0.0)
    assert isinstance(fail(budget({"restore_failed": 0}), "restore_failed", restored=20, step=0), Stop)


@pytest.mark.parametrize("wrong", [-1, "3", {"signal": -1}, {"signals": 3}, {"drain": 3}, True])
def test_a_limit_that_cannot_be_meant_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValueError, match="max_failures is "):
        budget(wrong)  # type: ignore[arg-type]


limits = st.one_of(
    st.none(),
    st.integers(0, 6),
    st.dictionaries(st.sampled_from(sorted(set(CAUSES) - UNCHARGED)), st.integers(0, 6), max_size=4),
)
charged = st.sampled_from(sorted(set(CAUSES) - UNCHARGED - {"restore_failed"}))


@given(limits, st.lists(st.tuples(charged, st.integers(0, 3)), min_size=120, max_size=120))
def test_whatever_the_causes_a_run_that_saves_nothing_new_always_stops(
    max_failures: int | dict[str, int] | None, failures: list[tuple[str, int]]
) -> None:
    subject = budget(max_failures)
    assert any(isinstance(fail(subject, cause, restored=0, step=step), Stop) for cause, step in failures)


@given(limits, st.lists(st.tuples(charged, st.integers(0, 40)), max_size=40), st.integers(0, 100))
def test_waits_are_bounded_whatever_happens(
    max_failures: int | dict[str, int] | None, failures: list[tuple[str, int]], seed: int
) -> None:
    subject = FailureBudget(max_failures, rng=random.Random(seed))
    for cause, step in failures:
        verdict = fail(subject, cause, restored=20, step=step)
        assert isinstance(verdict, Stop) or 0 <= verdict.delay_seconds <= 60


@given(st.lists(charged, min_size=1, max_size=60))
def test_a_run_that_saves_something_new_before_each_failure_is_never_stopped(causes: list[str]) -> None:
    subject = budget(1)
    for number, cause in enumerate(causes, start=1):
        subject.committed(10 * number)
        verdict = fail(subject, cause, restored=10 * number - 10, step=10 * number + 1)
        assert verdict == Retry(delay_seconds=0.0)
