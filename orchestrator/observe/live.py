"""What a running generation's ranks said last, beside the ledger: from their pulses. Not thread-safe.

It holds a few numbers a rank, and forgets them all when a generation begins.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.messages import RankPulse

HEARD_SECONDS = 10.0


@dataclass(slots=True)
class _Rank:
    heard_at: float
    step: int
    step_seconds: float | None = None
    memory_bytes: int = 0


@dataclass(slots=True)
class Live:
    """`step`: the last one that a rank has finished, None before any was heard of. `stepped_at`: when that was heard,
    in Unix seconds. `allowance_seconds`: how long the ranks said that they might be still. `waited_for`: by rank, the
    part of the time, 0 to 1, in which the others wait for it alone."""

    generation: int = 0
    step: int | None = None
    stepped_at: float | None = None
    loss: float | None = None
    allowance_seconds: float = 0.0
    waited_for: Mapping[int, float] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def begin(self, generation: int) -> None:
        """Ranks of another generation start."""
        if generation != self.generation:
            self.generation, self.step, self.stepped_at, self.allowance_seconds = generation, None, None, 0.0
            self.waited_for = {}
            self._ranks.clear()

    def pulse(self, rank: int, pulse: RankPulse, at: float) -> None:
        """`at`: Unix seconds."""
        if pulse.generation != self.generation:
            return
        seen = self._ranks.get(rank)
        if seen is None:
            seen = self._ranks[rank] = _Rank(heard_at=at, step=pulse.step)
        seen.heard_at, seen.step = at, pulse.step
        if pulse.step_seconds:
            seen.step_seconds = statistics.fmean(pulse.step_seconds)
        if rank == 0:
            self.allowance_seconds = pulse.allowance_seconds
            if pulse.loss is not None:
                self.loss = pulse.loss
        if pulse.stepped and (self.step is None or pulse.step > self.step):
            self.step, self.stepped_at = pulse.step, at

    def uses_memory(self, rank: int, memory_bytes: int) -> None:
        if seen := self._ranks.get(rank):
            seen.memory_bytes = memory_bytes

    def heard(self, now: float) -> int:
        """How many ranks were heard of lately."""
        return sum(now - seen.heard_at <= HEARD_SECONDS for seen in self._ranks.values())

    def step_seconds(self) -> tuple[float, float, float] | None:
        """Of the fastest, the median and the slowest rank."""
        took = sorted(seen.step_seconds for seen in self._ranks.values() if seen.step_seconds is not None)
        return (took[0], statistics.median_low(took), took[-1]) if took else None

    def memory(self) -> dict[int, int]:
        return {rank: seen.memory_bytes for rank, seen in self._ranks.items() if seen.memory_bytes}
