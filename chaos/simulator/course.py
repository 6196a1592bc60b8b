"""Where a run is after some time, if nothing fails and no interval changes.

A course consists of cycles: a durable interval of training, then the durable save's pause. Within a cycle, snapshots
that stay in memory follow each other at the shorter interval, as many as fit before the durable save, which is one too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.simulator.draws import Draws, most_below


@dataclass(slots=True)
class Tier:
    """How long saves of one tier take. `used` counts the saves so far: the index of the next one's costs. `steps`: the
    interval between two, in training steps."""

    name: str
    stall: Draws
    interference: Draws
    durable: Draws
    restart: Draws
    used: int = 0
    restarts: int = 0
    steps: int = 0

    @property
    def pause_mean(self) -> float:
        return self.stall.mean + self.interference.mean

    def pause(self, first: int, count: int = 1) -> float:
        """How long `count` saves hold training up, the first of them after `first` others."""
        first += self.used
        return self.stall.sum(first, count) + self.interference.sum(first, count)

    def ready(self, number: int) -> float:
        """How long after its beginning the save that comes after `number` others can be restored."""
        return max(self.stall[self.used + number], self.durable[self.used + number])

    def restart_seconds(self) -> float:
        self.restarts += 1
        return self.restart[self.restarts - 1]


@dataclass(frozen=True, slots=True)
class Position:
    """After `whole` cycles and `part` intervals in memory, `trained` seconds into the next interval; if that is over,
    `paused` seconds into its save."""

    seconds: float
    whole: int
    part: int = 0
    trained: float = 0.0
    paused: float = 0.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """A save's beginning: after so many seconds, and so much training; it can be restored at `ready`."""

    at: float
    work: float
    ready: float


class Course:
    """Begins now, with training. `memory`: its tier, if snapshots stay in memory."""

    def __init__(self, durable: Tier, memory: Tier | None, step_seconds: float) -> None:
        self._durable, self._memory = durable, memory
        self._interval = durable.steps * step_seconds
        self._short = memory.steps * step_seconds if memory is not None else self._interval
        self.between = math.ceil(durable.steps / memory.steps) - 1 if memory is not None else 0
        self._cycle_mean = self._interval + durable.pause_mean
        if memory is not None:
            self._cycle_mean += self.between * memory.pause_mean

    def after(self, seconds: float, cycles: int) -> Position:
        """At that time, or when so many cycles are over, whichever comes first."""
        if cycles <= 2 * seconds / self._cycle_mean and (spent := self._spent(cycles)) <= seconds:
            return Position(spent, cycles)
        whole = min(cycles - 1, most_below(seconds, self._spent, int(seconds / self._cycle_mean)))
        rest = seconds - self._spent(whole)
        part = 0
        if self.between:
            part = most_below(rest, lambda count: self._spent_in(whole, count), int(rest / self._short))
            part = min(self.between, part)
            rest -= self._spent_in(whole, part)
        trained = min(rest, self._stretch(part))
        return Position(seconds, whole, part, trained, rest - trained)

    def seconds_until(self, work: float) -> float:
        """Until so many seconds of training are done."""
        whole = _full_before(work, self._interval)
        part = min(self.between, _full_before(work - whole * self._interval, self._short))
        rest = work - whole * self._interval - part * self._short
        return self._spent(whole) + self._spent_in(whole, part) + rest

    def work(self, position: Position) -> float:
        return position.whole * self._interval + position.part * self._short + position.trained

    def saving(self, position: Position) -> Tier | None:
        """The tier whose save has begun there and still holds training up."""
        if position.paused <= 0:
            return None
        return self._memory if position.part < self.between else self._durable

    def durable_saves(self, position: Position) -> Iterator[Boundary]:
        """Those that began by then, the newest first."""
        durable = self._durable
        begun = position.whole + (self.saving(position) is durable)
        for number in range(begun - 1, -1, -1):
            at = self._spent(number + 1) - durable.pause(number)
            yield Boundary(at, (number + 1) * self._interval, at + durable.ready(number))

    def memory_saves(self, position: Position) -> Iterator[Boundary]:
        """The snapshots, those of durable saves among them, that began by then; the newest first."""
        memory = self._memory
        if memory is None:
            return
        saving = self.saving(position)
        whole, part = position.whole + (saving is self._durable), position.part + (saving is memory)
        if saving is self._durable:
            part = 0
        for cycle in range(whole, -1, -1):
            for number in range(part - 1, -1, -1):
                index = cycle * self.between + number
                at = self._spent(cycle) + self._spent_in(cycle, number + 1) - memory.pause(index)
                work = cycle * self._interval + (number + 1) * self._short
                yield Boundary(at, work, at + memory.ready(index))
            if cycle > 0:
                at = self._spent(cycle) - self._durable.pause(cycle - 1)
                yield Boundary(at, cycle * self._interval, at + memory.ready(cycle * self.between))
            part = self.between

    def _spent(self, cycles: int) -> float:
        """By so many whole cycles."""
        memory = self._memory.pause(0, cycles * self.between) if self._memory is not None else 0.0
        return cycles * self._interval + self._durable.pause(0, cycles) + memory

    def _spent_in(self, cycle: int, count: int) -> float:
        """By so many intervals in memory with their saves, in the cycle that follows `cycle` others."""
        pauses = self._memory.pause(cycle * self.between, count) if self._memory is not None else 0.0
        return count * self._short + pauses

    def _stretch(self, part: int) -> float:
        """Training until the save that follows `part` others in its cycle."""
        return self._short if part < self.between else self._interval - self.between * self._short


def _full_before(work: float, interval: float) -> int:
    """How many intervals are over, with their saves, when so much training is just done."""
    return max(0, math.ceil(work / interval - 1e-9) - 1)
