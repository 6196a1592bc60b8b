"""When failures strike: seeded sources of failure times.

Invariants:
- A source gives the gaps between its failures, in seconds of wall time, and goes on for ever, except for a trace, which
  ends with its last failure. The same generator state gives the same gaps.
- Wall time runs on while a job restarts, so a failure may strike a job that is not training yet.
- `failures_per_second` is a source's mean rate over so long a run.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchestrator.decide.failure_rate import Domain

_AT_ONCE = 512


class FailureSource(Protocol):
    """Failures of one kind."""

    def failures_per_second(self, run_seconds: float) -> float: ...

    def gaps(self, rng: np.random.Generator) -> Iterator[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Memoryless: a Poisson process."""

    mtbf_seconds: float

    def failures_per_second(self, run_seconds: float) -> float:
        return 1.0 / self.mtbf_seconds

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        while True:
            yield from rng.exponential(self.mtbf_seconds, _AT_ONCE).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Independent gaps with this mean. With a shape below 1, failures come in clusters: one makes the next likelier."""

    mtbf_seconds: float
    shape: float

    def failures_per_second(self, run_seconds: float) -> float:
        return 1.0 / self.mtbf_seconds

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        scale = self.mtbf_seconds / math.gamma(1.0 + 1.0 / self.shape)
        while True:
            yield from (scale * rng.weibull(self.shape, _AT_ONCE)).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovModulated:
    """A Poisson process whose rate jumps: it stays in each state for an exponential time, then goes to the next one.

    mtbf_seconds, stay_seconds: of each state; the means of the gaps, and of the time that it stays there.
    """

    mtbf_seconds: tuple[float, ...]
    stay_seconds: tuple[float, ...]

    def failures_per_second(self, run_seconds: float) -> float:
        stays = zip(self.stay_seconds, self.mtbf_seconds, strict=True)
        return sum(stay / mtbf for stay, mtbf in stays) / sum(self.stay_seconds)

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        share = np.array(self.stay_seconds) / sum(self.stay_seconds)
        first = int(rng.choice(len(share), p=share))
        gap = 0.0
        for state in itertools.islice(itertools.cycle(range(len(share))), first, None):
            left = rng.exponential(self.stay_seconds[state])
            while (wait := rng.exponential(self.mtbf_seconds[state])) < left:
                yield gap + wait
                gap, left = 0.0, left - wait
            gap += left  # what is left of the wait is memoryless, so it is drawn anew at the next state's rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSteps:
    """A Poisson process whose rate changes at fixed times; the last rate holds from then on.

    from_seconds: when each rate begins, ascending; the first is 0. mtbf_seconds: of each.
    """

    from_seconds: tuple[float, ...]
    mtbf_seconds: tuple[float, ...]

    def failures_per_second(self, run_seconds: float) -> float:
        ends = (*self.from_seconds[1:], math.inf)
        spans = (max(0.0, min(end, run_seconds) - begin) for begin, end in zip(self.from_seconds, ends, strict=True))
        return sum(span / mtbf for span, mtbf in zip(spans, self.mtbf_seconds, strict=True)) / run_seconds

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        ends = (*self.from_seconds[1:], math.inf)
        at = last = 0.0
        for end, mtbf in zip(ends, self.mtbf_seconds, strict=True):
            while (wait := rng.exponential(mtbf)) < end - at:
                at += wait
                yield at - last
                last = at
            at = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """One failure every so often, such as a nightly preemption, each up to `jitter_seconds` later, evenly spread."""

    every_seconds: float
    jitter_seconds: float = 0.0

    def failures_per_second(self, run_seconds: float) -> float:
        return 1.0 / self.every_seconds

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        last = 0.0
        for number in itertools.count(1):
            at = max(last, number * self.every_seconds + self.jitter_seconds * rng.random())
            yield at - last
            last = at


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Gaps as they were recorded."""

    seconds_since_previous_failure: tuple[float, ...]

    def failures_per_second(self, run_seconds: float) -> float:
        return len(self.seconds_since_previous_failure) / self.length_seconds

    @property
    def length_seconds(self) -> float:
        """Until its last failure."""
        return sum(self.seconds_since_previous_failure)

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        yield from self.seconds_since_previous_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A source, and what its failures are to the job.

    cause: as the ledger has it. domain: what each takes with it. memory_survives: the part of these failures, 0 to 1,
    after which a complete set of snapshots is still in memory.
    """

    source: FailureSource
    cause: str = "signal"
    domain: Domain = "process"
    memory_survives: float = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, at this wall time of the run."""

    at: float
    cause: str
    domain: Domain
    memory_survives: bool


def failures(sources: Sequence[Failures], seed: int) -> Iterator[Failure]:
    """The failures of all sources, in the order of time. Each has random numbers of its own, so that one more source
    changes nothing about the others."""
    streams = [_stream(one, np.random.default_rng((seed, number))) for number, one in enumerate(sources)]
    return heapq.merge(*streams, key=lambda failure: failure.at)


def _stream(of: Failures, rng: np.random.Generator) -> Iterator[Failure]:
    times, fates = rng.spawn(2)
    at = 0.0
    for gap in of.source.gaps(times):
        at += gap
        yield Failure(at, of.cause, of.domain, bool(fates.random() < of.memory_survives))
