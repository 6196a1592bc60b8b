"""The store on object storage: what a Store owes, over obstore's store in memory and over HTTP to an S3 server."""

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import make_manifest, same_bytes, save_shards, two_ranks, whole_tensors
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from orchestrator import RecoveryConfig, driver
from orchestrator.archive import RunArchive
from orchestrator.decide.ladder import Fresh, Restore
from orchestrator.decide.lineage import GenerationRecord
from workers import failpoint
from workers.checkpoint import place
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import closing_file
from workers.checkpoint.manifest import CHECKPOINTS_DIR, Manifest, checkpoint_dir
from workers.checkpoint.object_store import ObjectStore, Version
from workers.checkpoint.place import open_bucket, prove_conditions
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.verify import verify_checkpoint
from workers.errors import CallerError, Fenced

A = "checkpoints/step-000000010-g0001-a01"
Open = Callable[[], ObjectStore]
"""Another process's view of the same bucket."""


@pytest.fixture(params=["memory", "s3"])
def open_store(request: pytest.FixtureRequest) -> Open:
    if request.param == "memory":
        client = MemoryStore()
        return lambda: ObjectStore(client)
    url = request.getfixturevalue("s3_url")
    return lambda: open_bucket(url, "run")


@pytest.fixture
def store(open_store: Open) -> ObjectStore:
    return open_store()


def began(generation: int) -> bool:
    """All of them did."""
    return True


def put(store: ObjectStore, path: str, content: bytes = b"content") -> None:
    with closing_file(store.begin(path)) as file:
        file.write_at(memoryview(content), 0)
        file.sync()
        file.publish()


def test_names_are_found_as_in_directories(store: ObjectStore) -> None:
    assert store.list_dir(".") == [] and store.list_dir("a") == [] and not store.exists("a")
    put(store, "a/b/c")
    put(store, "a/d")
    assert store.list_dir(".") == ["a"] and store.list_dir("a", fresh=True) == ["b", "d"]
    assert store.list_dir("a/b") == ["c"] and store.list_dir("a/d") == []
    assert store.is_dir("a/b") and not store.is_dir("a/d") and store.exists("a/d") and store.exists("a/b")
    assert store.size("a/d") == 7 and store.read_bytes("a/b/c") == b"content"
    for missing in ("a/e", "a/b"):
        with pytest.raises(FileNotFoundError, match=missing):
            store.size(missing)
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.read_bytes("nothing")
    for outside in ("/a", "../a", "a/../../b"):
        with pytest.raises(ValueError, match="not a path within"):
            store.read_bytes(outside)


def test_a_file_is_there_once_it_is_published_and_not_before(store: ObjectStore) -> None:
    blocks = [bytes([number]) * BLOCK_BYTES for number in range(2)]
    content = b"".join(blocks) + b"end"
    with closing_file(store.begin("big", direct=True)) as file:
        for number, block in enumerate([*blocks, b"end".ljust(4096, b"\0")]):
            file.write_at(memoryview(block), number * BLOCK_BYTES)
        file.truncate(len(content))
        file.sync()
        assert not store.exists("big")
        file.publish()
    assert store.read_bytes("big") == content
    with pytest.raises(FileExistsError):
        store.begin("big")
    with closing_file(store.begin("other")) as file:
        file.write_at(memoryview(blocks[0]), 0)
        file.discard()
    assert not store.exists("other")


def test_a_new_file_is_written_from_front_to_back(store: ObjectStore) -> None:
    with closing_file(store.begin("file")) as file:
        file.write_at(memoryview(b"0123"), 0)
        with pytest.raises(ValueError, match="is written at 8, and ends at 4"):
            file.write_at(memoryview(b"x"), 8)
        file.sync()
        with pytest.raises(ValueError, match="cannot be given 2 bytes"):
            file.truncate(2)


def test_parts_of_a_file_are_read(store: ObjectStore) -> None:
    put(store, "file", b"0123456789")
    with closing_file(store.open_existing("file", direct=True)) as file:
        buffer = bytearray(4)
        assert file.read_into(memoryview(buffer), 3) == 4 and buffer == b"3456"
        assert file.read_into(memoryview(buffer), 8) == 2 and buffer[:2] == b"89"
        assert file.read_into(memoryview(buffer), 10) == 0
        assert file.direct and not file.is_cached(0, 10)
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.open_existing("nothing")


def test_of_many_that_create_a_name_one_succeeds(open_store: Open) -> None:
    stores, won, lost = [open_store() for _ in range(4)], [], []

    def create(number: int) -> None:
        try:
            stores[number].create_exclusive("name", b"%d" % number)
            won.append(number)
        except FileExistsError:
            lost.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 3
    assert open_store().read_bytes("name") == b"%d" % won[0]
    stores[0].create_exclusive("name", b"%d" % won[0])  # as if the answer had been lost
    with pytest.raises(FileExistsError, match="name"):
        stores[0].write_atomic("name", b"other")


# ---------------------------------------------------------------- out of sight, and held


def test_what_is_set_aside_is_out_of_sight_and_can_be_put_back_or_dropped(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, f"{A}/shard")
    assert store.set_aside(A, generation=1, began=began)
    assert other.list_dir(CHECKPOINTS_DIR) == [] and other.list_dir(A) == []
    assert not other.exists(A) and not other.is_dir(A) and other.aside(CHECKPOINTS_DIR) == [A.rpartition("/")[2]]
    store.put_back(A, generation=1)
    assert other.list_dir(A) == ["shard"] and other.aside(CHECKPOINTS_DIR) == []
    assert store.set_aside(A, generation=1, began=began)
    store.drop(A)
    store.drop(A)
    assert not other.exists(A) and other.aside(CHECKPOINTS_DIR) == []
    with pytest.raises(FileNotFoundError):
        store.set_aside(A, generation=1, began=began)


def test_what_a_later_generation_holds_is_not_set_aside_by_an_earlier_one(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, f"{A}/shard")
    other.hold(A, generation=2)
    assert store.set_aside(A, generation=1, began=began) is False and store.is_dir(A)
    other.hold(A, generation=2)
    assert other.set_aside(A, generation=3, began=began) and not store.is_dir(A)
    with pytest.raises(FileNotFoundError):
        store.hold(A, generation=4)


def test_a_mark_that_arrives_late_does_not_hide_what_is_held(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, f"{A}/shard")
    late: list[Callable[[], str]] = []
    real = store.put_object
    monkeypatch.setattr(
        store, "put_object", lambda key, data, replaces=None: late.append(lambda: real(key, data, replaces=replaces))
    )
    store.set_aside(A, generation=1, began=began)  # on its way when its process dies
    monkeypatch.undo()
    store.hold(A, generation=2)
    with pytest.raises(FileExistsError):
        late[0]()
    assert store.is_dir(A)


@pytest.mark.parametrize(
    "content",
    [
        b"not ours",
        b"[]",
        b'{"state": "aside"}',
        b'{"state": "aside", "generation": Infinity}',
        b'{"state": "sideways", "generation": 1}',
        b"[" * 100_000,
    ],
    ids=range(6),
)
def test_a_mark_that_nobody_can_read_hides_nothing(store: ObjectStore, content: bytes) -> None:
    put(store, f"{A}/shard")
    put(store, f"trash/{A}", content)
    assert store.is_dir(A) and store.aside(CHECKPOINTS_DIR) == [] and store.list_dir(CHECKPOINTS_DIR) != []
    assert store.set_aside(A, generation=1, began=began) and not store.is_dir(A)


def test_what_was_put_back_is_not_dropped_by_one_who_had_seen_it_aside(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, f"{A}/shard")
    store.set_aside(A, generation=1, began=began)
    assert other.aside(CHECKPOINTS_DIR) == [A.rpartition("/")[2]]
    store.put_back(A, generation=1)
    other.drop(A)
    assert store.list_dir(A) == ["shard"]


def test_what_is_being_dropped_cannot_be_put_back_or_held(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, f"{A}/shard")
    store.set_aside(A, generation=1, began=began)
    real = store.delete_objects

    def delete_objects(keys: Sequence[str]) -> None:
        store.put_back(A, generation=1)
        with pytest.raises(FileNotFoundError):
            store.hold(A, generation=2)
        assert not store.is_dir(A)
        real(keys)

    monkeypatch.setattr(store, "delete_objects", delete_objects)
    store.drop(A)
    assert store.list_dir(CHECKPOINTS_DIR) == []


def test_what_arrives_after_it_was_dropped_stays_out_of_sight_for_an_hour(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, f"{A}/shard")
    store.set_aside(A, generation=1, began=began)
    store.drop(A)
    put(store, f"{A}/manifest.json")  # a commit whose answer was given up
    assert store.list_dir(CHECKPOINTS_DIR) == [] and not store.exists(A) and store.aside(CHECKPOINTS_DIR) == []
    assert store.list_dir(f"trash/{CHECKPOINTS_DIR}") == [A.rpartition("/")[2]]
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.aside(CHECKPOINTS_DIR) == []
    assert store.list_dir(f"trash/{CHECKPOINTS_DIR}") == []


def test_the_hold_of_a_generation_that_never_began_is_no_obstacle(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, f"{A}/shard")
    other.hold(A, generation=2)
    assert store.set_aside(A, generation=1, began=lambda generation: generation < 2)
    # If it begins now, it looks again.
    with pytest.raises(FileNotFoundError):
        other.hold(A, generation=2, again=True)


def test_a_hold_that_is_renewed_refuses_those_who_saw_the_first(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store()
    put(store, f"{A}/shard")
    other.hold(A, generation=2)
    real, seen = store.put_object, []

    def put_object(key: str, data: bytes, *, replaces: Version | None = None) -> Version:
        if not seen:
            seen.append(replaces)
            other.hold(A, generation=2, again=True)  # its file is there now
        return real(key, data, replaces=replaces)

    monkeypatch.setattr(store, "put_object", put_object)
    answers = iter([False, True])
    assert store.set_aside(A, generation=1, began=lambda generation: next(answers)) is False
    assert store.is_dir(A)


def test_equal_marks_are_told_apart_also_where_equal_contents_have_equal_tags(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, f"{A}/shard")
    store.hold(A, generation=2)
    late: list[Callable[[], Version]] = []
    real = store.put_object
    monkeypatch.setattr(
        store, "put_object", lambda key, data, replaces=None: late.append(lambda: real(key, data, replaces=replaces))
    )
    store.set_aside(A, generation=2, began=began)  # on its way when its process dies
    monkeypatch.undo()
    store.set_aside(A, generation=2, began=began)
    store.put_back(A, generation=2)
    with pytest.raises(FileExistsError):
        late[0]()
    assert store.is_dir(A)


def test_only_what_lies_in_one_of_the_runs_directories_is_marked(store: ObjectStore) -> None:
    put(store, "a/b/c/d")
    for path in ("a", "a/b/c"):
        with pytest.raises(ValueError, match="cannot be set aside or held"):
            store.hold(path, generation=1)
    store.hold("a/b", generation=1)
    assert store.list_dir(".") == ["a", "trash"] and store.aside(".") == []


def test_a_replacement_names_all_that_tells_versions_apart() -> None:
    """Google's storage goes by its own count of generations, the others by the tag."""
    asked: list[Any] = []

    class Client:
        def put(self, key: str, data: bytes, *, mode: Any) -> dict[str, Any]:
            asked.append(mode)
            return {"e_tag": "tag", "version": "17"}

    store = ObjectStore(Client())  # type: ignore[arg-type]
    version = store.put_object("key", b"one")
    store.put_object("key", b"two", replaces=version)
    store.put_object("key", b"two", replaces=("tag", None))
    assert asked == ["create", {"e_tag": "tag", "version": "17"}, {"e_tag": "tag"}]


# ---------------------------------------------------------------- a run


def record(number: int, parent: Manifest | None = None) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver=f"driver {number}",
        parent=parent.name if parent else None,
        parent_generation=parent.generation if parent else None,
        restored_step=parent.step if parent else 0,
        source="checkpoint" if parent else "fresh",
        reason="start",
        created_at=5.0,
        world_size=2,
    )


def save(store: ObjectStore, step: int) -> Manifest:
    manifest = replace(make_manifest((), step=step), generation=1)
    return replace(manifest, shards=save_shards(store, two_ranks(), manifest.name), world_size=2)


def test_a_run_is_saved_chosen_verified_and_read(open_store: Open) -> None:
    archive = RunArchive(open_store())
    archive.prepare()
    assert isinstance(archive.select().choice, Fresh)
    archive.create_generation(record(1), seen=archive.scan())
    manifest = save(open_store(), 10)
    archive.commit(manifest)
    archive.commit(manifest)  # as if the answer had been lost
    choice = RunArchive(open_store()).select().choice
    assert isinstance(choice, Restore) and choice.name == manifest.name
    assert all(shard.verified_from == "device" for shard in manifest.shards)
    assert verify_checkpoint(open_store(), manifest.name) == []
    reader = CheckpointReader(open_store(), manifest.name, 1)
    for name, tensor in whole_tensors(two_ranks()).items():
        assert same_bytes(reader.fetch(name, offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape)), tensor), name


def test_an_overtaken_driver_neither_commits_nor_deletes(open_store: Open) -> None:
    old, new = RunArchive(open_store()), RunArchive(open_store())
    old.create_generation(record(1), seen=old.scan())
    manifests = [save(open_store(), step) for step in (10, 20)]
    for manifest in manifests:
        old.commit(manifest)
    new.create_generation(record(2, manifests[1]), seen=new.scan())
    assert old.delete(manifests[1].name, my_generation=1) is False
    assert old.empty_trash(my_generation=1) is True  # nothing is there
    with pytest.raises(Fenced):
        old.commit(save(open_store(), 30))
    assert new.delete(manifests[0].name, my_generation=2) is True
    scan = new.scan()
    assert [found.name for found in scan.checkpoints] == [manifests[1].name]


def test_a_driver_that_is_overtaken_while_it_deletes_puts_it_back(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, store = RunArchive(open_store()), open_store()
    archive.create_generation(record(1), seen=archive.scan())
    manifest = save(store, 10)
    archive.commit(manifest)

    def overtaken(point: str, *args: Any, **facts: Any) -> None:
        if point == "retention.check":
            store.create_exclusive("generations/00000002.json", b"another driver's")

    monkeypatch.setattr(failpoint, "hit", overtaken)
    assert archive.delete(manifest.name, my_generation=1) is False
    assert store.list_dir(CHECKPOINTS_DIR) == [manifest.name] and store.aside(CHECKPOINTS_DIR) == []


def test_what_a_killed_driver_began_to_delete_is_finished_by_the_next(open_store: Open) -> None:
    archive, store = RunArchive(open_store()), open_store()
    archive.create_generation(record(1), seen=archive.scan())
    manifest = save(store, 10)
    archive.commit(manifest)
    store.set_aside(checkpoint_dir(manifest.name), generation=1, began=began)
    scan = archive.scan([manifest.name])
    assert scan.checkpoints == () and [gone.name for gone in scan.vanished] == [manifest.name]
    assert archive.empty_trash(my_generation=1) is True
    assert store.list_dir("checkpoints") == [] and store.aside("checkpoints") == []


def test_a_request_that_fails_on_its_way_condemns_no_checkpoint(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = RunArchive(store)
    archive.create_generation(record(1), seen=archive.scan())
    manifest = save(store, 10)
    archive.commit(manifest)
    for failing in (f"{checkpoint_dir(manifest.name)}/manifest.json", "generations/00000001.json"):
        real = store._client

        class Client:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)  # noqa: B023

            def get(self, key: str) -> Any:
                if key == failing:  # noqa: B023
                    raise GenericError("connection reset by peer")
                return real.get(key)  # noqa: B023

        store._client = Client()  # type: ignore[assignment]
        with pytest.raises(OSError, match="connection reset") as raised:
            archive.select()
        store._client = real
        assert raised.value.errno == errno.EREMOTEIO
    choice = archive.select().choice
    assert isinstance(choice, Restore) and choice.name == manifest.name and archive.scan().rejected == {}


def test_a_bucket_that_is_not_there_is_no_empty_run(s3_url: str) -> None:
    store = open_bucket(s3_url.replace("bucket-", "no-bucket-"))
    for look in (RunArchive(store).scan, lambda: store.was_made("generations"), lambda: prove_conditions(store)):
        with pytest.raises(OSError):
            look()


def test_storage_that_keeps_conditions_is_accepted_and_left_as_it_was(store: ObjectStore) -> None:
    prove_conditions(store)
    assert store.list_dir(".") == []


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_storage_that_ignores_conditions_is_refused(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    real = store.put_object

    def put_object(key: str, data: bytes, *, replaces: Version | None = None) -> Version:
        try:
            return real(key, data, replaces=replaces)
        except FileExistsError:
            if (replaces is None) == (ignored == "If-None-Match"):
                return None, None
            raise

    monkeypatch.setattr(store, "put_object", put_object)
    with pytest.raises(OSError, match=f"does not keep the condition {ignored}"):
        prove_conditions(store)
    assert store.list_dir(".") == []


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("/data/runs", "a URL of object storage"),
        ("ftp://host/runs", "begins with s3, gs, az, abfs"),
        ("s3:///runs", "a URL of object storage"),
        ("s3://bucket/runs?secret_access_key=x", "without secret_access_key: secrets come from the environment"),
        ("s3://bucket/runs?colour=red", "a URL that obstore takes; it says: .*colour"),
    ],
)
def test_a_wrong_url_is_refused_with_what_would_be_right(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        open_bucket(url)
    if "colour" not in url:
        with pytest.raises(CallerError, match=f"RecoveryConfig.checkpoint_storage is .*it has to be .*{complaint}"):
            RecoveryConfig(checkpoint_storage=url)
    with pytest.raises(CallerError, match=complaint):
        driver.prepare_storage(Path("run"), url)


def test_a_place_is_told_as_a_url_without_its_options(s3_url: str, tmp_path: Path) -> None:
    store = place.open_store(tmp_path / "name", s3_url)
    bucket = s3_url.partition("?")[0]
    assert store.place(A) == f"{bucket}/name/{A}" and store.place(".") == f"{bucket}/name"
    assert place.open_store(tmp_path, None).place(A) == str(tmp_path / A)
