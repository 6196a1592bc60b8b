"""The protocol on object storage with one thing left out or done in another order. Each must be caught.

Nothing here is used by anything but the check itself.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from chaos.crash_states.driver import Driver, MarkingArchive, ObjectDriver
from chaos.crash_states.mutants import CleansUpFirst, CommitsBeside, LedgerFirst, ManifestFirst, Mutant
from chaos.crash_states.object_record import RecordedUpload, RecordingObjectStore
from workers.checkpoint.manifest import checkpoint_dir

_OLD_GOES: dict[str, Any] = {"keep_last": 1}
_OLD_IS_TAKEN: dict[str, Any] = {"keep_last": 1, "saves": (2, 1), "back": True, "killed": True}


def object_mutants() -> tuple[Mutant, ...]:
    """All of them."""
    return (
        Mutant("objects: the manifest comes before the shards", _on_objects(ManifestFirst)),
        Mutant("objects: the commit does not wait for all receipts", _on_objects(CommitsBeside)),
        Mutant("objects: the ledger says committed before it is", _on_objects(LedgerFirst)),
        Mutant("objects: the old checkpoint goes before the commit", _on_objects(CleansUpFirst), _OLD_GOES),
        Mutant("objects: a checkpoint is deleted without a mark", _DeletesUnmarked, _OLD_GOES),
        Mutant("objects: the mark goes before what it hides", _with(_MarkGoesFirst), _OLD_GOES),
        Mutant("objects: a shard can be seen while it is uploaded", _with(_SeenParts)),
        Mutant("objects: a generation's object replaces another's", _with(_Replaces), {"killed": True}),
        Mutant("objects: what is relied on is not held", _with(_HoldsNothing), _OLD_IS_TAKEN),
        Mutant("objects: a late mark replaces a hold", _with(_MarksAnyway), _OLD_IS_TAKEN),
    )


def _with(kind: type[RecordingObjectStore]) -> type[Driver]:
    class WithStore(ObjectDriver):
        object_store_kind = kind

    return WithStore


def _on_objects(kind: type[Driver]) -> type[Driver]:
    return type(kind.__name__, (ObjectDriver, kind), {})


class _DeletesUnmarked(ObjectDriver):
    class _Archive(MarkingArchive):
        def delete(self, name: str, *, my_generation: int) -> bool:
            self._course.mark("delete begins", name=name)
            store, path = cast(RecordingObjectStore, self._store), checkpoint_dir(name)
            store.delete_objects([f"{path}/{file}" for file in store.list_dir(path)])
            return True

    archive_kind = _Archive


class _MarkGoesFirst(RecordingObjectStore):
    def drop(self, path: str) -> None:
        self.delete_objects([f"trash/{path}"])
        self.delete_objects([f"{path}/{name}" for name in self.list_dir(path)])


class _SeenParts(RecordingObjectStore):
    class _Upload(RecordedUpload):
        def write(self, data: memoryview) -> None:
            super().write(data[: len(data) // 2])
            self.store.put_always(self.key, self.content)
            super().write(data[len(data) // 2 :])

    def begin_upload(self, key: str) -> RecordedUpload:
        return self._Upload(self, key, super().begin_upload(key).inner)


class _Replaces(RecordingObjectStore):
    def create_exclusive(
        self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.put_always(path, data)


class _HoldsNothing(RecordingObjectStore):
    def hold(self, path: str, *, generation: int, again: bool = False) -> None:
        """Left out."""


class _MarksAnyway(RecordingObjectStore):
    def set_aside(self, path: str, *, generation: int, began: Callable[[int], bool]) -> bool:
        self.put_always(f"trash/{path}", b'{"state": "aside", "generation": %d}\n' % generation)
        return True
