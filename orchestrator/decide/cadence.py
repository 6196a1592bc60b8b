"""How often a snapshot is taken that stays in memory.

Invariants:
- One after every k steps, k being as small as the overhead that the user allows for the copies: at least 2, and
  ceil(copy_seconds / (overhead_max * step_seconds)). Both are medians, the copy's of the slowest rank at each step.
- Before anything is measured k is `_STEPS_FIRST`: the first copy is one of these, and tells what they cost.
- k changes only when it is off by more than a quarter, so that noise does not change it.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_STEPS_FIRST = 10
_STEPS_MIN = 2
_STEP_SAMPLES_MIN = 3
_STEP_SAMPLES = 64
_COPY_SAMPLES = 8
_CHANGE_MIN = 1.25

Every = int | Literal["auto"] | None
"""After how many steps, if that is fixed; None for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From now on after every `steps`; the rest is what that was decided from."""

    steps: int
    copy_seconds: float
    step_seconds: float
    overhead_max: float


class SnapshotCadence:
    """`steps`: the k that holds now, None if no such snapshots are taken. `before`: the k of an earlier coordinator."""

    def __init__(self, every: Every, overhead_max: float, *, before: int | None = None) -> None:
        self._auto = every == "auto"
        self._overhead_max = overhead_max
        self.steps: int | None = (before or _STEPS_FIRST) if every == "auto" else every
        self._step_seconds: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._copies: dict[tuple[int, int], float] = {}

    def steps_took(self, seconds: Iterable[float]) -> None:
        """So long took the last steps of some rank."""
        self._step_seconds.extend(seconds)

    def copied(self, generation: int, step: int, seconds: float) -> Change | None:
        """A rank's snapshot took so long; the new k, if it changes."""
        key = (generation, step)
        self._copies[key] = max(seconds, self._copies.get(key, 0.0))
        for old in list(self._copies)[:-_COPY_SAMPLES]:
            del self._copies[old]
        if not self._auto or len(self._step_seconds) < _STEP_SAMPLES_MIN:
            return None
        copy_seconds = statistics.median(self._copies.values())
        step_seconds = statistics.median(self._step_seconds)
        steps = steps_between(copy_seconds, step_seconds, self._overhead_max)
        assert self.steps is not None
        if not self.steps / _CHANGE_MIN > steps and not self.steps * _CHANGE_MIN < steps:
            return None
        self.steps = steps
        return Change(
            steps=steps, copy_seconds=copy_seconds, step_seconds=step_seconds, overhead_max=self._overhead_max
        )


def steps_between(copy_seconds: float, step_seconds: float, overhead_max: float) -> int:
    """The fewest steps between two copies with which these take at most `overhead_max` of the time of the steps."""
    return max(_STEPS_MIN, math.ceil(copy_seconds / (overhead_max * max(step_seconds, 1e-6))))
