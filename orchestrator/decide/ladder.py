"""Which rung to restore from.

Invariants:
- The newest state on the lineage that nothing speaks against: a committed checkpoint, or a set of snapshots in memory,
  which comes first where both hold the same.
- Never a fresh start beside a committed checkpoint, good or bad, on the lineage or not: that would lose the run in
  silence. One exception: a run that is known to have begun afresh beside an unfinished save may do so again when that
  save's commit has arrived late, from a driver that was gone or stopped by then.
- Nor where saves never complete: if one generation left unfinished saves of several steps, the run went on past a save
  that failed, and after the next failure would do all that work again, for nothing.
- A state on probation, and what came out of it, is passed over for one before it, wherever it lies now. If there is
  none it is taken all the same: a suspicion is no proof.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, chain, eligible, state_of
from workers import errors

_UNFINISHED_STEPS_MAX = 1
"""A run that is killed during its first save leaves one, and starts afresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Restore this checkpoint. `passed` are newer rungs that were not taken, and why."""

    name: str
    generation: int
    step: int
    passed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FromMemory:
    """Restore this set. `parent`: the checkpoint that holds the same state, if it is committed; `passed` as above."""

    memory: MemorySet
    parent: str | None
    passed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Start from the beginning; `unfinished` are save attempts that were never committed."""

    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingVerifies:
    """Stop: something was saved, and nothing of it can be used. `found` lists each and why, newest first."""

    found: tuple[tuple[str, str], ...]

    def error(self, run_dir: str) -> errors.NothingVerifies:
        """The error to stop the run with."""
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.found)
        return errors.NothingVerifies(
            f"no checkpoint in {run_dir} can be restored ({listed}), and starting afresh would lose the run: "
            "repair one of them, or use another run name to start from the beginning"
        )


Choice = FromMemory | Restore | Fresh | NothingVerifies


def choose(
    *,
    generations: Iterable[GenerationRecord],
    checkpoints: Iterable[CheckpointRecord],
    rejected: Mapping[str, str],
    unfinished: Iterable[CheckpointRecord] = (),
    suspects: Mapping[str, str] = MappingProxyType({}),
    memory: MemorySet | None = None,
    begun: Collection[int] = (),
    committed: Collection[str] = (),
) -> Choice:
    """Choose from all committed `checkpoints`; `rejected` maps names to reasons: quarantined, or visibly damaged.

    `unfinished` are the attempts without a manifest; `suspects` maps names that are on probation to reasons; `memory`
    is the newest set that all ranks could restore from memory. `begun` are the generations whose file was looked at
    again after it was in place, `committed` the names whose commit has returned, as far as the ledger knows.
    """
    generations, checkpoints, unfinished = tuple(generations), tuple(checkpoints), tuple(unfinished)
    rungs = eligible(generations, (*checkpoints, *([_as_rung(memory)] if memory else ())))
    doubtful = _with_descendants(rungs, generations, suspects)
    on_storage = {(rung.generation, rung.step) for rung in rungs if rung.name != (memory and memory.name)}
    for against in ({**doubtful, **rejected}, rejected):
        passed: list[tuple[str, str]] = []
        for rung in rungs:
            if rung.name not in against and memory is not None and rung.name == memory.name:
                same = (one for one in rungs if (one.generation, one.step) == (memory.generation, memory.step))
                parent = next((one.name for one in same if one.name not in {memory.name, *rejected}), None)
                return FromMemory(memory=memory, parent=parent, passed=tuple(passed))
            if rung.name not in against:
                return Restore(name=rung.name, generation=rung.generation, step=rung.step, passed=tuple(passed))
            if memory is None or rung.name != memory.name or (rung.generation, rung.step) not in on_storage:
                passed.append((rung.name, against[rung.name]))  # else the same state follows, as a checkpoint
    late = [one for one in _late_commits(generations, checkpoints, begun) if one.name not in committed]
    if any(checkpoint not in late for checkpoint in checkpoints):
        named = {name for name, _ in passed}
        rolled_back = _newest_first(checkpoint for checkpoint in checkpoints if checkpoint.name not in named)
        highest = chain(generations, checkpoints)[0].generation
        off_lineage = f"belongs to a timeline that generation {highest} does not continue"
        found = [*passed, *((one.name, rejected.get(one.name, off_lineage)) for one in rolled_back)]
        return NothingVerifies(found=tuple(found))
    names = tuple(attempt.name for attempt in _newest_first((*unfinished, *late)))
    if _saves_never_complete(unfinished):
        return NothingVerifies(found=tuple((name, "its save never completed") for name in names))
    return Fresh(unfinished=names)


def _as_rung(memory: MemorySet) -> CheckpointRecord:
    """Above all attempts at writing the same state."""
    return CheckpointRecord(name=memory.name, generation=memory.generation, step=memory.step, attempt=sys.maxsize)


def _with_descendants(
    rungs: Sequence[CheckpointRecord], generations: Iterable[GenerationRecord], suspects: Mapping[str, str]
) -> dict[str, str]:
    """The rungs with a suspected state, and all that were reached from it. The state may be gone from where it was
    found: then it still counts, as long as it is on the lineage."""
    states = {state: name for name in suspects if (state := state_of(name)) is not None}
    records = [CheckpointRecord(name=name, generation=g, step=step, attempt=0) for (g, step), name in states.items()]
    oldest = min(((one.generation, one.step) for one in eligible(generations, records)), default=None)
    if oldest is None:
        return {}
    came_from = f"came out of {states[oldest]}, which is on probation"
    found = [(rung, (rung.generation, rung.step)) for rung in rungs]
    return {
        rung.name: suspects[states[state]] if state in states else came_from for rung, state in found if state >= oldest
    }


def _late_commits(
    generations: Sequence[GenerationRecord], checkpoints: Iterable[CheckpointRecord], begun: Collection[int]
) -> list[CheckpointRecord]:
    """Those that were unfinished when the run that goes on now began afresh.

    A generation whose file was not looked at again may have been overtaken by their commits, so it shows nothing.
    """
    records = {record.number: record for record in generations}
    path = chain(generations, checkpoints)
    root = records.get(path[-1].generation) if path else None
    if root is None or root.source != "fresh" or root.number not in begun:
        return []
    return [checkpoint for checkpoint in checkpoints if checkpoint.name in root.unfinished]


def _saves_never_complete(unfinished: Iterable[CheckpointRecord]) -> bool:
    steps_by_generation: dict[int, set[int]] = defaultdict(set)
    for attempt in unfinished:
        steps_by_generation[attempt.generation].add(attempt.step)
    return any(len(steps) > _UNFINISHED_STEPS_MAX for steps in steps_by_generation.values())


def _newest_first(attempts: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    return sorted(attempts, key=lambda attempt: (attempt.generation, attempt.step, attempt.attempt), reverse=True)
