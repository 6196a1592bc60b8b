"""When a run says that it is no longer protected, how often, and when it ends for it."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.protection import Decision, ProtectedAgain, Protection, StopUnprotected, Unprotected

LIMIT = 100.0


def protection(limit: float | None = LIMIT, *, stop: bool = False) -> Protection:
    return Protection(limit_seconds=limit, stop=stop, protected_at=0.0)


def test_a_run_whose_saves_fail_for_longer_than_the_limit_says_so_with_the_reason_and_since_when() -> None:
    subject = protection()
    subject.committed(50.0)
    assert subject.save_failed("disk full", at=90.0, final=True) == []
    assert subject.wakeup_at == 150.0
    assert subject.tick(at=149.0) == []
    assert subject.tick(at=150.0) == [Unprotected(since=50.0, reason="disk full")]


def test_a_run_that_was_not_asked_to_save_is_not_unprotected() -> None:
    subject = protection()
    assert subject.wakeup_at is None
    assert subject.tick(at=10_000.0) == []


def test_a_save_that_fails_late_is_told_at_once() -> None:
    assert protection().save_failed("read-only", at=500.0, final=False) == [Unprotected(since=0.0, reason="read-only")]


def test_it_is_said_again_after_growing_pauses() -> None:
    subject = protection()
    subject.save_failed("disk full", at=10.0, final=True)
    said = []
    for _ in range(4):
        at = subject.wakeup_at
        assert at is not None
        assert subject.tick(at=at) == [Unprotected(since=0.0, reason="disk full")]
        said.append(at)
    assert said == [100.0, 200.0, 400.0, 800.0]


def test_a_commit_ends_it_and_that_is_said_once() -> None:
    subject = protection()
    assert subject.committed(20.0) == []
    subject.save_failed("disk full", at=120.0, final=True)
    assert subject.committed(130.0) == [ProtectedAgain(since=20.0)]
    assert subject.committed(140.0) == []
    assert subject.wakeup_at is None
    subject.save_failed("disk full", at=150.0, final=True)
    assert subject.wakeup_at == 240.0


def test_a_run_that_is_to_stop_gets_the_next_save_as_a_last_chance() -> None:
    subject = protection(stop=True)
    assert subject.save_failed("first", at=100.0, final=True) == [Unprotected(since=0.0, reason="first")]
    assert subject.save_failed("a try", at=110.0, final=False) == []
    assert subject.save_failed("the last", at=115.0, final=True) == [StopUnprotected(since=0.0, reason="the last")]
    assert subject.save_failed("more", at=116.0, final=True) == []
    assert subject.wakeup_at is None


def test_the_last_chance_saves_the_run_if_it_comes_through() -> None:
    subject = protection(stop=True)
    subject.save_failed("first", at=100.0, final=True)
    assert subject.committed(110.0) == [ProtectedAgain(since=0.0)]
    assert subject.tick(at=1000.0) == []


def test_a_run_whose_save_stalls_is_stopped_when_the_last_chance_has_had_its_time() -> None:
    subject = protection(stop=True)
    subject.save_failed("stalled", at=100.0, final=False)
    assert subject.wakeup_at == 160.0
    assert subject.tick(at=160.0) == [StopUnprotected(since=0.0, reason="stalled")]


def test_without_a_limit_nothing_is_ever_said() -> None:
    subject = protection(None, stop=True)
    assert subject.save_failed("disk full", at=1e9, final=True) == []
    assert subject.wakeup_at is None


events = st.tuples(st.sampled_from(["committed", "failed", "attempt", "tick"]), st.floats(0.0, 90.0))


@given(st.lists(events, max_size=60), st.booleans())
def test_whatever_happens_it_is_only_said_while_the_newest_state_is_older_than_the_limit_and_a_save_failed(
    happened: list[tuple[str, float]], stop: bool
) -> None:
    subject = protection(stop=stop)
    at = protected_at = 0.0
    failed = said = False
    stops = 0
    for kind, passed in happened:
        at += passed
        decisions: list[Decision]
        match kind:
            case "committed":
                decisions = subject.committed(at)
                assert decisions == ([ProtectedAgain(since=protected_at)] if said else [])
                protected_at, failed, said = at, False, False
                continue
            case "tick":
                decisions = subject.tick(at=at)
            case _:
                failed = True
                decisions = subject.save_failed("why", at=at, final=kind == "failed")
        for decision in decisions:
            assert failed
            assert at - protected_at >= LIMIT
            stops += isinstance(decision, StopUnprotected)
            said = True
        if failed and at - protected_at >= LIMIT and not stops:
            assert said
    assert stops <= int(stop)
