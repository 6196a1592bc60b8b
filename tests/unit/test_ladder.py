"""What to restore from; above all, when not to start afresh."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.ladder import Fresh, FromMemory, NothingVerifies, Restore, choose
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, eligible
from workers import errors
from workers.checkpoint.manifest import checkpoint_name


def generation(number: int, parent: int | None = None, step: int = 0) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver="d",
        parent=None,
        parent_generation=parent,
        restored_step=step,
        source="fresh" if parent is None else "checkpoint",
        reason="start",
        created_at=0.0,
        world_size=2,
    )


def checkpoint(gen: int, step: int, attempt: int = 1) -> CheckpointRecord:
    return CheckpointRecord(name=checkpoint_name(step, gen, attempt), generation=gen, step=step, attempt=attempt)


NEWER, OLDER = checkpoint(1, 40), checkpoint(1, 20)


def test_the_newest_rung_is_taken() -> None:
    choice = choose(generations=[generation(1)], checkpoints=[OLDER, NEWER], rejected={})
    assert choice == Restore(name=NEWER.name, generation=1, step=40)


def in_memory(gen: int, step: int) -> MemorySet:
    return MemorySet(generation=gen, step=step, where={0: "k", 1: "k"})


def test_a_set_in_memory_that_is_newer_than_every_checkpoint_is_taken() -> None:
    memory = in_memory(1, 47)
    choice = choose(generations=[generation(1)], checkpoints=[OLDER, NEWER], rejected={}, memory=memory)
    assert choice == FromMemory(memory=memory, parent=None)
    assert choose(generations=[generation(1)], checkpoints=[], rejected={}, memory=memory) == choice


def test_of_a_set_in_memory_and_the_checkpoint_of_the_same_state_memory_is_taken_and_the_checkpoint_named() -> None:
    memory = in_memory(1, 40)
    choice = choose(generations=[generation(1)], checkpoints=[OLDER, NEWER], rejected={}, memory=memory)
    assert choice == FromMemory(memory=memory, parent=NEWER.name)
    damaged = choose(generations=[generation(1)], checkpoints=[NEWER], rejected={NEWER.name: "bad"}, memory=memory)
    assert damaged == FromMemory(memory=memory, parent=None)


def test_a_set_in_memory_is_older_than_a_checkpoint_only_where_that_cannot_be_used() -> None:
    memory, run = in_memory(1, 30), [generation(1)]
    taken = choose(generations=run, checkpoints=[OLDER, NEWER], rejected={}, memory=memory)
    assert taken == Restore(name=NEWER.name, generation=1, step=40)
    bad = {NEWER.name: "bad", OLDER.name: "bad"}
    choice = choose(generations=run, checkpoints=[OLDER, NEWER], rejected=bad, memory=memory)
    assert choice == FromMemory(memory=memory, parent=None, passed=((NEWER.name, "bad"),))


def test_a_set_in_memory_of_a_timeline_that_was_left_is_not_taken() -> None:
    run = [generation(1), generation(2, parent=1, step=20)]
    choice = choose(generations=run, checkpoints=[OLDER, NEWER], rejected={}, memory=in_memory(1, 47))
    assert choice == Restore(name=OLDER.name, generation=1, step=20)
    choice = choose(generations=run, checkpoints=[OLDER, NEWER], rejected={}, memory=in_memory(2, 23))
    assert isinstance(choice, FromMemory)


def test_a_rejected_rung_is_passed_and_named_with_its_reason() -> None:
    choice = choose(generations=[generation(1)], checkpoints=[OLDER, NEWER], rejected={NEWER.name: "one bit differs"})
    assert choice == Restore(name=OLDER.name, generation=1, step=20, passed=((NEWER.name, "one bit differs"),))


def test_when_every_rung_is_rejected_the_run_stops_and_the_error_lists_each_with_its_reason() -> None:
    rejected = {NEWER.name: "rank 1's shard is short", OLDER.name: "no manifest"}
    choice = choose(generations=[generation(1)], checkpoints=[OLDER, NEWER], rejected=rejected)
    assert isinstance(choice, NothingVerifies)
    error = choice.error("/runs/gpt")
    assert isinstance(error, errors.NothingVerifies)
    for words in ("/runs/gpt", *rejected, *rejected.values()):
        assert words in str(error)


def test_a_checkpoint_of_a_timeline_that_was_left_is_neither_restored_nor_silently_replaced_by_a_fresh_start() -> None:
    choice = choose(generations=[generation(1), generation(2)], checkpoints=[OLDER], rejected={})
    assert isinstance(choice, NothingVerifies)
    assert choice.found == ((OLDER.name, "belongs to a timeline that generation 2 does not continue"),)


def test_a_run_that_began_afresh_beside_an_unfinished_save_does_so_again_when_that_is_committed_late() -> None:
    late, other = checkpoint(1, 10), checkpoint(1, 20)
    again = replace(generation(2), unfinished=(late.name,))
    afresh = Fresh(unfinished=(late.name,))
    assert choose(generations=[generation(1), again], checkpoints=[late], rejected={}, begun={1, 2}) == afresh
    # Nobody looked again after this generation's file was in place: the commit may have been first.
    assert isinstance(choose(generations=[generation(1), again], checkpoints=[late], rejected={}), NothingVerifies)
    told = choose(
        generations=[generation(1), again], checkpoints=[late], rejected={}, begun={1, 2}, committed={late.name}
    )
    assert isinstance(told, NothingVerifies)
    # What was not seen to be unfinished may have been put back by somebody.
    for generations, checkpoints in (
        ([generation(1), again], [late, other]),
        ([generation(1), replace(again, unfinished=())], [late]),
        ([generation(1), replace(again, source="unknown")], [late]),
    ):
        choice = choose(generations=generations, checkpoints=checkpoints, rejected={}, begun={1, 2})
        assert isinstance(choice, NothingVerifies), (generations, checkpoints)
    # Once it has saved something itself, that is what counts.
    mine = checkpoint(2, 10)
    choice = choose(
        generations=[generation(1), again], checkpoints=[late, mine], rejected={mine.name: "damaged"}, begun={1, 2}
    )
    assert isinstance(choice, NothingVerifies) and [name for name, _ in choice.found] == [mine.name, late.name]


def test_an_empty_run_starts_afresh() -> None:
    assert choose(generations=[], checkpoints=[], rejected={}) == Fresh()


def test_a_run_that_was_killed_during_its_first_save_starts_afresh_and_says_what_was_left() -> None:
    tries = [checkpoint(1, 20, 1), checkpoint(1, 20, 2), checkpoint(2, 20, 1)]
    choice = choose(generations=[generation(1), generation(2)], checkpoints=[], rejected={}, unfinished=tries)
    assert choice == Fresh(unfinished=(tries[2].name, tries[1].name, tries[0].name))


def test_a_run_whose_saves_never_completed_is_not_started_afresh() -> None:
    choice = choose(generations=[generation(1)], checkpoints=[], rejected={}, unfinished=[OLDER, NEWER])
    assert isinstance(choice, NothingVerifies)
    assert [name for name, _ in choice.found] == [NEWER.name, OLDER.name]


_CHECKPOINTS = st.builds(checkpoint, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2))
_GENERATIONS = st.lists(
    st.builds(generation, st.integers(1, 3), st.none() | st.integers(1, 3), st.integers(0, 4)),
    unique_by=lambda record: record.number,
)


@given(_GENERATIONS, st.sets(_CHECKPOINTS), st.data())
def test_a_choice_is_the_newest_good_rung_or_an_error_and_never_fresh_beside_a_checkpoint(
    generations: list[GenerationRecord], checkpoints: set[CheckpointRecord], data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.sampled_from(sorted(item.name for item in checkpoints)))) if checkpoints else set()
    choice = choose(generations=generations, checkpoints=checkpoints, rejected=dict.fromkeys(bad, "bad"))
    good = [item.name for item in eligible(generations, checkpoints) if item.name not in bad]
    match choice:
        case Restore():
            assert choice.name == good[0]
        case NothingVerifies():
            assert not good
            assert sorted(name for name, _ in choice.found) == sorted(item.name for item in checkpoints)
        case Fresh():
            assert not checkpoints


def test_the_rungs_below_are_not_needed_and_not_missed() -> None:
    choice = choose(generations=[generation(1), generation(2, 1, 20)], checkpoints=[checkpoint(2, 40)], rejected={})
    assert isinstance(choice, Restore)
    assert choice.step == 40


@pytest.mark.parametrize("attempt", [1, 2])
def test_of_two_attempts_at_one_step_the_later_is_taken(attempt: int) -> None:
    both = [checkpoint(1, 20, 1), checkpoint(1, 20, 2)]
    rejected = {} if attempt == 2 else {both[1].name: "bad"}
    choice = choose(generations=[generation(1)], checkpoints=both, rejected=rejected)
    assert isinstance(choice, Restore)
    assert choice.name == both[attempt - 1].name
