"""What a repeated measurement says that is noisy, and that may change for good from one moment to the next.

Invariants: the value is the median of the last few; noise moves it little. One that is more than `_JUMP` times off is
believed at once, though only as `_LEAP_MAX` times the value before at most, until a second one confirms it; if the next
one is as before it, it was an outlier, and what held before holds again.
"""

from collections import deque
from collections.abc import Iterable

_SAMPLES = 16
_JUMP = 3.0
_LEAP_MAX = 10.0


class Measure:
    """Of something that is at least 0. `floor`: what is less than this counts as this when values are compared.
    `value`: None before anything was measured."""

    def __init__(self, floor: float = 1e-3) -> None:
        self._floor = floor
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._usual: float | None = None
        self._doubtful: float | None = None
        self.value: float | None = None

    def add(self, sample: float) -> None:
        usual = self._usual
        if usual is None or not self._far(sample, usual):
            self._samples.append(sample)
            self._doubtful = None
        elif self._doubtful is None or self._far(sample, self._doubtful):
            self._doubtful = sample
        else:
            self._samples.clear()
            self._samples.extend((self._doubtful, sample))
            self._doubtful = None
        self.value = self._usual = _median(self._samples)
        if self._doubtful is not None:
            low, high = self.value / _LEAP_MAX, max(self.value, self._floor) * _LEAP_MAX
            self.value = min(max(self._doubtful, low), high)

    def _far(self, one: float, other: float) -> bool:
        one, other = max(one, self._floor), max(other, self._floor)
        return one > _JUMP * other or other > _JUMP * one


def _median(samples: Iterable[float]) -> float:
    # Of few numbers, and a million times in a simulation: `statistics.median` takes three times as long.
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
