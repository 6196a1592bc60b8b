"""The protocol of two drivers on object storage with one thing left out. Each must be caught.

Of marks and of the look before a deletion either is enough where both drivers live; marks also stop what is late, and
object_mutants.py has those without.

Nothing here is used by anything but the check itself.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from chaos.crash_states.mutants import Mutant
from chaos.crash_states.rivals import RivalArchive, RivalDriver, RivalStore
from orchestrator.archive import LineageMoved, ScanResult
from orchestrator.decide.lineage import GenerationRecord
from workers.checkpoint.manifest import Manifest

_BOTH: dict[str, Any] = {"play": "both begin", "switches": 2}
_OVER: dict[str, Any] = {"play": "takes over", "switches": 1}
_BACK: dict[str, Any] = {"play": "passes over the newest", "switches": 2}


def rival_mutants() -> tuple[Mutant, ...]:
    """All of them. `plan`: the play that shows it, and how many switches it takes."""
    return (
        Mutant("rivals: a generation's object that is there is taken for one's own", _store(_TakesAnothers), _BOTH),
        Mutant("rivals: an own request that is found carried out counts as another's", _store(_KnowsNotItsOwn), _OVER),
        Mutant("rivals: a hold overrides what is set aside", _store(_HoldsAnyway), _BACK),
        Mutant("rivals: a commit does not look whether another driver has begun", _archive(_CommitsUnfenced), _OVER),
        Mutant("rivals: a generation does not look again what is the newest", _archive(_NeverMoves), _OVER),
    )


def _store(kind: type[RivalStore]) -> type[RivalDriver]:
    class WithStore(RivalDriver):
        object_store_kind = kind

    return WithStore


def _archive(kind: type[RivalArchive]) -> type[RivalDriver]:
    class WithArchive(RivalDriver):
        archive_kind = kind

    return WithArchive


class _TakesAnothers(RivalStore):
    def create_exclusive(
        self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if not self.exists(path):
            super().create_exclusive(path, data, points=points, context=context)


class _KnowsNotItsOwn(RivalStore):
    def create_exclusive(
        self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.put_object(path, data)


class _HoldsAnyway(RivalStore):
    def hold(self, path: str, *, generation: int, again: bool = False) -> None:
        mark = self._read_mark(path)
        if mark is not None and mark.hides:
            self._replace_mark(path, "held", mark, generation)
        else:
            super().hold(path, generation=generation, again=again)


class _CommitsUnfenced(RivalArchive):
    def commit(self, manifest: Manifest, *, my_generation: int | None = None) -> None:
        super().commit(manifest, my_generation=1 << 40)


class _NeverMoves(RivalArchive):
    def create_generation(self, record: GenerationRecord, *, seen: ScanResult) -> tuple[GenerationRecord, ...]:
        try:
            return super().create_generation(record, seen=seen)
        except LineageMoved:
            self._created_in_vain.discard(record.number)
            self._course.mark("generation created", number=record.number, parent=record.parent)
            return (*seen.generations, record)
