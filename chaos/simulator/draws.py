"""How long saves and restores take: random or fixed, with the sum of any so many in a row at hand.

The engine passes over thousands of saves at once and needs to know what they took together. So the numbers are drawn
ahead, into a pool that is used round and round, with its running sums. A pool's mean is exactly that of its cost.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_POOL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """So many seconds for each save or restore: one of `seen`, if there are any, as likely as it is frequent there;
    else log-normal with this mean and coefficient of variation."""

    mean_seconds: float = 0.0
    variation: float = 0.0
    seen: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return sum(self.seen) / len(self.seen) if self.seen else self.mean_seconds

    def pool(self, rng: np.random.Generator) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Numbers to use in turns: one, if all are equal."""
        if self.seen:
            pool = rng.permutation(np.resize(self.seen, _POOL))
        elif self.variation and self.mean_seconds:
            pool = rng.lognormal(0.0, math.sqrt(math.log1p(self.variation**2)), _POOL)
        else:
            return np.array([self.mean_seconds])
        return pool * (self.mean / pool.mean()) if self.mean else pool


NOTHING = Cost()


class Draws:
    """The number at each index, from 0, for ever."""

    def __init__(self, pool: Sequence[float]) -> None:
        self._pool = pool
        self._only = pool[0] if len(pool) == 1 else None
        self._sums = [0.0, *itertools.accumulate(pool)]
        self.mean = self._sums[-1] / len(pool)

    def __getitem__(self, index: int) -> float:
        return self._pool[index % len(self._pool)]

    def sum(self, first: int, count: int) -> float:
        """Of `count` numbers from the index `first` on."""
        if self._only is not None:
            return count * self._only
        return self._until(first + count) - self._until(first)

    def _until(self, index: int) -> float:
        rounds, rest = divmod(index, len(self._pool))
        return rounds * self._sums[-1] + self._sums[rest]


def most_below(limit: float, used: Callable[[int], float], guess: int) -> int:
    """The largest n with used(n) <= limit. `used` ascends from used(0) <= limit; the nearer the guess, the faster."""
    low, step = max(guess, 0), 1
    if used(low) <= limit:
        while used(low + step) <= limit:
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = low
        while used(low := max(0, high - step)) > limit:
            high, step = low, 2 * step
    return bisect_right(range(low + 1, high), limit, key=used) + low
