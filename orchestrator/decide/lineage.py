"""Which checkpoints count: the walk back from the highest generation.

Invariants:
- Every state that the run has now was reached on one path through the generations. A checkpoint counts exactly if it
  lies on that path, whenever it was finished: a late commit is harmless, and a rolled-back timeline never comes back,
  however high its steps.
- A generation that has left nothing but its file, and is not known to have begun, does not count: whoever created it
  was gone before it could see what had been committed meanwhile.
- A number is used once. The next one lies above every generation that left any trace: a file, or an attempt's name.

Faults survived: generation files that were lost or damaged. The path then ends there, and what lies further back no
longer counts; it is not guessed.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.checkpoint.manifest import parse_checkpoint_name

_MEMORY_NAME = re.compile(r"memory of step (\d+), generation (\d+)", re.ASCII)

Source = Literal["fresh", "checkpoint", "memory", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation, as its file records it.

    `parent` is the checkpoint that was restored, or that holds the state that was restored from memory, if it was
    committed; `parent_generation` is the generation that reached that state, None for a fresh start. `restored_step`
    counts finished steps, 0 for a fresh start. `source` says where the state came from; "unknown" stands for a file
    that cannot be read. `reason` says why the generation began. `created_at` is in seconds since the epoch. `skip` are
    the global batches, as (epoch, batch) and sorted, that are passed over from here on: all that this generation's
    predecessors skipped, and new ones. `unfinished`, of a fresh start: the save attempts that were there and not
    committed, or committed too late for an earlier fresh start.
    """

    number: int
    driver: str
    parent: str | None
    parent_generation: int | None
    restored_step: int
    source: Source
    reason: str
    created_at: float
    world_size: int
    skip: tuple[tuple[int, int], ...] = ()
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One save attempt's directory: who wrote it, and after how many finished steps."""

    name: str
    generation: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySet:
    """Snapshots of all ranks after `step`, complete in the keepers' memory. `where`: rank to the keeper that has it."""

    generation: int
    step: int
    where: Mapping[int, str]

    @property
    def name(self) -> str:
        """What it is called beside the names of checkpoints."""
        return memory_name(self.generation, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One generation on the path. Its checkpoints up to `step_max` count; all of them, if that is None."""

    generation: int
    step_max: int | None


def without_void(
    generations: Iterable[GenerationRecord], attempts: Iterable[CheckpointRecord], begun: Collection[int]
) -> tuple[GenerationRecord, ...]:
    """The records, lowest first, without the highest ones as far as these do not count. `begun`: the numbers of those
    that are known to have begun; without any nothing is known, and all count."""
    records = sorted(generations, key=lambda record: record.number)
    traces = {*begun, *(attempt.generation for attempt in attempts)}
    while begun and records and records[-1].number not in traces and records[-1].source != "unknown":
        records.pop()
    return tuple(records)


def chain(generations: Iterable[GenerationRecord], checkpoints: Iterable[CheckpointRecord] = ()) -> tuple[Link, ...]:
    """The path from the highest generation back to where the run, or what is known of it, began.

    A checkpoint shows that its generation existed, also if the generation's file is gone.
    """
    records = {record.number: record for record in generations}
    numbers = {*records, *(checkpoint.generation for checkpoint in checkpoints)}
    if not numbers:
        return ()
    links = [Link(generation=max(numbers), step_max=None)]
    while record := records.get(links[-1].generation):
        # A parent that is not older can only come from a file that was changed by hand; following it might not end.
        if record.parent_generation is None or record.parent_generation >= record.number:
            break
        last = links[-1].step_max
        step_max = record.restored_step if last is None else min(last, record.restored_step)
        links.append(Link(generation=record.parent_generation, step_max=step_max))
    return tuple(links)


def eligible(
    generations: Iterable[GenerationRecord], checkpoints: Iterable[CheckpointRecord]
) -> tuple[CheckpointRecord, ...]:
    """The committed checkpoints that count, newest first."""
    checkpoints = tuple(checkpoints)
    limits = {link.generation: link.step_max for link in chain(generations, checkpoints)}

    def counts(checkpoint: CheckpointRecord) -> bool:
        if checkpoint.generation not in limits:
            return False
        step_max = limits[checkpoint.generation]
        return step_max is None or checkpoint.step <= step_max

    return tuple(sorted(filter(counts, checkpoints), key=_age, reverse=True))


def newest(generations: Iterable[GenerationRecord], checkpoints: Iterable[CheckpointRecord]) -> CheckpointRecord | None:
    """The newest committed checkpoint that counts, None if there is none."""
    return next(iter(eligible(generations, checkpoints)), None)


def next_number(used: Iterable[int]) -> int:
    """The number of the next generation; `used` are those of all generation files and of all attempts' names."""
    return max(used, default=0) + 1


def current(generations: Sequence[GenerationRecord]) -> GenerationRecord | None:
    """The record of the highest generation."""
    return max(generations, key=lambda record: record.number, default=None)


def memory_name(generation: int, step: int) -> str:
    """What the set of snapshots of this state is called."""
    return f"memory of step {step}, generation {generation}"


def state_of(name: str) -> tuple[int, int] | None:
    """Generation and step of the checkpoint or the set in memory of that name."""
    if match := _MEMORY_NAME.fullmatch(name):
        return int(match[2]), int(match[1])
    parsed = parse_checkpoint_name(name)
    return (parsed[1], parsed[0]) if parsed else None


def _age(checkpoint: CheckpointRecord) -> tuple[int, int, int]:
    # On one path steps never fall from a generation to its child, so the generation comes first.
    return checkpoint.generation, checkpoint.step, checkpoint.attempt
