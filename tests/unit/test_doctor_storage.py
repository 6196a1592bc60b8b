"""A storage is examined for real; one that misbehaves is caught; nothing is left behind."""

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.doctor.findings_storage import judge_storage
from orchestrator.doctor.mounts import find_mount, mount_of
from orchestrator.doctor.speed import measure_memory, random_memory
from orchestrator.doctor.storage import look_at_storage
from workers.checkpoint.files import StoreFile
from workers.checkpoint.store import LocalStore
from workers.errors import EnvironmentProblem

SAMPLE_BYTES = 2 << 20


@pytest.fixture
def data() -> Iterator[mmap.mmap]:
    with random_memory(SAMPLE_BYTES) as memory:
        yield memory


def problems(directory: Path, data: mmap.mmap, store: type[LocalStore] = LocalStore) -> dict[str, str]:
    found = look_at_storage(directory, data, rounds=1, open_store=store)
    assert list(directory.iterdir()) == []
    return {finding.id: finding.seen for finding in judge_storage(found) if finding.level == "problem"}


def test_a_good_storage_is_measured_and_left_as_it_was(tmp_path: Path, data: mmap.mmap) -> None:
    found = look_at_storage(tmp_path, data, rounds=3)
    assert found.problem == ""
    assert {check.name: check.problem for check in found.checks if check.problem} == {}
    assert [check.name for check in found.checks][-1] == "read_back"
    assert found.speeds is not None
    assert found.speeds.file_bytes == SAMPLE_BYTES
    assert found.speeds.write_buffered.rounds == 3
    assert (
        found.speeds.write_buffered.slowest <= found.speeds.write_buffered.median <= found.speeds.write_buffered.fastest
    )
    assert found.speeds.sync_file.rounds > 0
    assert list(tmp_path.iterdir()) == []


class LinksOverwrite(LocalStore):
    def link(self, source: str, target: str) -> None:
        shutil.copyfile(self.local_path(source), self.local_path(target))


class LinksRefused(LocalStore):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


class RenamesByCopying(LocalStore):
    def move(self, source: str, target: str) -> None:
        if self.local_path(source).is_dir():
            return super().move(source, target)
        shutil.copyfile(self.local_path(source), self.local_path(target))
        self.unlink(source)


class RenamesWatched(LocalStore):
    """Between the steps of its rename it waits until the names were looked at, unless nobody looks any more."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._looks = threading.Semaphore(0)

    def exists(self, path: str) -> bool:
        self._looks.release()
        return super().exists(path)

    def wait_for_looks(self) -> None:
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(5):
            if not self._looks.acquire(timeout=0.2):
                return


class RenamesWithBothNames(RenamesWatched):
    def move(self, source: str, target: str) -> None:
        if self.local_path(source).is_dir():
            return super().move(source, target)
        os.link(self.local_path(source), self.local_path(target))
        self.wait_for_looks()
        self.unlink(source)


class RenamesWithNoName(RenamesWatched):
    def move(self, source: str, target: str) -> None:
        if self.local_path(source).is_dir():
            return super().move(source, target)
        super().move(source, f"{target}.between")
        self.wait_for_looks()
        super().move(f"{target}.between", target)


class RenamesBeforeAllIsThere(RenamesWatched):
    def move(self, source: str, target: str) -> None:
        if self.local_path(source).is_dir():
            return super().move(source, target)
        content = self.read_bytes(source)
        os.truncate(self.local_path(source), len(content) // 2)
        super().move(source, target)
        self.wait_for_looks()
        self.local_path(target).write_bytes(content)


class RenamesKeepTheOldName(LocalStore):
    def move(self, source: str, target: str) -> None:
        os.link(self.local_path(source), self.local_path(target))


class CreatesTwice(LocalStore):
    def open_new(self, path: str, *, direct: bool = False) -> StoreFile:
        self.local_path(path).unlink(missing_ok=True)
        return super().open_new(path, direct=direct)


class DirectoriesNotSynced(LocalStore):
    def sync_dir(self, path: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class ListsLate(LocalStore):
    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        return super().list_dir(path, fresh=fresh)[:-1]


class FlipsABit(LocalStore):
    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        local = self.local_path(path)
        if local.stat().st_size > 1 << 20:
            content = bytearray(local.read_bytes())
            content[4321:4324] = b"bad"
            local.write_bytes(content)
        return super().open_existing(path, direct=direct)


@pytest.mark.parametrize(
    ("store", "name", "told"),
    [
        (LinksOverwrite, "storage.link", "linked once more"),
        (LinksOverwrite, "storage.race", "succeeded"),
        (LinksRefused, "storage.link", "not permitted"),
        (RenamesByCopying, "storage.rename", "while a file was renamed"),
        (RenamesWithBothNames, "storage.rename", "both names were there"),
        (RenamesWithNoName, "storage.rename", "neither name was there"),
        (RenamesBeforeAllIsThere, "storage.rename", "held a part of it"),
        (RenamesKeepTheOldName, "storage.rename", ""),
        (CreatesTwice, "storage.exclusive", "created once more"),
        (DirectoriesNotSynced, "storage.sync_dir", "Invalid argument"),
        (ListsLate, "storage.listing", "lists 19"),
        (FlipsABit, "storage.read_back", "other bytes"),
    ],
)
def test_a_storage_that_misbehaves_is_caught(
    store: type[LocalStore], name: str, told: str, tmp_path: Path, data: mmap.mmap
) -> None:
    found = problems(tmp_path, data, store)
    assert name in found
    assert told in found[name]


class Full(LocalStore):
    def free_bytes(self) -> int:
        return SAMPLE_BYTES


def test_a_storage_without_room_is_not_written_to(tmp_path: Path, data: mmap.mmap) -> None:
    found = problems(tmp_path, data, Full)
    assert found == {"storage.speed": "2 MiB are free, and measuring the speed needs 4"}


class FullAfterAWhile(LocalStore):
    def open_new(self, path: str, *, direct: bool = False) -> StoreFile:
        if path == "buffered":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open_new(path, direct=direct)


def test_a_quota_that_ends_the_measuring_is_told(tmp_path: Path, data: mmap.mmap) -> None:
    found = problems(tmp_path, data, FullAfterAWhile)
    assert list(found) == ["storage.speed"]
    assert "No space left" in found["storage.speed"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, data: mmap.mmap) -> None:
    class Interrupted(LocalStore):
        def open_new(self, path: str, *, direct: bool = False) -> StoreFile:
            if path == "buffered":
                raise KeyboardInterrupt
            return super().open_new(path, direct=direct)

    with pytest.raises(KeyboardInterrupt):
        look_at_storage(tmp_path, data, rounds=1, open_store=Interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_has_vanished_is_a_problem_and_no_crash(tmp_path: Path, data: mmap.mmap) -> None:
    found = look_at_storage(tmp_path / "gone", data, rounds=1)
    assert [finding.id for finding in judge_storage(found) if finding.level == "problem"] == ["storage.create"]


# ---------------------------------------------------------------- memory


def test_memory_is_measured(data: mmap.mmap) -> None:
    found = measure_memory(data, available_bytes=1 << 30, rounds=2)
    for speed in (found.copy, found.copy_all, found.copy_fresh, found.hash):
        assert 0 < speed.slowest <= speed.median <= speed.fastest
        assert speed.rounds == 2


def test_measuring_memory_is_refused_where_there_is_none(data: mmap.mmap) -> None:
    with pytest.raises(EnvironmentProblem, match="--sample"):
        measure_memory(data, available_bytes=SAMPLE_BYTES, rounds=1)


# ---------------------------------------------------------------- mounts

MOUNTINFO = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=8g
41 22 0:40 / /mnt/ckpt rw,relatime - nfs4 server:/export rw,vers=4.2,soft,proto=tcp
42 41 0:41 / /mnt/ckpt/with\040space rw - xfs /dev/sdb rw,nobarrier
43 22 0:42 / /bucket rw - fuse.s3fs s3fs rw
44 22 0:43 / /bucket2 rw - fuse mountpoint-s3 rw
45 22 0:44 / /var/lib rw - overlay overlay rw,lowerdir=/a
46 45 0:45 / /var/lib rw - ext4 /dev/vdb rw
47 22 0:46 / /odd rw - newfs thing rw
a line that is broken
"""


@pytest.mark.parametrize(
    ("path", "file_system", "kind"),
    [
        ("/home/me", "ext4", "local"),
        ("/dev/shm", "tmpfs", "memory"),
        ("/dev/shmmm", "ext4", "local"),
        ("/mnt/ckpt/run", "nfs4", "network"),
        ("/mnt/ckpt/with space/run", "xfs", "local"),
        ("/bucket/run", "fuse.s3fs", "object"),
        ("/bucket2/run", "fuse", "object"),
        ("/var/lib/run", "ext4", "local"),
        ("/odd/run", "newfs", "unknown"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_newest(path: str, file_system: str, kind: str) -> None:
    mount = find_mount(MOUNTINFO, path)
    assert mount is not None
    assert (mount.file_system, mount.kind) == (file_system, kind)


def test_mount_options_are_those_of_mount_and_file_system() -> None:
    mount = find_mount(MOUNTINFO, "/mnt/ckpt")
    assert mount is not None
    assert mount.options == ("rw", "relatime", "vers=4.2", "soft", "proto=tcp")


def test_no_mountinfo_is_no_mount(tmp_path: Path) -> None:
    assert mount_of(tmp_path, tmp_path / "missing") is None
    assert find_mount("", "/") is None
