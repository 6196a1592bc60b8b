"""Which ranks hang. Pulses in, decisions out.

A rank is quiet while nothing of it moves: no step, no phase, no sign of life, no collective begun. It is suspected when
it has been quiet for longer than the limit, and hung when a second window has passed without a move. Stacks that are
still being taken then, on a busy machine, are waited for a little longer: later they cannot be taken any more.

Invariants:
- The limit in training is max(floor, 3 x the 99th percentile of the step times shown), or 1.5 x a pause that was
  suspected and ended by itself. Starting, restoring and the first step, and phases that the loop declared, have
  allowances of their own; while any rank is within one, the others may wait for it.
- Quiet is counted from pulses alone, and no gap between two of them counts for more than a second: an agent or a
  coordinator that gets no processor time condemns nobody.
- A rank that has begun more collectives than one that still moves is waiting for it, and does not hang.
- Where all ranks compute (all use the processor, none waits), the second window is longer: nobody is waiting.
- The limit triples with each hang that comes before the run got past the step of the last one. A loop that does
  something long without declaring it is ended a few times, and then gets through.
- The one to blame is stopped or frozen, else behind in collectives, else outside of a collective by its stack. If that
  does not leave a single rank, nobody is blamed: all ranks are replaced anyway.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from workers.messages import RankPulse

_PERCENTILE = 0.99
_STEP_FACTOR = 3.0
_STEPS_KEPT = 512
_STEPS_ENOUGH = 20
_EARLY_SECONDS_MIN = 5.0
_EARLY_FACTOR = 10.0
_PAUSE_FACTOR = 1.5
_START_SECONDS_MIN = 30.0
_START_FACTOR = 3.0
_BUSY_SECONDS_MIN = 20.0
_BUSY_PART = 0.5
_GAP_SECONDS_MAX = 1.0
_STOPPED, _TRACED = "T", "t"  # as the kernel has it
_PULSE_SECONDS = 0.5
_FROZEN_SECONDS = 1.5
_SILENT_SECONDS = 20.0
_STACKS_SECONDS = 3.0
_PATIENCE_FACTOR = 3.0
_PATIENCE_MAX = 1000.0
_IN_TRAINING = ("training", "saving", "finishing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """These ranks have been quiet for longer than the limit: look at them, it may be the last opportunity."""

    ranks: tuple[int, ...]
    quiet_seconds: float
    limit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What was suspected moves again."""

    quiet_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """End the generation. `rank` is to blame, -1 if it could be any of `ranks`; `evidence` says what shows it."""

    rank: int
    ranks: tuple[int, ...]
    quiet_seconds: float
    limit_seconds: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A rank's agent has not been heard of for so long."""

    rank: int
    seconds: float


Decision = Suspect | Cleared | Hung | Silent


@dataclass(slots=True)
class _Rank:
    pulse: RankPulse
    heard_at: float
    quiet_seconds: float = 0.0
    cpu_seconds_at_move: float = 0.0
    frozen_seconds: float = 0.0
    in_collective: bool | None = None
    stacks_told: bool = False

    @property
    def busy(self) -> bool:
        return self.pulse.cpu_seconds - self.cpu_seconds_at_move >= _BUSY_PART * self.quiet_seconds

    @property
    def frozen(self) -> bool:
        """Whether not even the rank's watcher thread gets to run."""
        return self.frozen_seconds >= _FROZEN_SECONDS


@dataclass(slots=True)
class HangDetector:
    """`floor_seconds`: the limit is never below. `start_seconds_max`: for starting, restoring and the first step, until
    the run has shown how long these take."""

    floor_seconds: float
    start_seconds_max: float
    _world_size: int = 0
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _step_seconds_p99: float = 0.0
    _longest_pause_seconds: float = 0.0
    _longest_start_seconds: dict[str, float] = field(default_factory=dict)
    _suspected_seconds: float = 0.0
    _over: bool = True
    _patience: float = 1.0
    _hung_at_step: int = -1
    _clock: float = 0.0
    _looked_at: float | None = None

    # ------------------------------------------------------------ events

    def generation_started(self, world_size: int) -> None:
        self._world_size, self._ranks = world_size, {}
        self._suspected_seconds, self._over = 0.0, False

    def generation_ended(self) -> None:
        self._over = True

    def ended(self, rank: int) -> None:
        """A rank is gone: it sends no more pulses."""
        self._ranks.pop(rank, None)

    def stacks(self, rank: int, in_collective: bool | None) -> None:
        """What a stack that was taken while the rank was suspected shows; None: nothing."""
        if rank in self._ranks:
            self._ranks[rank].in_collective, self._ranks[rank].stacks_told = in_collective, True

    def pulse(self, rank: int, pulse: RankPulse) -> list[Decision]:
        """How a rank is now. Pulses of one rank come in order; `at` is its agent's clock."""
        known = self._ranks.get(rank)
        if self._over or known is None:
            if not self._over:
                self._ranks[rank] = _Rank(pulse, self._clock, cpu_seconds_at_move=pulse.cpu_seconds)
            return []
        if pulse.state == _TRACED:  # by what takes its stacks, above all: it is as it was before
            pulse = replace(pulse, state=known.pulse.state)
        gap = min(max(0.0, pulse.at - known.pulse.at), _GAP_SECONDS_MAX)
        if _mark(pulse) != _mark(known.pulse):
            self._learn(rank, known, pulse)
            known.quiet_seconds = min(max(0.0, pulse.still_seconds), gap)  # a collective may have begun since
            known.cpu_seconds_at_move, known.in_collective = pulse.cpu_seconds, None
        else:
            known.quiet_seconds += gap
        known.frozen_seconds = known.frozen_seconds + gap if pulse.tick == known.pulse.tick else 0.0
        known.pulse, known.heard_at = pulse, self._clock
        return self._judge()

    def look(self, now: float) -> list[Decision]:
        """Time has passed; to be called every second or so. Finds agents that say nothing any more."""
        self._clock += 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), 2 * _GAP_SECONDS_MAX)
        self._looked_at = now
        decisions: list[Decision] = []
        for rank, known in self._ranks.items():
            silent = self._clock - known.heard_at
            if not self._over and silent >= _SILENT_SECONDS:
                known.heard_at = self._clock  # told again after as long again
                decisions.append(Silent(rank=rank, seconds=silent))
        return decisions

    # ------------------------------------------------------------ limits

    @property
    def training_limit_seconds(self) -> float:
        """How long a rank may be quiet between two steps."""
        if len(self._step_seconds) < _STEPS_ENOUGH:
            shown = max(_EARLY_SECONDS_MIN, _EARLY_FACTOR * max(self._step_seconds, default=0.0))
        else:
            shown = _STEP_FACTOR * self._step_seconds_p99
        return max(self.floor_seconds, shown, _PAUSE_FACTOR * self._longest_pause_seconds) * self._patience

    def _limit(self, pulse: RankPulse) -> float:
        kind = _kind(pulse)
        if kind == "declared":
            return pulse.allowance_seconds
        if kind in _IN_TRAINING:
            return self.training_limit_seconds
        shown = self._longest_start_seconds.get(kind)
        if shown is None:
            return self.start_seconds_max
        return min(max(_START_SECONDS_MIN, _START_FACTOR * shown) * self._patience, self.start_seconds_max)

    def _learn(self, rank: int, before: _Rank, pulse: RankPulse) -> None:
        kind = _kind(before.pulse)
        if kind in _IN_TRAINING:
            if before.quiet_seconds >= self.training_limit_seconds / self._patience:
                self._longest_pause_seconds = max(self._longest_pause_seconds, before.quiet_seconds)
        elif kind != "declared":
            longest = self._longest_start_seconds.get(kind, 0.0)
            self._longest_start_seconds[kind] = max(longest, before.quiet_seconds)
        if rank != 0 or pulse.step <= before.pulse.step:
            return  # ranks keep step, so one of them shows it for all
        # The first step of a generation compiles, allocates and connects: it says little of the others.
        self._step_seconds.extend(pulse.step_seconds[1:] if kind == "first_step" else pulse.step_seconds)
        ordered = sorted(self._step_seconds)
        if ordered:
            self._step_seconds_p99 = ordered[math.ceil(_PERCENTILE * len(ordered)) - 1]
        if pulse.step > self._hung_at_step:
            self._patience = 1.0

    # ------------------------------------------------------------ judging

    def _judge(self) -> list[Decision]:
        limit = max(self._limit(known.pulse) for known in self._ranks.values())
        quiet = self._quiet(limit)
        if not quiet:
            lasted, self._suspected_seconds = self._suspected_seconds, 0.0
            return [Cleared(quiet_seconds=lasted)] if lasted else []
        longest = max(self._ranks[rank].quiet_seconds for rank in quiet)
        known, self._suspected_seconds = self._suspected_seconds, longest
        decisions: list[Decision] = []
        if not known:
            for one in self._ranks.values():
                one.stacks_told = False
            decisions.append(Suspect(ranks=quiet, quiet_seconds=longest, limit_seconds=limit))
        confirmed = self._confirmed_after(limit)
        told = all(self._ranks[rank].stacks_told for rank in quiet)
        if longest >= confirmed + (0.0 if told else _STACKS_SECONDS):
            decisions.append(self._hung(quiet, longest, limit))
        return decisions

    def _quiet(self, limit: float) -> tuple[int, ...]:
        """The ranks that are quiet for too long and do not wait for one that moves."""
        moving = [one.pulse.sequence for one in self._ranks.values() if one.quiet_seconds < limit / 2]
        return tuple(
            rank
            for rank, one in sorted(self._ranks.items())
            if one.quiet_seconds >= limit and not any(sequence < one.pulse.sequence for sequence in moving)
        )

    def _confirmed_after(self, limit: float) -> float:
        # A pulse early, for the next one would be too late to keep within twice the limit.
        confirmed = limit + min(limit, self.training_limit_seconds) - _PULSE_SECONDS
        ranks = self._ranks.values()
        if len(ranks) == self._world_size and all(one.busy and _kind(one.pulse) in _IN_TRAINING for one in ranks):
            return max(confirmed, _BUSY_SECONDS_MIN * self._patience)
        return confirmed

    def _hung(self, quiet: tuple[int, ...], longest: float, limit: float) -> Hung:
        step = max(one.pulse.step for one in self._ranks.values())
        self._patience = min(_PATIENCE_FACTOR * self._patience, _PATIENCE_MAX)
        self._hung_at_step = max(step, self._hung_at_step)
        self._over = True
        ranks, evidence = self._blame(quiet)
        return Hung(
            rank=ranks[0] if len(ranks) == 1 else -1,
            ranks=ranks,
            quiet_seconds=longest,
            limit_seconds=limit,
            evidence=evidence,
        )

    def _blame(self, quiet: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Narrow the suspects down, the surest evidence first."""
        suspects, evidence = quiet, []
        everyone = self._ranks.values()
        lowest = min(one.pulse.sequence for one in everyone)
        for said, holds in (
            ("stopped", [rank for rank in quiet if self._ranks[rank].pulse.state == _STOPPED]),
            ("its interpreter stands still", [rank for rank in quiet if self._ranks[rank].frozen]),
            ("behind in collectives", [rank for rank in quiet if self._ranks[rank].pulse.sequence == lowest]),
            ("not in a collective", [rank for rank in quiet if self._ranks[rank].in_collective is False]),
        ):
            fewer = _narrowed(suspects, holds)
            tells_apart = len(holds) < len(everyone)
            if fewer and tells_apart and (len(fewer) < len(suspects) or len(suspects) == 1):
                suspects = fewer
                evidence.append(said)
        return suspects, ", ".join(evidence) or "nothing tells the ranks apart"


def _narrowed(suspects: tuple[int, ...], holds: Collection[int]) -> tuple[int, ...]:
    return tuple(rank for rank in suspects if rank in holds)


def _mark(pulse: RankPulse) -> tuple[int, str, str, int, int]:
    return pulse.step, pulse.phase, pulse.label, pulse.moves, pulse.sequence


def _kind(pulse: RankPulse) -> str:
    """Which limit holds; the first step of a generation counts as a kind of its own."""
    return "first_step" if pulse.phase == "training" and not pulse.stepped else pulse.phase
