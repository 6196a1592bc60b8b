"""Which step all ranks are told to save when a save is wanted at once. Events in, orders out; no clock, no Ray.

A save needs the same step on every rank, and no collective may decide on it. So a step is chosen that lies a little
ahead of the newest one that any rank is known to have finished: as far as the run gets while what is known is old and
while the order travels. A rank that is past it all the same says so, and a step further ahead is ordered.

Invariants: one step is ordered at a time, and those who ask meanwhile share it; an order names its generation and ends
with it; after `TRIES_MAX` orders in a row without a commit the save is given up, and whoever wanted it is told.
"""

import math
from dataclasses import dataclass

TRIES_MAX = 6
_TRAVEL_SECONDS = 0.5
"""How old the newest known step may be, and how long an order takes to reach a rank, together."""
_RATE_WEIGHT = 0.3
_RATE_SECONDS_MIN = 0.4
"""Over less than that no rate is told: two ranks may tell of neighbouring steps within a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSave:
    """Every rank of `generation` saves right after it has finished this step."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDone:
    """The save that was wanted is committed, or (`committed` is False) was given up: `reason` says why."""

    step: int
    committed: bool
    reason: str = ""


Decision = OrderSave | SaveDone


class SaveOrder:
    """`at` is a clock in seconds. Begins with `generation_started`."""

    def __init__(self) -> None:
        self._generation = 0
        self._newest = -1
        self._timed: tuple[int, float] | None = None
        self._steps_per_second = 0.0
        self._wanted = False
        self._ordered = -1
        self._tries = 0

    @property
    def wanted(self) -> bool:
        """Whether a save is wanted that is not committed yet."""
        return self._wanted

    def generation_started(self, generation: int, restored_step: int) -> None:
        """What was wanted of an earlier generation is gone with its ranks."""
        self._generation, self._newest, self._timed = generation, restored_step, None
        self._wanted = False

    def progressed(self, generation: int, step: int, *, at: float) -> list[Decision]:
        """A rank has finished this step. A step that was wanted before any was known is ordered now."""
        if generation != self._generation or step <= self._newest:
            return []
        if self._timed is None:
            self._timed = (step, at)
        elif at - self._timed[1] >= _RATE_SECONDS_MIN:
            rate = (step - self._timed[0]) / (at - self._timed[1])
            known = self._steps_per_second or rate
            self._steps_per_second = known + _RATE_WEIGHT * (rate - known)
            self._timed = (step, at)
        self._newest = step
        return self._order() if self._wanted and self._ordered < 0 else []

    def want(self) -> list[Decision]:
        """Save at once. Before the first step of a generation nothing is ordered until there is one."""
        if self._wanted:
            return []
        self._wanted, self._ordered, self._tries = True, -1, 0
        return self._order() if self._timed is not None else []

    def refused(self, generation: int, step: int, newest_step: int) -> list[Decision]:
        """A rank had already finished `newest_step` when it was told to save an earlier one."""
        if generation != self._generation:
            return []
        self._newest = max(self._newest, newest_step)
        return self._again(step, "the ranks were faster than the order")

    def not_saved(self, generation: int, step: int, reason: str) -> list[Decision]:
        """The save of this step was given up."""
        return self._again(step, reason) if generation == self._generation else []

    def committed(self, generation: int, step: int) -> list[Decision]:
        """A checkpoint is in place; one that is as new as what was ordered will do."""
        if generation != self._generation or not self._wanted or not 0 <= self._ordered <= step:
            return []
        self._wanted = False
        return [SaveDone(step=step, committed=True)]

    def _again(self, step: int, reason: str) -> list[Decision]:
        if not self._wanted or step != self._ordered:
            return []
        if self._tries < TRIES_MAX:
            return self._order()
        self._wanted = False
        return [SaveDone(step=step, committed=False, reason=f"{self._tries} orders did not lead to a commit: {reason}")]

    def _order(self) -> list[Decision]:
        ahead = max(1, math.ceil(self._steps_per_second * _TRAVEL_SECONDS * 2.0**self._tries))
        self._tries += 1
        self._ordered = max(self._newest, self._ordered) + ahead
        return [OrderSave(generation=self._generation, step=self._ordered)]
