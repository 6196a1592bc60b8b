"""Which rank the others wait for. Looks at collectives in, findings out.

Ranks of a synchronous run all take equally long for a step, for the fast ones wait. So a slow one is not found by its
step time but by this: at a moment at which all ranks are looked at, it has begun fewer collectives than all others. The
part of such moments is the part of the run's time that the others spend waiting for it alone.

Invariants: looks of one tick only are compared, and only while all ranks train; a rank is found when the others waited
for it, and for it alone, in a tenth of the last two minutes' looks, and so much more often than for any other rank that
equal ranks would hardly ever show it (four standard deviations of a Poisson count); what was found is told again only
when it has become twice as bad, or after it had ended.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from workers.messages import RankPulse

_LOOKS_KEPT = 240
_BEHIND_ENOUGH = 20
_PART_MIN = 0.1
_DEVIATIONS_MIN = 4.0
_WORSE_FACTOR = 2.0
_OPEN_TICKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """`cost_fraction`: part of the run's time, 0 to 1, in which all other ranks waited for this one."""

    rank: int
    cost_fraction: float


@dataclass(slots=True)
class StragglerFinder:
    """For one world size; None in the history stands for a look at which nobody was behind alone."""

    world_size: int
    _open: dict[int, dict[int, int]] = field(default_factory=dict)
    _behind: deque[int | None] = field(default_factory=lambda: deque(maxlen=_LOOKS_KEPT))
    _told: dict[int, float] = field(default_factory=dict)

    def pulse(self, rank: int, pulse: RankPulse) -> Straggler | None:
        """A rank's pulse; the finding, if it completes one."""
        if self.world_size < 2 or pulse.phase != "training" or not pulse.stepped:
            return None
        looks = self._open.setdefault(pulse.tick, {})
        looks[rank] = pulse.sequence
        if len(looks) < self.world_size:
            for old in [tick for tick in self._open if tick < pulse.tick - _OPEN_TICKS]:
                del self._open[old]
            return None
        del self._open[pulse.tick]
        lowest = min(looks.values())
        behind = [rank for rank, sequence in looks.items() if sequence == lowest]
        self._behind.append(behind[0] if len(behind) == 1 else None)
        return self._find()

    def waits(self) -> dict[int, float]:
        """By rank, the part of the looks that are kept, 0 to 1, at which all others waited for it alone."""
        counts = Counter(rank for rank in self._behind if rank is not None)
        return {rank: count / len(self._behind) for rank, count in counts.items()}

    def _find(self) -> Straggler | None:
        counts = Counter(rank for rank in self._behind if rank is not None)
        ranked = [*counts.most_common(2), (-1, 0), (-1, 0)]
        (worst, most), (_, second) = ranked[0], ranked[1]
        part = most / len(self._behind)
        distinct = most - second >= _DEVIATIONS_MIN * math.sqrt(most + second)
        if part < _PART_MIN or not distinct:
            self._told.clear()
            return None
        if most < _BEHIND_ENOUGH or part < _WORSE_FACTOR * self._told.get(worst, 0.0):
            return None
        self._told[worst] = part
        return Straggler(rank=worst, cost_fraction=part)
