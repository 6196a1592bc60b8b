"""What is deleted after a commit, and what never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, eligible
from orchestrator.decide.retention import Delete, expired
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


def deleted(
    generations: list[GenerationRecord],
    checkpoints: list[CheckpointRecord],
    orphans: list[CheckpointRecord] | None = None,
    *,
    rejected: set[str] | None = None,
    protected: set[str] | None = None,
    keep_last: int = 2,
    my_generation: int = 9,
) -> list[str]:
    found: tuple[Delete, ...] = expired(
        generations=generations,
        checkpoints=checkpoints,
        orphans=orphans or [],
        rejected=rejected or set(),
        protected=protected or set(),
        my_generation=my_generation,
        keep_last=keep_last,
    )
    return [item.name for item in found]


FIVE = [checkpoint(1, step) for step in (10, 20, 30, 40, 50)]


def test_all_but_the_newest_are_deleted_oldest_first() -> None:
    assert deleted([generation(1)], FIVE) == [item.name for item in FIVE[:3]]


def test_a_quarantined_checkpoint_stays_and_is_not_counted_as_kept() -> None:
    assert deleted([generation(1)], FIVE, rejected={FIVE[4].name}) == [FIVE[0].name, FIVE[1].name]


def test_what_is_being_restored_stays() -> None:
    assert deleted([generation(1)], FIVE, protected={FIVE[0].name}) == [FIVE[1].name, FIVE[2].name]


def test_a_killed_save_is_cleaned_up_after_a_commit_and_not_before() -> None:
    orphan = checkpoint(1, 45)
    assert deleted([generation(1)], [], [orphan]) == []
    assert deleted([generation(1)], FIVE[3:4], [orphan]) == []
    assert deleted([generation(1)], FIVE[3:], [orphan]) == [orphan.name]


def test_the_leftovers_of_an_earlier_generation_go_however_high_their_steps() -> None:
    generations = [generation(1), generation(2, 1, 40)]
    assert deleted(generations, [FIVE[3], checkpoint(2, 45)], [FIVE[4]]) == [FIVE[4].name]


def test_the_failed_attempts_before_a_committed_one_go() -> None:
    assert deleted([generation(1)], [checkpoint(1, 20, 2)], [checkpoint(1, 20, 1)]) == [checkpoint(1, 20, 1).name]


def test_a_save_that_began_after_the_caller_asked_what_is_in_flight_is_not_deleted() -> None:
    # Seen as unfinished, and unknown to the caller, who may have asked before it began or after it was committed.
    assert deleted([generation(1)], FIVE, [checkpoint(1, 60)]) == [item.name for item in FIVE[:3]]


def test_an_attempt_that_is_being_written_is_no_leftover() -> None:
    orphan = checkpoint(1, 45)
    assert deleted([generation(1)], FIVE[3:], [orphan], protected={orphan.name}) == []


def test_a_rolled_back_timeline_goes_once_the_kept_checkpoints_are_past_it() -> None:
    generations = [generation(1), generation(2, 1, 10)]
    left = [checkpoint(1, 20), checkpoint(1, 90)]
    kept = [checkpoint(2, 20), checkpoint(2, 30)]
    assert deleted(generations, [checkpoint(1, 10), *left, *kept]) == [checkpoint(1, 10).name, left[0].name]


def test_nothing_of_a_higher_generation_is_touched() -> None:
    generations = [generation(1), generation(2, 1, 50)]
    orphans = [checkpoint(2, 60)]
    assert deleted(generations, FIVE, orphans, my_generation=1) == [item.name for item in FIVE[:3]]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        deleted([generation(1)], FIVE, keep_last=0)


_RECORDS = st.builds(checkpoint, st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))
_GENERATIONS = st.lists(
    st.builds(generation, st.integers(1, 4), st.none() | st.integers(1, 4), st.integers(0, 6)),
    unique_by=lambda record: record.number,
)


@given(_GENERATIONS, st.sets(_RECORDS, max_size=12), st.integers(1, 4), st.data())
def test_whatever_is_there_the_floor_stays_and_only_the_permitted_goes(
    generations: list[GenerationRecord], records: set[CheckpointRecord], keep_last: int, data: st.DataObject
) -> None:
    ordered = sorted(records, key=lambda record: record.name)
    checkpoints = [record for record in ordered if data.draw(st.booleans())]
    orphans = [record for record in ordered if record not in checkpoints]
    rejected = {record.name for record in checkpoints if data.draw(st.booleans())}
    protected = {record.name for record in ordered if data.draw(st.booleans())}
    mine = data.draw(st.integers(1, 4))
    names = deleted(
        generations,
        checkpoints,
        orphans,
        rejected=rejected,
        protected=protected,
        keep_last=keep_last,
        my_generation=mine,
    )
    assert len(set(names)) == len(names)
    gone = set(names)
    verified = [record.name for record in eligible(generations, checkpoints) if record.name not in rejected]
    assert not gone & set(verified[:keep_last])
    assert not gone & (rejected | protected)
    newest = max(((item.generation, item.step) for item in checkpoints if item.name in verified), default=(0, 0))
    assert all((orphan.generation, orphan.step) <= newest for orphan in orphans if orphan.name in gone)
    assert all(record.generation <= mine for record in ordered if record.name in gone)
    if len(verified) < keep_last:
        assert not gone & {record.name for record in checkpoints}
    after = [record for record in checkpoints if record.name not in gone]
    assert [record.name for record in eligible(generations, after)][:1] == [
        record.name for record in eligible(generations, checkpoints)
    ][:1]
