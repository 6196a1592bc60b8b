"""The save state machine when a node is lost: an older set of snapshots, which others have copies of, is restored."""

from test_commit import Driven, commit, persist, release

from orchestrator.decide.commit import ALL_STEPS, Abandon, Decision, Persist, Skip

DIGESTS = {0: "a", 1: "b"}


def found(run: Driven, step: int, *, committed: bool = False) -> list[Decision]:
    return run.machine.memory_found(1, step, digests=DIGESTS, committed=committed, at=0.0)


def lost(run: Driven) -> list[Decision]:
    """The node of rank 1, and its generation with it."""
    decisions = run.machine.keeper_lost((1,), at=0.0, generation=1)
    return decisions + run.machine.generation_ended(1, at=0.0)


def test_an_older_set_is_kept_and_written_once_in_the_place_of_the_newer_one_that_is_not_whole() -> None:
    run = Driven()
    run.kept(10)
    run.kept(12)
    lost(run)
    assert run.machine.in_memory is None
    decisions = found(run, 10)
    assert persist(10) in decisions
    assert release(ALL_STEPS, 10) in decisions
    assert run.machine.in_memory == (1, 10)
    run.restored(2, parent=1, step=10)
    assert run.machine.in_memory == (1, 10)
    assert run.persisted(10) == [commit(10)]
    run.committed(10)
    assert run.machine.in_memory == (1, 10)
    assert not [one for one in run.kept(12, gen=2) if isinstance(one, Persist)]
    assert run.machine.in_memory == (2, 12)


def test_the_newest_set_is_whole_again_if_the_lost_shards_have_copies() -> None:
    run = Driven()
    run.kept(12)
    lost(run)
    assert persist(12) in found(run, 12)
    assert run.machine.in_memory == (1, 12)
    assert found(run, 12) == []


def test_what_is_committed_is_not_written_again() -> None:
    run = Driven()
    run.saved(10)
    run.kept(12)
    lost(run)
    assert not [one for one in found(run, 10, committed=True) if isinstance(one, Persist)]
    assert run.machine.in_memory == (1, 10)
    assert run.machine.idle


def test_a_save_that_the_lost_node_was_to_write_gives_way_and_its_attempt_is_not_repeated() -> None:
    run = Driven()
    run.kept(10)
    assert persist(12) in run.snapshot(12)
    abandoned = [one for one in lost(run) if isinstance(one, Abandon | Skip)]
    assert abandoned
    assert not run.machine.saves_newer(1, 10)
    assert persist(12, attempt=2) in found(run, 12)


def test_a_newer_save_that_can_still_be_committed_is_known() -> None:
    run = Driven()
    run.kept(10)
    run.snapshot(12)
    run.persisted(12, ranks=(1,))
    lost(run)
    assert run.machine.saves_newer(1, 10)
    assert not run.machine.saves_newer(1, 12)
    assert run.persisted(12, ranks=(0,)) == [commit(12)]
