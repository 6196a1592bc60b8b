"""The storage seam: nothing half written, nothing written twice, and kills and full disks at every boundary."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import two_ranks, write_image, write_shard_of

from workers import failpoint
from workers.checkpoint import files
from workers.checkpoint import store as store_module
from workers.checkpoint.digests import file_digests, image_digests, read_blocks
from workers.checkpoint.files import LocalFile, closing_file
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import ShardRecord
from workers.checkpoint.pace import Pace
from workers.checkpoint.persist import ReadBack, ShardNotVerified, persist, write_shard
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.errors import CheckpointDamaged

MEMORY_DIR = Path("/dev/shm")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


Armed = Callable[..., None]


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[Armed]:
    """Arms one fault in this process for one test."""

    def arm(point: str, action: failpoint.Action, **when: float) -> None:
        failpoint.arm([failpoint.Arm(id="fault", point=point, action=action, when=when)], tmp_path / "faults")

    yield arm
    failpoint.arm((), tmp_path / "faults")


def test_importing_the_storage_and_the_keeper_side_does_not_import_torch() -> None:
    code = (
        "import sys, workers.checkpoint.store, workers.checkpoint.persist, workers.checkpoint.manifest\n"
        "import workers.checkpoint.slots, workers.checkpoint.header, workers.checkpoint.verify\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_paths_outside_of_the_run_directory_are_refused(store: LocalStore) -> None:
    for path in ("/etc/passwd", "../other", "a/../../b"):
        with pytest.raises(ValueError, match="not a path within"):
            store.read_bytes(path)


def test_listing_an_absent_directory_is_empty_but_a_vanished_root_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        store.list_dir("checkpoints")
    (tmp_path / "run").mkdir()
    assert store.list_dir("checkpoints") == []


def test_a_fresh_listing_leaves_nothing_behind(store: LocalStore) -> None:
    store.make_dir("generations")
    store.create_exclusive("generations/1.json", b"x")
    assert store.list_dir("generations", fresh=True) == ["1.json"]
    assert store.list_dir("generations") == ["1.json"]


def test_of_many_creators_of_one_name_exactly_one_succeeds(store: LocalStore) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def create(content: bytes) -> None:
        start.wait()
        try:
            store.create_exclusive("fence.json", content)
            outcomes.append(content.decode())
        except FileExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=create, args=(f"driver {at}".encode(),)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 7
    assert store.read_bytes("fence.json").decode() in outcomes
    assert store.list_dir(".") == ["fence.json"]


def test_creating_the_same_content_again_is_fine(store: LocalStore) -> None:
    store.create_exclusive("fence.json", b"driver 1")
    store.create_exclusive("fence.json", b"driver 1")
    with pytest.raises(FileExistsError):
        store.create_exclusive("fence.json", b"driver 2")


def test_a_link_that_reports_failure_after_success_counts_as_success(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def lost_answer(source: Path, target: Path) -> None:
        real_link(source, target)
        raise OSError(errno.EIO, "the answer was lost")

    monkeypatch.setattr(store_module.os, "link", lost_answer)
    store.create_exclusive("fence.json", b"driver 1")
    assert store.read_bytes("fence.json") == b"driver 1"


def test_a_rename_that_reports_failure_after_success_counts_as_success(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_rename = os.rename

    def lost_answer(source: Path, target: Path) -> None:
        real_rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "the repeated request found nothing")

    monkeypatch.setattr(store_module.os, "rename", lost_answer)
    store.write_atomic("manifest.json", b"content")
    assert store.read_bytes("manifest.json") == b"content"


def test_an_atomic_write_never_replaces_a_file(store: LocalStore) -> None:
    store.write_atomic("manifest.json", b"first")
    with pytest.raises(FileExistsError):
        store.write_atomic("manifest.json", b"second")
    assert store.read_bytes("manifest.json") == b"first"
    assert store.list_dir(".") == ["manifest.json"]


def test_a_rename_never_replaces_anything(store: LocalStore) -> None:
    store.write_atomic("a", b"a")
    store.write_atomic("b", b"b")
    with pytest.raises(FileExistsError):
        store.rename("a", "b")
    assert (store.read_bytes("a"), store.read_bytes("b")) == (b"a", b"b")


def test_a_missing_source_of_a_rename_is_an_error(store: LocalStore) -> None:
    with pytest.raises(FileNotFoundError):
        store.rename("a", "b")


def test_appending_adds_to_the_end_and_creates_the_file(store: LocalStore) -> None:
    store.append("ledger.jsonl", b"1\n")
    store.append("ledger.jsonl", b"2\n", sync=False)
    assert store.read_bytes("ledger.jsonl") == b"1\n2\n"


def test_removing_a_tree_removes_files_directories_and_tolerates_absence(store: LocalStore) -> None:
    store.make_dir("trash/one/two")
    store.write_atomic("trash/one/two/file", b"x")
    for _ in range(2):
        store.remove_tree("trash/one")
        assert store.list_dir("trash") == []


@pytest.mark.parametrize("point", ["commit.write", "commit.fsync", "commit.rename"])
def test_a_full_disk_during_an_atomic_write_leaves_nothing(store: LocalStore, armed: Armed, point: str) -> None:
    armed(point, "enospc")
    with pytest.raises(OSError, match="injected"):
        store.write_atomic("manifest.json", b"content", points="commit", context={"step": 3})
    assert store.list_dir(".") == ["faults"]


KILL_SCRIPT = """
import sys
from pathlib import Path
from workers import failpoint
from workers.checkpoint.header import parse_header
from workers.checkpoint.persist import persist
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.errors import CheckpointDamaged
root, point = Path(sys.argv[1]), sys.argv[2]
when = {"index": 1} if point == "persist.block" else {}
failpoint.arm([failpoint.Arm(id="kill", point=point, action="kill_self", when=when)], root / "faults")
store = LocalStore(root)
if point.startswith("commit"):
    store.write_atomic("file", b"x" * 100, points="commit")
else:
    slot = Slot.create(12 << 20)
    slot.image[:] = b"x" * len(slot.image)
    persist(store, "file", slot.image, (12 << 20) - 5, context={"step": 1})
"""


@pytest.mark.parametrize(
    ("point", "named"),
    [
        ("commit.write", False),
        ("commit.fsync", False),
        ("commit.rename", False),
        ("commit.dir_fsync", True),
        ("persist.create", False),
        ("persist.block", False),
        ("persist.fsync", False),
        ("persist.rename", False),
        ("persist.dir_fsync", True),
    ],
)
def test_a_kill_at_any_boundary_leaves_the_name_absent_or_the_file_whole(
    tmp_path: Path, point: str, named: bool
) -> None:
    process = subprocess.run([sys.executable, "-c", KILL_SCRIPT, str(tmp_path), point], check=False)
    assert process.returncode == -9
    size = 100 if point.startswith("commit") else (12 << 20) - 5
    assert (tmp_path / "file").exists() == named
    if named:
        assert (tmp_path / "file").read_bytes() == b"x" * size


@pytest.fixture(params=["device", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    """A store on a disk and one on a memory file system; what is tested must not differ."""
    if request.param == "device":
        return LocalStore(tmp_path)
    path = MEMORY_DIR / f"lastgood-test-{os.getpid()}"
    if not LocalStore(MEMORY_DIR).in_memory():
        pytest.skip("no memory file system at /dev/shm")
    path.mkdir()
    request.addfinalizer(lambda: LocalStore(MEMORY_DIR).remove_tree(path.name))
    return LocalStore(path)


def filled_slot(size: int) -> Slot:
    slot = Slot.create(size)
    pattern = bytes(range(256)) * 16
    for start in range(0, slot.capacity, len(pattern)):
        slot.image[start : start + len(pattern)] = pattern
    return slot


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (8 << 20) - 1, 8 << 20, (8 << 20) + 4096, (8 << 20) + 4097])
def test_a_persisted_file_has_exactly_the_images_bytes(any_store: LocalStore, size: int) -> None:
    slot = filled_slot(size)
    persist(any_store, "file", slot.image, size, context={})
    assert any_store.read_bytes("file") == bytes(slot.image[:size])
    found = file_digests(any_store, "file", [])
    assert found.bytes == size
    assert any_store.list_dir(".") == ["file"]
    slot.close()


def test_read_back_says_where_the_bytes_came_from(any_store: LocalStore) -> None:
    slot = filled_slot(5000)
    persist(any_store, "file", slot.image, 5000, context={})
    allowed = {"memory"} if any_store.in_memory() else {"device", "cache"}
    assert file_digests(any_store, "file", []).verified_from in allowed
    slot.close()


def test_a_file_system_that_refuses_o_direct_gets_the_same_bytes_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fcntl = files.fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == files.fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_fcntl(descriptor, command, argument)

    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    slot = filled_slot(10000)
    persist(store, "file", slot.image, 10000, context={})
    assert store.read_bytes("file") == bytes(slot.image[:10000])
    assert file_digests(store, "file", []).verified_from == "cache"
    slot.close()


def test_memory_that_is_not_aligned_is_written_through_the_cache(store: LocalStore) -> None:
    slot = filled_slot(16384)
    persist(store, "file", slot.image[1:], 9000, context={})
    assert store.read_bytes("file") == bytes(slot.image[1:9001])
    slot.close()


def test_reading_in_blocks_ends_at_the_end_of_the_file(store: LocalStore) -> None:
    for size in (0, 1, 8 << 20, (8 << 20) + 513):
        store.write_atomic(f"file-{size}", os.urandom(size))
        with closing_file(store.open_existing(f"file-{size}", direct=True)) as file:
            assert b"".join(bytes(block) for block in read_blocks(file)) == store.read_bytes(f"file-{size}")


def test_the_end_of_a_file_is_not_mistaken_for_a_refusal_of_o_direct(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse a read from an unaligned position even at the file's end."""
    real_preadv = os.preadv

    def strict(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if position % 512:
            raise OSError(errno.EINVAL, "unaligned")
        return real_preadv(descriptor, buffers, position)

    store.write_atomic("file", os.urandom(5000))
    with closing_file(store.open_existing("file", direct=True)) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT here")
        monkeypatch.setattr(files.os, "preadv", strict)
        assert b"".join(bytes(block) for block in read_blocks(file)) == store.read_bytes("file")
        assert file.direct


@pytest.mark.parametrize("point", ["persist.create", "persist.block", "persist.fsync"])
@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_a_storage_error_while_persisting_leaves_no_file_and_another_attempt_works(
    store: LocalStore, armed: Armed, point: str, action: failpoint.Action
) -> None:
    slot = filled_slot(10000)
    store.make_dir("a01")
    store.make_dir("a02")
    armed(point, action, step=5)
    with pytest.raises(OSError, match="injected"):
        persist(store, "a01/file", slot.image, 10000, context={"step": 5})
    assert store.list_dir("a01") == []
    persist(store, "a02/file", slot.image, 10000, context={"step": 5})
    assert store.list_dir("a02") == ["file"]
    slot.close()


def test_a_shard_is_never_written_over_another(store: LocalStore) -> None:
    slot = filled_slot(5000)
    persist(store, "file", slot.image, 5000, context={})
    before = store.read_bytes("file")
    slot.image[:5000] = bytes(5000)
    with pytest.raises(FileExistsError):
        persist(store, "file", slot.image, 5000, context={})
    assert store.read_bytes("file") == before
    assert store.list_dir(".") == ["file"]
    slot.close()


def test_too_little_memory_for_whole_pages_is_refused(store: LocalStore) -> None:
    with pytest.raises(ValueError, match="8192 are needed"):
        persist(store, "file", memoryview(bytearray(5000)), 5000, context={})


def test_a_device_that_stores_another_byte_is_noticed_and_the_tensor_named(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, image_bytes = write_image(two_ranks()[0])
    real_move = LocalStore.move

    def corrupting_move(self: LocalStore, source: str, target: str) -> None:
        with open(self.local_path(source), "r+b") as file:
            file.seek(image_bytes - 20)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        real_move(self, source, target)

    monkeypatch.setattr(LocalStore, "move", corrupting_move)
    with pytest.raises(ShardNotVerified, match=r"rank-00000-of-00002\.safetensors .* tensor 'model.half'$"):
        write_shard_of(store, "a01", slot, 0, 2)
    slot.close()


def test_what_is_read_back_is_compared_with_the_digests_that_were_given(store: LocalStore) -> None:
    slot, image_bytes = write_image(two_ranks()[0])
    tensors = parse_header(slot.image).tensors
    digests = image_digests(slot.image[:image_bytes], tensors.values())

    def write(attempt: str, digests: tuple[str, dict[str, str]]) -> ShardRecord:
        options: dict[str, Any] = {"digests": digests, "read_back": ReadBack()}
        return write_shard(store, attempt, 0, 1, slot.image, image_bytes, {}, **options).shard

    slot.image[tensors["model.norm"].start] ^= 1  # the snapshot is not what it was when it was digested
    with pytest.raises(ShardNotVerified, match=r"tensor 'model\.norm'$"):
        write("a01", digests)
    slot.image[tensors["model.norm"].start] ^= 1
    shard = write("a02", digests)
    assert (shard.digest, {record.name: record.digest for record in shard.tensors}) == digests
    with pytest.raises(CheckpointDamaged, match="of other tensors"):
        write("a03", (digests[0], {}))
    slot.close()


def test_a_shard_that_is_not_read_back_says_so_and_is_not_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, _ = write_image(two_ranks()[0])
    monkeypatch.setattr(LocalFile, "read_into", None)
    assert write_shard_of(store, "a01", slot, read_back=None).verified_from == "nothing"
    slot.close()


def test_reading_back_keeps_to_the_pace_that_it_is_given(store: LocalStore) -> None:
    slot = filled_slot(20 << 20)
    persist(store, "file", slot.image, 20 << 20, context={})
    at, waits = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal at
        waits.append(seconds)
        at += seconds

    pace = Pace(4 << 20, clock=lambda: at, sleep=sleep)
    found = file_digests(store, "file", pace=pace)
    assert found.bytes == 20 << 20
    assert waits == [2.0, 2.0], "three blocks of 8 MiB, and the first at once"
    slot.close()


def test_a_pace_does_not_make_up_for_what_a_slow_device_left_unused() -> None:
    at, waits = 0.0, []
    pace = Pace(100, clock=lambda: at, sleep=waits.append)
    pace.take(1000)
    at = 60.0
    pace.take(1000)
    assert waits == []
    pace.take(1000)
    assert waits == [10.0]


def test_a_root_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    gone = LocalStore(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="vanished"):
        gone.make_dir("checkpoints/step")
    assert not (tmp_path / "gone").exists()


class Syncs(LocalStore):
    """Remembers which directories were made durable."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.synced: list[str] = []

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self.synced.append(path)


def test_a_durable_line_makes_its_files_name_durable_also_if_an_earlier_line_created_it(tmp_path: Path) -> None:
    store = Syncs(tmp_path)
    store.append("ledger", b"1", sync=False)
    assert store.synced == []
    store.append("ledger", b"2")
    assert store.synced == ["."]
    store.append("ledger", b"3")
    assert store.synced == ["."]
    again = Syncs(tmp_path)  # whoever created it may have been killed before its name was durable
    again.append("ledger", b"4")
    assert again.synced == ["."] and again.read_bytes("ledger") == b"1234"


def test_making_a_directory_makes_each_new_name_durable(tmp_path: Path) -> None:
    store = Syncs(tmp_path)
    store.make_dir("a/b/c")
    assert sorted(store.synced) == [".", "a", "a/b"]
    store.make_dir("a/b/c")
    assert len(store.synced) == 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        store.make_dir("file")
    with pytest.raises(NotADirectoryError):
        store.make_dir("file/folder")
