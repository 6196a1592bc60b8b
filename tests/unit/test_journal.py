"""The record of consumed samples: whole lines after a kill, one effective record for each step."""

import errno
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.data.journal import (
    JournalContent,
    SampleJournal,
    audit_samples,
    effective_samples,
    read_journal,
)
from workers.data.order import DataOrder
from workers.errors import CheckpointDamaged


def written(path: Path, *steps: tuple[int, list[tuple[int, int]]]) -> None:
    journal = SampleJournal(path)
    for step, samples in steps:
        journal.record(step, samples)
    journal.close()


def test_what_was_recorded_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "g0001-rank-00000.jsonl"
    journal = SampleJournal(path)
    journal.record(1, [(0, 7), (0, 3), (1, 9), (0, 2)])
    journal.dropped(0, [5, 6])
    journal.record(2, [])
    journal.close()
    assert read_journal(path) == JournalContent(steps={1: ((0, 7), (0, 3), (1, 9), (0, 2)), 2: ()}, dropped={0: (5, 6)})


def test_two_records_of_one_step_both_count(tmp_path: Path) -> None:
    written(tmp_path / "j", (1, [(0, 1)]), (1, [(0, 1)]))
    assert read_journal(tmp_path / "j").steps == {1: ((0, 1), (0, 1))}


def test_a_record_survives_a_kill_right_after_it(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        SampleJournal(tmp_path / "j").record(1, [(0, 4)])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert read_journal(tmp_path / "j").steps == {1: ((0, 4),)}


def test_a_torn_tail_is_passed_over_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, (1, [(0, 1)]), (2, [(0, 2)]))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        before = read_journal(path).steps
        assert list(before) == [1, 2][: whole[:length].count(b"\n")]
        written(path, (3, [(0, 3)]))
        assert read_journal(path).steps == {**before, 3: ((0, 3),)}


@pytest.mark.parametrize(
    "line", [b"junk", b"[]", b'{"step":1}', b'{"step":1,"samples":[[0]]}', b'{"dropped":[0]}', b"3"]
)
def test_a_whole_line_that_is_no_record_is_an_error_that_names_it(tmp_path: Path, line: bytes) -> None:
    written(tmp_path / "j", (1, [(0, 1)]))
    with open(tmp_path / "j", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(CheckpointDamaged, match=rf"line 2 .*{tmp_path / 'j'}"):
        read_journal(tmp_path / "j")


def test_a_full_disk_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SampleJournal(tmp_path / "j")
    room = [5, 0, 1000]

    def write(file: int, data: bytes) -> int:
        if room[0] == 0:
            room.pop(0)
            raise OSError(errno.ENOSPC, "no space left")
        return real_write(file, data[: room.pop(0)])

    real_write = os.write
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="no space"):
        journal.record(1, [(0, 1)])
    assert (tmp_path / "j").stat().st_size == 5
    journal.record(2, [(0, 2)])
    assert read_journal(tmp_path / "j").steps == {1: ((0, 1),), 2: ((0, 2),)}


def journal_of(steps: range, rank: int, generation: int) -> JournalContent:
    # The generation stands in for the sample id, to show which generation's record was picked.
    return JournalContent(steps={step: ((0, 1000 * step + 10 * generation + rank),) for step in steps})


def test_only_steps_on_the_lineage_count() -> None:
    # Generation 1 reached step 12 and was restored to 10; 2 went back to 5, so 1 counts to 5 only; 3 follows 2.
    journals = {
        (generation, rank): journal_of(steps, rank, generation)
        for generation, steps in {1: range(1, 13), 2: range(6, 9), 3: range(8, 11)}.items()
        for rank in (0, 1)
    }
    effective = effective_samples(journals, [(3, 7, 10), (1, 0, 5), (2, 5, 7)])
    picked = {step: records[0][0][1] % 1000 // 10 for step, records in effective.steps.items()}
    assert picked == {**dict.fromkeys(range(1, 6), 1), 6: 2, 7: 2, **dict.fromkeys(range(8, 11), 3)}
    assert effective.holes == ()
    assert [sample for _, sample in effective.samples()][:4] == [1010, 1011, 2010, 2011]


def test_a_step_without_a_record_is_a_hole() -> None:
    journals = {(1, 0): journal_of(range(1, 4), 0, 1), (1, 1): journal_of(range(1, 3), 1, 1), (2, 0): JournalContent()}
    assert effective_samples(journals, [(1, 0, 3), (2, 3, 4)]).holes == ((1, 1, 3), (2, 0, 4), (2, 1, 4))


def test_audit_finds_missing_and_repeated_samples() -> None:
    due = [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert audit_samples(due, due) == audit_samples([], [])
    audit = audit_samples([(0, 1), (0, 1), (0, 3), (2, 9)], due)
    assert audit.missing == ((0, 2), (1, 1))
    assert audit.duplicated == ((0, 1), (2, 9))


def test_samples_of_skipped_batches_are_not_missing_and_are_too_many_if_they_were_consumed(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path / "j")
    journal.record(1, [(0, 1)])
    journal.skipped(0, 1, [2, 3])
    journal.close()
    effective = effective_samples({(1, 0): read_journal(tmp_path / "j")}, [(1, 0, 1)])
    assert effective.skipped == {(0, 1): (2, 3)}
    skipped = list(effective.samples_skipped())
    due = [(0, 1), (0, 2), (0, 3)]
    assert audit_samples(effective.samples(), due, skipped=skipped) == audit_samples([], [])
    assert audit_samples([(0, 1), (0, 2)], due, skipped=skipped).duplicated == ((0, 2),)


@settings(deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4), short=st.booleans())
def test_a_run_with_any_restores_consumes_each_sample_once(cuts: list[tuple[int, int]], short: bool) -> None:
    """A cut (done, kept) does some steps and then goes back to a step that was kept."""
    world_size, journals, chain, restored = 2, {}, [], 0
    orders = [
        DataOrder(
            samples=23,
            global_batch_size=4,
            seed=1,
            rank=rank,
            world_size=world_size,
            last_batch="short" if short else "drop",
        )
        for rank in range(world_size)
    ]
    per_epoch = orders[0].batches_per_epoch
    for generation, (done, kept) in enumerate([*cuts, (9, 9)], start=1):
        reached = restored + done
        for rank, data in enumerate(orders):
            steps = {
                step: tuple((divmod(step - 1, per_epoch)[0], i) for i in data.batch_ids(*divmod(step - 1, per_epoch)))
                for step in range(restored + 1, reached + 1)
            }
            journals[generation, rank] = JournalContent(steps=steps)
        last = restored + min(kept, done)
        chain.append((generation, restored, last))
        restored = last
    effective = effective_samples(journals, chain)
    due = list(orders[0].handed_out(*divmod(restored, per_epoch)))
    assert effective.holes == ()
    assert list(effective.samples()) == due
    assert audit_samples(effective.samples(), due) == audit_samples([], [])
