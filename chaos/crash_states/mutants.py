"""The protocol with one thing left out or done in another order. Each must be caught, or the check proves nothing.

Nothing here is used by anything but the check itself.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from chaos.crash_states.driver import Driver, MarkingArchive
from chaos.crash_states.memory_store import MemoryStore
from chaos.crash_states.ops import Resize, SyncFile, Write
from chaos.crash_states.record import Log, RecordedFile, RecordingStore
from orchestrator.decide.commit import Persist
from orchestrator.observe.ledger import LEDGER_FILE
from workers.checkpoint.digests import image_digests
from workers.checkpoint.files import closing_file
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import MANIFEST_FILE, Manifest, ShardRecord, checkpoint_dir, shard_file
from workers.checkpoint.persist import ReadBack, write_shard

_SHARD, _MANIFEST, _GENERATION = ".safetensors", MANIFEST_FILE, "generations"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`plan`: what has to happen for it to matter, beside the usual."""

    name: str
    driver: type[Driver]
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)


def mutants() -> tuple[Mutant, ...]:
    """All of them."""
    return (
        Mutant("no file is fsynced", _with(_without_file_sync(""))),
        Mutant("shards are not fsynced", _with(_without_file_sync(_SHARD))),
        Mutant("the manifest is not fsynced", _with(_without_file_sync(_MANIFEST))),
        Mutant("a generation's file is not fsynced", _with(_without_file_sync(_GENERATION))),
        Mutant("no directory is fsynced", _with(_without_dir_sync(lambda path: True))),
        Mutant("a save's directory is not fsynced", _with(_without_dir_sync(lambda path: "/step-" in path))),
        Mutant("the directory of all saves is not fsynced", _with(_without_dir_sync(lambda p: p == "checkpoints"))),
        Mutant("the directory of generations is not fsynced", _with(_without_dir_sync(lambda p: p == _GENERATION))),
        Mutant("the run directory is not fsynced", _with(_without_dir_sync(lambda path: path == "."))),
        Mutant("the ledger's name is not made durable", _with(_LedgerWithoutName)),
        Mutant("a shard is renamed before it is fsynced", _with(_sync_after_rename(_SHARD))),
        Mutant("the manifest is renamed before it is fsynced", _with(_sync_after_rename(_MANIFEST))),
        Mutant("a shard gets its length after its fsync", _with(_LengthLast)),
        Mutant("files are written under their final names", _with(_InPlace)),
        Mutant("a generation's file is written in place", _with(_GenerationInPlace)),
        Mutant("a retry overwrites in place", _OverwritesInPlace),
        Mutant("the manifest comes before the shards", ManifestFirst),
        Mutant("the commit does not wait for all receipts", CommitsBeside),
        Mutant("the manifest has no digests", _ManifestWithoutDigests),
        Mutant("the ledger says committed before it is", LedgerFirst),
        Mutant("the old checkpoint goes before the commit", CleansUpFirst, {"keep_last": 1}),
        Mutant("a checkpoint is deleted where it is", _DeletesInPlace, {"keep_last": 1}),
        Mutant("a deleted checkpoint's rename is not fsynced", _with(_ForgetfulRename), {"keep_last": 1}),
        Mutant(
            "a checkpoint is relied on before it is durable",
            _ReliesTooEarly,
            {"killed_in_commit": True, "saves": (1, 0)},
        ),
    )


def _with(kind: type[RecordingStore]) -> type[Driver]:
    class WithStore(Driver):
        store_kind = kind

    return WithStore


def _without_file_sync(part: str) -> type[RecordingStore]:
    class Forgetful(RecordedFile):
        def sync(self) -> None:
            if part not in self.node:
                super().sync()

    class WithoutFileSync(RecordingStore):
        file_kind = Forgetful

    return WithoutFileSync


def _without_dir_sync(wanted: Callable[[str], bool]) -> type[RecordingStore]:
    class WithoutDirSync(RecordingStore):
        def sync_dir(self, path: str) -> None:
            if not wanted(path):
                super().sync_dir(path)

    return WithoutDirSync


def _sync_after_rename(part: str) -> type[RecordingStore]:
    class Late(RecordedFile):
        def sync(self) -> None:
            if part not in self.node:
                super().sync()

    class SyncAfterRename(RecordingStore):
        file_kind = Late

        def move(self, source: str, target: str) -> None:
            super().move(source, target)
            if part in target:
                self.log.add(SyncFile(self.log.node(target)))

    return SyncAfterRename


class _LengthLast(RecordingStore):
    class _File(RecordedFile):
        _size: int | None = None

        def truncate(self, size_bytes: int) -> None:
            self.inner.truncate(size_bytes)
            self._size = size_bytes

        def sync(self) -> None:
            super().sync()
            if self._size is not None:
                self.store.log.add(Resize(self.node, self._size))

    file_kind = _File


class _LedgerWithoutName(RecordingStore):
    def append(self, path: str, data: bytes, *, sync: bool = True) -> None:
        self._durable_names.add(LEDGER_FILE)
        super().append(path, data, sync=sync)


class _InPlace(RecordingStore):
    def open_new(self, path: str, *, direct: bool = False) -> Any:
        return super().open_new(_final(path), direct=direct)

    def move(self, source: str, target: str) -> None:
        if _final(source) != target:
            super().move(source, target)

    def link(self, source: str, target: str) -> None:
        if _final(source) != target:
            super().link(source, target)

    def unlink(self, path: str) -> None:
        if not path.endswith(".tmp"):
            super().unlink(path)


def _final(path: str) -> str:
    """The name that a temporary file is going to have."""
    base = path.removesuffix(".tmp")
    return base.rpartition(".")[0] if base != path and not base.endswith(_SHARD) else base


class _GenerationInPlace(RecordingStore):
    def create_exclusive(
        self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        with closing_file(self.open_new(path)) as file:
            file.write_at(memoryview(data), 0)
            file.sync()
        self.sync_dir(path.rpartition("/")[0])


class _ForgetfulRename(RecordingStore):
    def rename(self, source: str, target: str) -> None:
        self.move(source, target)


class _OverwritesInPlace(Driver):
    def conclude(self, name: str, persist: Persist, receipts: dict[int, ShardRecord]) -> None:
        super().conclude(name, persist, receipts)
        for rank in range(self.course.plan.ranks):
            log = cast(Log, self.course.log)
            node = log.node(self.shard_path(name, rank))
            content = self.course.images[name][rank]  # equal bytes: the run is deterministic
            log.add(Resize(node, 0), Write(node, 0, content), SyncFile(node))


class _WithoutReceipts(Driver):
    """Knows what the shards will be before they are written."""

    def receipts(self, name: str, persist: Persist) -> tuple[ShardRecord, ...]:
        world, found = self.course.plan.ranks, []
        for rank in persist.ranks:
            memory, size = self.course.image(rank, persist.step, self.generation)
            image = memoryview(memory)
            digests = image_digests(image[:size], parse_header(image[:size]).tensors.values())
            elsewhere = MemoryStore({})
            read_back = ReadBack()
            written = write_shard(elsewhere, name, rank, world, image, size, {}, digests=digests, read_back=read_back)
            assert elsewhere.exists(f"{checkpoint_dir(name)}/{shard_file(rank, world)}")
            found.append(written.shard)
        return tuple(found)

    def write_manifest(self, manifest: Manifest) -> None:
        self.archive.expect(manifest)
        self.store.make_dir(checkpoint_dir(manifest.name))
        self.store.write_atomic(f"{checkpoint_dir(manifest.name)}/{MANIFEST_FILE}", manifest.to_bytes())

    def finish(self, manifest: Manifest) -> None:
        self.course.mark("committed", name=manifest.name)
        self.record_commit(manifest)
        self.machine = type(self.machine)()
        self.machine.generation_started(self.archive.scan(manifests=False).generations, at=0.0)


class ManifestFirst(_WithoutReceipts):
    def write_shards(self, name: str, persist: Persist, beside: Sequence[Callable[[], None]]) -> None:
        manifest = self.manifest(persist, self.receipts(name, persist))
        self.expect_shards(name, persist.step)
        self.write_manifest(manifest)
        self.course.turns.run([partial(self.keep, name, rank, persist.step) for rank in persist.ranks])
        self.finish(manifest)

    def keep(self, name: str, rank: int, step: int) -> None:
        self.persist(name, rank, step)


class CommitsBeside(ManifestFirst):
    def write_shards(self, name: str, persist: Persist, beside: Sequence[Callable[[], None]]) -> None:
        manifest = self.manifest(persist, self.receipts(name, persist))
        self.expect_shards(name, persist.step)
        keepers = [partial(self.keep, name, rank, persist.step) for rank in persist.ranks]
        self.course.turns.run([*keepers, partial(self.write_manifest, manifest)])
        self.finish(manifest)


class _ManifestWithoutDigests(Driver):
    def manifest(self, persist: Persist, shards: tuple[ShardRecord, ...]) -> Manifest:
        bare = [
            dataclasses.replace(
                shard,
                digest="",
                header_digest="",
                tensors=tuple(dataclasses.replace(tensor, digest="") for tensor in shard.tensors),
            )
            for shard in shards
        ]
        return super().manifest(persist, tuple(bare))


class LedgerFirst(Driver):
    def commit(self, manifest: Manifest) -> None:
        self.record_commit(manifest)
        self.archive.commit(manifest, my_generation=self.generation)


class CleansUpFirst(Driver):
    def commit(self, manifest: Manifest) -> None:
        for name in sorted(self.committed):
            self.archive.delete(name, my_generation=self.generation)
            self.committed.discard(name)
        super().commit(manifest)


class _DeletesInPlace(Driver):
    class _Archive(MarkingArchive):
        def delete(self, name: str, *, my_generation: int) -> bool:
            self._course.mark("delete begins", name=name)
            cast(RecordingStore, self._store).remove_tree(checkpoint_dir(name))
            return True

    archive_kind = _Archive


class _ReliesTooEarly(Driver):
    class _Archive(MarkingArchive):
        def _rely_on(self, name: str, generation: int, *, again: bool = False) -> None:
            """Left out."""

    archive_kind = _Archive
