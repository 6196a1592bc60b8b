"""What is deleted after a commit, after a failed save, and on a full disk."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_samples import make_manifest

from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.housekeeping import Housekeeping
from orchestrator.observe.ledger import Ledger, read_ledger
from workers.checkpoint.manifest import ShardRecord, checkpoint_dir, checkpoint_name, shard_file
from workers.checkpoint.store import LocalStore

CHECKPOINT_BYTES = 1000


class Disk(LocalStore):
    """Says how much is free: so much, and what was deleted."""

    free_at_first = 0
    deleted = 0

    def free_bytes(self) -> int:
        return self.free_at_first + self.deleted * CHECKPOINT_BYTES

    def remove_tree(self, path: str) -> None:
        self.deleted += self.exists(path)
        super().remove_tree(path)


class House:
    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir()
        self.disk = Disk(run_dir)
        self.archive = RunArchive(self.disk)
        record = GenerationRecord(
            number=1,
            driver="d",
            parent=None,
            parent_generation=None,
            restored_step=0,
            source="fresh",
            reason="start",
            created_at=0.0,
            world_size=1,
        )
        self.archive.create_generation(record, seen=self.archive.scan())
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.committed: set[str] = set()
        self.protected: set[str] = set()
        self.housekeeping = Housekeeping(
            archive=self.archive,
            ledger=self.ledger,
            keep_last=10,
            keep_last_min=2,
            committed=self.committed,
            protected=lambda: self.protected,
        )

    def attempt(self, step: int, *, commit: bool = True) -> str:
        name = checkpoint_name(step, 1, 1)
        self.disk.make_dir(checkpoint_dir(name))
        if commit:
            file = shard_file(0, 1)
            shard = ShardRecord(file=file, rank=0, bytes=1, digest="0", verified_from="device", tensors=())
            (self.disk.root / checkpoint_dir(name) / file).write_bytes(b"x")
            self.archive.commit(replace(make_manifest((shard,), step=step), generation=1))
            self.committed.add(name)
        return name

    @property
    def steps(self) -> list[int]:
        names = sorted(path.name for path in (self.disk.root / "checkpoints").iterdir())
        return [int(name.split("-")[1]) for name in names]


@pytest.fixture
def house(tmp_path: Path) -> House:
    subject = House(tmp_path / "run")
    for step in (10, 20, 30, 40, 50):
        subject.attempt(step)
    return subject


def test_room_is_made_from_the_oldest_and_only_as_much_as_is_wanted(house: House) -> None:
    house.housekeeping.make_room(2 * CHECKPOINT_BYTES, 1)
    assert house.steps == [30, 40, 50]
    deleted = [entry["checkpoint"] for entry in read_ledger(house.ledger.path) if entry["kind"] == "deleted"]
    assert deleted == [checkpoint_name(10, 1, 1), checkpoint_name(20, 1, 1)]
    assert house.committed == {checkpoint_name(step, 1, 1) for step in (30, 40, 50)}


def test_however_full_the_disk_the_newest_few_stay(house: House) -> None:
    house.housekeeping.make_room(100 * CHECKPOINT_BYTES, 1)
    assert house.steps == [40, 50]
    house.housekeeping.make_room(100 * CHECKPOINT_BYTES, 1)
    assert house.steps == [40, 50]


def test_one_goes_also_if_the_file_system_says_that_there_is_room(house: House) -> None:
    house.disk.free_at_first = 10**9
    house.housekeeping.make_room(CHECKPOINT_BYTES, 1)
    assert house.steps == [20, 30, 40, 50]


def test_what_is_restored_or_written_stays_and_so_does_a_quarantined_one(house: House) -> None:
    house.protected.add(checkpoint_name(10, 1, 1))
    house.archive.quarantine(checkpoint_name(50, 1, 1), "one bit differs")
    house.housekeeping.make_room(100 * CHECKPOINT_BYTES, 1)
    assert house.steps == [10, 30, 40, 50], "the newest verified ones are 40 and 30"


def test_a_driver_that_was_taken_over_makes_no_room(house: House) -> None:
    house.housekeeping.make_room(100 * CHECKPOINT_BYTES, 0)
    assert house.steps == [10, 20, 30, 40, 50]


def test_what_a_failed_save_left_goes_at_once_and_never_a_committed_one(house: House) -> None:
    left = house.attempt(60, commit=False)
    for name in (left, checkpoint_name(50, 1, 1), checkpoint_name(70, 1, 1)):
        house.housekeeping.discard(name, 1)
    assert house.steps == [10, 20, 30, 40, 50]
    house.committed.clear()  # as after the coordinator's restart, without a ledger
    house.housekeeping.discard(checkpoint_name(50, 1, 1), 1)
    assert house.steps == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOENT])
def test_storage_that_refuses_to_delete_stops_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(house.disk, "rename", refuse)
    house.housekeeping.clean_up(1)
    house.housekeeping.make_room(CHECKPOINT_BYTES, 1)
    house.housekeeping.discard(house.attempt(60, commit=False), 1)
    assert house.steps == [10, 20, 30, 40, 50, 60]
