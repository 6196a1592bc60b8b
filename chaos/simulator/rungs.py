"""What a simulated run could go back to, kept as the records that decide/ladder.py chooses from."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from chaos.simulator.course import Boundary
from orchestrator.decide import ladder
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, Source
from workers.checkpoint.manifest import checkpoint_name

_ENOUGH = 64
"""More saves than can be under way at once, those that are kept included."""

From = Literal["memory", "durable", "fresh"]


@dataclass(frozen=True, slots=True)
class _Saved:
    generation: int
    step: int
    work: float
    ready: float

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.generation, 1)


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the next generation begins. `made_durable`: whether that state, from memory, is being written too."""

    source: From
    step: int
    work: float
    made_durable: bool = False


class Rungs:
    """Of a run that begins with generation 1. `damaged`: the part of checkpoints that do not verify."""

    def __init__(self, keep_last: int, damaged: float, rng: random.Random) -> None:
        self._keep_last, self._damaged, self._rng = keep_last, damaged, rng
        self._generations = [_record(1, "fresh", None, None, 0)]
        self._durable: list[_Saved] = []
        self._memory: list[_Saved] = []
        self._verified: set[str] = set()

    def durable(self, newest_first: Iterable[Boundary], began: float, work: float, step_seconds: float) -> None:
        """The current generation has begun these saves, counted from that time and so much training."""
        self._durable.extend(self._needed(self._keep_last, newest_first, began, work, step_seconds))
        del self._durable[:-_ENOUGH]

    def memory(self, newest_first: Iterable[Boundary], began: float, work: float, step_seconds: float) -> None:
        """And these snapshots, which stay in memory."""
        self._memory.extend(self._needed(1, newest_first, began, work, step_seconds))
        del self._memory[:-_ENOUGH]

    def _needed(
        self, count: int, newest_first: Iterable[Boundary], began: float, work: float, step_seconds: float
    ) -> list[_Saved]:
        """The newest that can be restored when the last one begins, so many of them, and all newer ones."""
        needed: list[_Saved] = []
        newest: float | None = None
        for boundary in newest_first:
            newest = boundary.at if newest is None else newest
            done = work + boundary.work
            needed.append(_Saved(self._number, round(done / step_seconds), done, began + boundary.ready))
            count -= boundary.ready <= newest
            if count == 0:
                break
        return needed[::-1]

    @property
    def _number(self) -> int:
        return self._generations[-1].number

    def newest_durable_step(self, now: float) -> int:
        """0 if nothing is durable yet."""
        return max((one.step for one in self._durable if one.ready <= now), default=0)

    def restore(self, now: float, memory_survives: bool, durable_at: float) -> Restored | ladder.NothingVerifies:
        """Begin the next generation after a failure that struck now. `durable_at`: when a state that is restored from
        memory will be durable too."""
        self._forget(now)
        kept = self._memory[-1:] if memory_survives else []
        memory = MemorySet(generation=kept[0].generation, step=kept[0].step, where={0: ""}) if kept else None
        rejected: dict[str, str] = {}
        while True:
            choice = ladder.choose(
                generations=self._generations,
                checkpoints=[
                    CheckpointRecord(name=one.name, generation=one.generation, step=one.step, attempt=1)
                    for one in self._durable
                ],
                rejected=rejected,
                memory=memory,
            )
            if isinstance(choice, ladder.Restore) and self._is_damaged(choice.name):
                rejected[choice.name] = "damaged"
                continue
            break
        match choice:
            case ladder.NothingVerifies():
                return choice
            case ladder.Fresh():
                self._begin("fresh", None, None, 0)
                self._durable, self._memory = [], []
                return Restored("fresh", 0, 0.0)
            case ladder.FromMemory():
                return self._from_memory(kept[0], choice.parent, durable_at)
            case ladder.Restore():
                restored = next(one for one in self._durable if one.name == choice.name)
                self._durable = [one for one in self._durable if one.name not in rejected]
                self._memory = []
                self._begin("checkpoint", restored.name, restored.generation, restored.step)
                return Restored("durable", restored.step, restored.work)

    def _from_memory(self, kept: _Saved, parent: str | None, durable_at: float) -> Restored:
        self._begin("memory", parent, kept.generation, kept.step)
        self._memory = [kept]
        if parent is None:
            self._durable.append(_Saved(kept.generation, kept.step, kept.work, durable_at))
        return Restored("memory", kept.step, kept.work, made_durable=parent is None)

    def _forget(self, now: float) -> None:
        """What a failure now has cut short, what retention has deleted, and generations of which nothing is left."""
        self._durable = sorted((one for one in self._durable if one.ready <= now), key=lambda one: one.work)
        del self._durable[: -self._keep_last]
        self._memory = [one for one in self._memory if one.ready <= now][-1:]
        oldest = min((one.generation for one in (*self._durable, *self._memory)), default=self._number)
        self._generations = [one for one in self._generations if one.number >= oldest]

    def _is_damaged(self, name: str) -> bool:
        if name in self._verified or self._rng.random() >= self._damaged:
            self._verified = {name}
            return False
        return True

    def _begin(self, source: Source, parent: str | None, parent_generation: int | None, step: int) -> None:
        self._generations.append(_record(self._number + 1, source, parent, parent_generation, step))


def _record(
    number: int, source: Source, parent: str | None, parent_generation: int | None, step: int
) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver="",
        parent=parent,
        parent_generation=parent_generation,
        restored_step=step,
        source=source,
        reason="",
        created_at=0.0,
        world_size=1,
    )
