"""By how much steps are slower while a save is written. Step times in, seconds out.

Invariants: steps outside of saves make up what is usual; those within count with what they take beyond it, in all, and
never as less than nothing. What the usual steps' own noise would show as well (two standard deviations) is none.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

_USUAL_KEPT = 128
_DEVIATIONS = 2.0


class Slowdown:
    """`seconds`: of the save that is being written, or was last."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_USUAL_KEPT)
        self._within: list[float] = []
        self._writing = False

    def begun(self) -> None:
        """A save is being written from now on."""
        self._writing, self._within = True, []

    def ended(self) -> None:
        self._writing = False

    def steps_took(self, seconds: Sequence[float]) -> Sequence[float]:
        """The last steps took so long; returns those that no save slowed down."""
        if self._writing:
            self._within += seconds
            return ()
        self._usual += seconds
        return seconds

    @property
    def seconds(self) -> float:
        if not self._usual:
            return 0.0
        number = len(self._within)
        excess = sum(self._within) - number * statistics.fmean(self._usual)
        noise = _DEVIATIONS * statistics.pstdev(self._usual) * math.sqrt(number)
        return excess if excess > max(0.0, noise) else 0.0
