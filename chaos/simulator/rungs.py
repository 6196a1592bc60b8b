"""What a simulated run could go back to, kept as the records that decide/ladder.py chooses from."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from chaos.simulator.course import Boundary, Course, Position
from orchestrator.decide import ladder
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, Source
from workers.checkpoint.manifest import checkpoint_name

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


@dataclass(frozen=True, slots=True)
class Leg:
    """Training without interruption, from a time and so much training on, up to a position of the course."""

    course: Course
    position: Position
    began: float
    work: float
    step_seconds: float


class Rungs:
    """Of a run that begins with generation 1. `damaged`: the part of checkpoints that do not verify."""

    def __init__(self, keep_last: int, damaged: float, rng: random.Random) -> None:
        self._keep_last, self._damaged, self._rng = keep_last, damaged, rng
        self._generations = [_record(1, "fresh", None, None, 0)]
        self._durable: list[_Saved] = []
        self._memory: list[_Saved] = []
        self._legs: list[Leg] = []
        self._verified: set[str] = set()

    def trained(self, leg: Leg) -> None:
        """The current generation has come so far. What it has saved is looked at when a failure asks for it."""
        self._legs.append(leg)

    def failed(self, now: float) -> None:
        """What is not ready by now is cut short, and retention has deleted what is older than it keeps."""
        durable = ((leg, leg.course.durable_saves(leg.position)) for leg in reversed(self._legs))
        memory = ((leg, leg.course.memory_saves(leg.position)) for leg in reversed(self._legs))
        self._durable = self._ready(self._durable, durable, now, self._keep_last)
        self._memory = self._ready(self._memory, memory, now, 1)
        self._legs.clear()
        oldest = min((one.generation for one in (*self._durable, *self._memory)), default=self._number)
        if self._generations[0].number < oldest:
            self._generations = [one for one in self._generations if one.number >= oldest]

    def _ready(
        self, before: list[_Saved], newest_first: Iterable[tuple[Leg, Iterator[Boundary]]], now: float, most: int
    ) -> list[_Saved]:
        """The newest, the oldest of them first; `before`: what earlier generations have left."""
        found: list[_Saved] = []
        for leg, boundaries in newest_first:
            for one in boundaries:
                if leg.began + one.ready <= now:
                    work = leg.work + one.work
                    found.append(_Saved(self._number, round(work / leg.step_seconds), work, leg.began + one.ready))
                    if len(found) == most:
                        return found[::-1]
        return [*(one for one in before if one.ready <= now), *found[::-1]][-most:]

    @property
    def _number(self) -> int:
        return self._generations[-1].number

    @property
    def newest_durable_step(self) -> int:
        """0 if nothing is durable yet."""
        return self._durable[-1].step if self._durable else 0

    def restore(self, memory_survives: bool, durable_at: float) -> Restored | ladder.NothingVerifies:
        """Begin the next generation after a failure. `durable_at`: when a state that is restored from memory will be
        durable too."""
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
