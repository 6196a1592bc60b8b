"""Where a run is after some time, if nothing fails and no interval changes.

A course consists of cycles: a durable interval of training, then the durable save's pause. Within a cycle, snapshots
that stay in memory follow each other at the shorter interval, as many as fit before the durable save, which is one too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.simulator.draws import Draws, most_below
from orchestrator.decide.tuner import TierName


@dataclass(slots=True)
class Tier:
    """How long saves of one tier take, by their number: `stall` and `pause`, which is stall and slowdown, hold training
    up; `ready` after its beginning a save can be restored. `used`: saves so far. `steps`: the interval between two, in
    training steps."""

    name: TierName
    stall: Draws
    pause: Draws
    ready: Draws
    restart: Draws
    used: int = 0
    restarts: int = 0
    steps: int = 0

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
    """Begins now, with training. `memory`: its tier, if snapshots stay in memory. `since_durable`: how long was trained
    since the last durable save, so that the first cycle is shorter."""

    def __init__(self, durable: Tier, memory: Tier | None, step_seconds: float, since_durable: float = 0.0) -> None:
        self._durable, self._memory, self._since_durable = durable, memory, since_durable
        self._durable_used, self._memory_used = durable.used, memory.used if memory is not None else 0
        self._interval = durable.steps * step_seconds
        self._first = max(step_seconds, self._interval - since_durable)
        self._cycle_mean = self._interval + durable.pause.mean
        if memory is None:
            self._short, self._between, self._between_first = self._interval, 0, 0
        else:
            self._short = memory.steps * step_seconds
            self._between, self._between_first = self._fitting(self._interval), self._fitting(self._first)
            self._cycle_mean += self._between * memory.pause.mean

    def after(self, seconds: float) -> Position:
        """At that time."""
        guess = int((seconds + self._interval - self._first) / self._cycle_mean)
        whole = most_below(seconds, self._spent, guess)
        rest = seconds - self._spent(whole)
        part, between = 0, self._between_in(whole)
        if between:
            part = most_below(rest, lambda count: self._spent_in(whole, count), int(rest / self._short))
            part = min(between, part)
            rest -= self._spent_in(whole, part)
        trained = min(rest, self._stretch(whole, part))
        return Position(seconds, whole, part, trained, rest - trained)

    def next_end(self, position: Position) -> Position:
        """When the next save has ended."""
        whole, part = position.whole, position.part + 1
        if part > self._between_in(whole):
            whole, part = whole + 1, 0
        return Position(self._spent(whole) + self._spent_in(whole, part), whole, part)

    def seconds_until(self, work: float) -> float:
        """Until so many seconds of training are done."""
        whole = 0 if work <= self._first else 1 + _full_before(work - self._first, self._interval)
        left = work - self._training(whole)
        part = min(self._between_in(whole), _full_before(left, self._short))
        return self._spent(whole) + self._spent_in(whole, part) + left - part * self._short

    def work(self, position: Position) -> float:
        return self._training(position.whole) + position.part * self._short + position.trained

    def since_durable(self, position: Position) -> float:
        """How long was trained since the last durable save."""
        before = self._since_durable if position.whole == 0 else 0.0
        return before + position.part * self._short + position.trained

    def snapshots(self, position: Position) -> int:
        """How many snapshots that stay in memory have been taken and are over."""
        return self._snapshots(position.whole) + position.part

    def saving(self, position: Position) -> Tier | None:
        """The tier whose save has begun there and still holds training up."""
        if position.paused <= 0:
            return None
        return self._memory if position.part < self._between_in(position.whole) else self._durable

    def durable_saves(self, position: Position) -> Iterator[Boundary]:
        """Those that began by then, the newest first."""
        for number in range(position.whole - (self.saving(position) is not self._durable), -1, -1):
            index = self._durable_used + number
            at = self._spent(number + 1) - self._durable.pause[index]
            yield Boundary(at, self._training(number + 1), at + self._durable.ready[index])

    def memory_saves(self, position: Position) -> Iterator[Boundary]:
        """The snapshots that began by then, those of durable saves among them; the newest first."""
        memory = self._memory
        if memory is None:
            return
        saving = self.saving(position)
        whole, part = position.whole, position.part + (saving is memory)
        if saving is self._durable:
            whole, part = whole + 1, 0
        for cycle in range(whole, -1, -1):
            first = self._memory_used + self._snapshots(cycle)
            for number in range(part - 1, -1, -1):
                at = self._spent(cycle) + self._spent_in(cycle, number + 1) - memory.pause[first + number]
                work = self._training(cycle) + (number + 1) * self._short
                yield Boundary(at, work, at + memory.ready[first + number])
            if cycle > 0:
                at = self._spent(cycle) - self._durable.pause[self._durable_used + cycle - 1]
                yield Boundary(at, self._training(cycle), at + memory.ready[first])
                part = self._between_in(cycle - 1)

    def _training(self, cycles: int) -> float:
        """In so many whole cycles."""
        return self._first + (cycles - 1) * self._interval if cycles else 0.0

    def _snapshots(self, cycles: int) -> int:
        """That stay in memory, in so many whole cycles."""
        return self._between_first + (cycles - 1) * self._between if cycles else 0

    def _spent(self, cycles: int) -> float:
        """By so many whole cycles."""
        seconds = self._training(cycles) + self._durable.pause.sum(self._durable_used, cycles)
        if self._between or self._between_first:
            assert self._memory is not None
            seconds += self._memory.pause.sum(self._memory_used, self._snapshots(cycles))
        return seconds

    def _spent_in(self, cycle: int, count: int) -> float:
        """By so many intervals in memory with their saves, in the cycle that follows `cycle` others."""
        if not count:
            return 0.0
        assert self._memory is not None
        return count * self._short + self._memory.pause.sum(self._memory_used + self._snapshots(cycle), count)

    def _fitting(self, interval: float) -> int:
        """How many snapshots there is room for before a durable save."""
        return max(0, math.ceil(interval / self._short - 1e-9) - 1)

    def _between_in(self, cycle: int) -> int:
        return self._between if cycle else self._between_first

    def _stretch(self, cycle: int, part: int) -> float:
        """Training until the save that follows `part` snapshots in its cycle."""
        between = self._between_in(cycle)
        if part < between:
            return self._short
        return (self._interval if cycle else self._first) - between * self._short


def _full_before(work: float, interval: float) -> int:
    """How many intervals are over, with their saves, when so much training is just done."""
    return max(0, math.ceil(work / interval - 1e-9) - 1)
