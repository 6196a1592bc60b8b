"""Which rung to restore from.

Invariants:
- The newest checkpoint on the lineage that nothing speaks against.
- Never a fresh start beside a committed checkpoint, good or bad, on the lineage or not: that would lose the run in
  silence.
- Nor where saves never complete: if one generation left unfinished saves of several steps, the run went on past a save
  that failed, and after the next failure would do all that work again, for nothing.
- A checkpoint on probation, and what came out of it, is passed over for one before it. If there is none it is taken all
  the same: a suspicion is no proof.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, chain, eligible
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


Choice = Restore | Fresh | NothingVerifies


def choose(
    *,
    generations: Iterable[GenerationRecord],
    checkpoints: Iterable[CheckpointRecord],
    rejected: Mapping[str, str],
    unfinished: Iterable[CheckpointRecord] = (),
    suspects: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """Choose from all committed `checkpoints`; `rejected` maps names to reasons: quarantined, or visibly damaged.

    `unfinished` are the attempts without a manifest; `suspects` maps names that are on probation to reasons.
    """
    generations, checkpoints, unfinished = tuple(generations), tuple(checkpoints), tuple(unfinished)
    rungs = eligible(generations, checkpoints)
    doubtful = _with_descendants(rungs, suspects)
    for against in ({**doubtful, **rejected}, rejected):
        passed: list[tuple[str, str]] = []
        for rung in rungs:
            if rung.name not in against:
                return Restore(name=rung.name, generation=rung.generation, step=rung.step, passed=tuple(passed))
            passed.append((rung.name, against[rung.name]))
    if checkpoints:
        named = {name for name, _ in passed}
        rolled_back = _newest_first(checkpoint for checkpoint in checkpoints if checkpoint.name not in named)
        highest = chain(generations, checkpoints)[0].generation
        off_lineage = f"belongs to a timeline that generation {highest} does not continue"
        found = [*passed, *((one.name, rejected.get(one.name, off_lineage)) for one in rolled_back)]
        return NothingVerifies(found=tuple(found))
    names = tuple(attempt.name for attempt in _newest_first(unfinished))
    if _saves_never_complete(unfinished):
        return NothingVerifies(found=tuple((name, "its save never completed") for name in names))
    return Fresh(unfinished=names)


def _with_descendants(rungs: Sequence[CheckpointRecord], suspects: Mapping[str, str]) -> dict[str, str]:
    """The suspects and, since rungs come newest first, all that were reached from them."""
    oldest = max((index for index, rung in enumerate(rungs) if rung.name in suspects), default=-1)
    came_from = f"came out of {rungs[oldest].name}, which is on probation" if oldest >= 0 else ""
    return {rung.name: suspects.get(rung.name, came_from) for rung in rungs[: oldest + 1]}


def _saves_never_complete(unfinished: Iterable[CheckpointRecord]) -> bool:
    steps_by_generation: dict[int, set[int]] = defaultdict(set)
    for attempt in unfinished:
        steps_by_generation[attempt.generation].add(attempt.step)
    return any(len(steps) > _UNFINISHED_STEPS_MAX for steps in steps_by_generation.values())


def _newest_first(attempts: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    return sorted(attempts, key=lambda attempt: (attempt.generation, attempt.step, attempt.attempt), reverse=True)
