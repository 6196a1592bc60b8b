"""The walk back from the highest generation, checked against a plain model: the states a run went through."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.lineage import (
    CheckpointRecord,
    GenerationRecord,
    chain,
    current,
    eligible,
    newest,
    next_number,
    without_void,
)
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


def test_a_rolled_back_timeline_does_not_count_however_high_its_steps() -> None:
    generations = [generation(1), generation(2, 1, 20)]
    found = eligible(generations, [checkpoint(1, 20), checkpoint(1, 21), checkpoint(1, 999), checkpoint(2, 21)])
    assert [(item.generation, item.step) for item in found] == [(2, 21), (1, 20)]


def test_a_commit_that_comes_after_the_next_generation_counts_up_to_the_step_that_was_restored() -> None:
    # Restored from memory at 40, before 40 was on disk.
    generations = [generation(1), generation(2, 1, 40)]
    assert newest(generations, [checkpoint(1, 20)]) == checkpoint(1, 20)
    assert newest(generations, [checkpoint(1, 20), checkpoint(1, 40)]) == checkpoint(1, 40)
    assert newest(generations, [checkpoint(1, 20), checkpoint(1, 60)]) == checkpoint(1, 20)


def test_a_generation_that_was_passed_over_does_not_count() -> None:
    generations = [generation(1), generation(2, 1, 20), generation(3, 1, 20)]
    assert eligible(generations, [checkpoint(2, 40), checkpoint(1, 20)]) == (checkpoint(1, 20),)


def test_a_fresh_start_leaves_all_before_it_behind() -> None:
    assert eligible([generation(1), generation(2)], [checkpoint(1, 20)]) == ()


def test_a_checkpoint_shows_its_generation_when_the_generation_file_is_gone() -> None:
    assert eligible([generation(1)], [checkpoint(1, 20), checkpoint(2, 5)]) == (checkpoint(2, 5),)


def test_a_parent_whose_file_is_gone_still_counts_and_the_path_ends_there() -> None:
    generations = [generation(1), generation(3, 2, 40)]
    assert eligible(generations, [checkpoint(1, 20), checkpoint(2, 40)]) == (checkpoint(2, 40),)


def test_parents_that_form_a_circle_end_the_path() -> None:
    generations = [generation(1, 2, 5), generation(2, 1, 5), generation(3, 3, 5)]
    assert [link.generation for link in chain(generations)] == [3]
    assert [link.generation for link in chain(generations[:2])] == [2, 1]


def test_nothing_known_means_nothing_eligible_and_the_first_number() -> None:
    assert chain([]) == ()
    assert newest([], []) is None
    assert current([]) is None
    assert next_number([]) == 1
    assert next_number([3, 9, 4]) == 10


@given(st.data())
def test_eligible_is_exactly_what_lies_on_the_path_that_led_to_the_present(data: st.DataObject) -> None:
    generations: list[GenerationRecord] = []
    paths: dict[int, list[tuple[int, int]]] = {}
    saved: set[tuple[int, int]] = set()
    for number in range(1, data.draw(st.integers(1, 7)) + 1):
        states = [(gen, state) for gen in paths for state in range(len(paths[gen]))]
        origin = data.draw(st.none() | st.sampled_from(states)) if states else None
        if origin is None:
            path: list[tuple[int, int]] = []
            generations.append(generation(number))
        else:
            path = paths[origin[0]][: origin[1] + 1]
            generations.append(generation(number, parent=path[-1][0], step=path[-1][1]))
        step = path[-1][1] if path else 0
        for advance in data.draw(st.lists(st.integers(1, 2), max_size=4)):
            step += advance
            path = [*path, (number, step)]
            if data.draw(st.booleans()):
                saved.add((number, step))
        paths[number] = path
    order = data.draw(st.permutations(sorted(saved)))
    shuffled = data.draw(st.permutations(generations))
    found = [(item.generation, item.step) for item in eligible(shuffled, [checkpoint(*key) for key in order])]
    assert found == [state for state in reversed(paths[len(generations)]) if state in saved]


def test_the_highest_generations_do_not_count_if_they_left_nothing_and_are_not_known_to_have_begun() -> None:
    records = [generation(1), generation(2, 1, 10), generation(3, 1, 10)]
    assert without_void(records, [checkpoint(1, 10)], {1}) == (records[0],)
    assert without_void(records, [checkpoint(1, 10)], {1, 2}) == (records[0], records[1])
    assert without_void(records, [checkpoint(1, 10), checkpoint(3, 20)], {1}) == tuple(records)
    assert without_void(records, [checkpoint(1, 10)], {1, 3}) == tuple(records)


def test_nothing_is_void_where_nothing_is_known_or_a_file_cannot_be_read() -> None:
    records = [generation(1), generation(2, 1, 10)]
    assert without_void(records, [checkpoint(1, 10)], ()) == tuple(records)
    unread = replace(records[1], source="unknown", parent_generation=None)
    assert without_void([records[0], unread], [checkpoint(1, 10)], {1}) == (records[0], unread)


def test_what_was_committed_beside_a_generation_that_never_began_is_the_newest() -> None:
    """It was to restore step 10, and its driver was gone before it could see step 20."""
    checkpoints = [checkpoint(1, 10), checkpoint(1, 20)]
    records = [generation(1), generation(2, 1, 10)]
    assert newest(records, checkpoints) == checkpoints[0]
    assert newest(without_void(records, checkpoints, {1}), checkpoints) == checkpoints[1]
