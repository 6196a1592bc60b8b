"""What keepers told of the snapshots of each step: which keeper has a rank's, and what the copies cost."""

from dataclasses import dataclass, field

from orchestrator.decide.lineage import MemorySet
from orchestrator.decide.save import Key
from workers.keeper_messages import Snapshotted

_KEPT = 64


@dataclass(slots=True)
class _Facts:
    where: dict[int, str] = field(default_factory=dict)
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0


class SnapshotSets:
    """By generation and step; the oldest are forgotten."""

    def __init__(self) -> None:
        self._facts: dict[Key, _Facts] = {}

    def told(self, event: Snapshotted, in_memory: Key | None) -> None:
        """`in_memory`: the set that may be restored next, which is not forgotten."""
        held = event.snapshot
        facts = self._facts.setdefault((held.generation, held.step), _Facts())
        facts.where[held.rank] = event.keeper
        facts.copy_seconds = max(facts.copy_seconds, held.copy_seconds)
        facts.stall_seconds = max(facts.stall_seconds, held.stall_seconds)
        for old in list(self._facts)[:-_KEPT]:
            if old != in_memory:
                del self._facts[old]

    def lies(self, memory: MemorySet) -> None:
        """The shards of this set are with these keepers now."""
        self._facts.setdefault((memory.generation, memory.step), _Facts()).where = dict(memory.where)

    def memory(self, key: Key | None) -> MemorySet | None:
        """The set of that generation and step, if there is one."""
        facts = self._facts.get(key) if key is not None else None
        return MemorySet(generation=key[0], step=key[1], where=dict(facts.where)) if key and facts else None

    def costs(self, key: Key) -> dict[str, float]:
        """Of the slowest rank: how long the copy took, and how long the loop stood still for it."""
        facts = self._facts.get(key, _Facts())
        return {"copy_seconds": facts.copy_seconds, "stall_seconds": facts.stall_seconds}
