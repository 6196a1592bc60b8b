"""Which fault strikes when: plan and seed give a sequence, and what is observed says when the next one is due. Pure.

Invariants:
- The sequence (fault, moment, gaps, choices) is a function of plan and seed alone. Only the times at which it is
  carried out depend on the run, as they must: "half way through a save" has no time of its own.
- No fault strikes before the one before it can have had its effect, unless it is a burst or meant for the recovery.
- A run that makes no progress is left alone after `without_progress_max` faults, so that its failure budget, which
  progress refills, is not what ends it.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from chaos.campaign.plan import Armed, Faults, Gap, Plan
from workers.failpoint import Action, Arm

_RECOVERY_WAIT_SECONDS = 3.0
"""How long a fault that is meant for a recovery waits for one to begin."""
_RECOVERY_SECONDS = 0.5
_HALF_WAY_POINTS = ("snapshot.copy", "persist.block", "restore.read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault. moment: "any", "save" or "recovery". gap_seconds: of calm before it. spread: how far into the save or
    the recovery it strikes, 0 to 1. follows: at once after the one before. choice: seeds what the fault itself picks.
    hold_seconds: how long it lasts, if it is one that does."""

    number: int
    fault: str
    moment: str
    gap_seconds: float
    spread: float
    follows: bool
    choice: int
    hold_seconds: float


def sequence(faults: Faults, seed: int) -> Iterator[Planned]:
    """All faults of the plan, in order."""
    rng = random.Random(f"faults-{seed}")
    in_burst = 1
    for number in range(1, faults.count + 1):
        follows = number > 1 and in_burst < faults.burst_max and rng.random() < faults.burst_chance
        in_burst = in_burst + 1 if follows else 1
        yield Planned(
            number=number,
            fault=_weighted(rng, faults.mix),
            moment=_weighted(rng, faults.moments or {"any": 1.0}),
            gap_seconds=_gap_seconds(rng, faults.gap),
            spread=rng.random(),
            follows=follows,
            choice=rng.randrange(1 << 32),
            hold_seconds=rng.uniform(*faults.hold_seconds),
        )


def arms(plan: Plan, seed: int) -> tuple[Arm, ...]:
    """The faults at named points: evenly spread over the steps in which faults may strike, at random points."""
    armed: Armed = plan.armed
    rng = random.Random(f"arms-{seed}")
    width = (plan.faults.until_step - plan.faults.from_step) / max(1, armed.count)
    found = []
    for number in range(armed.count):
        point, action = rng.choice(armed.points), rng.choice(armed.actions)
        when: dict[str, float] = {"step_min": int(plan.faults.from_step + width * (number + rng.random()))}
        if point.startswith(("snapshot.", "persist.", "restore.", "step.", "rendezvous.")):
            when["rank"] = rng.randrange(plan.job.ranks)
        if point.startswith(("rendezvous.", "retention.")):
            del when["step_min"]  # they know no step
        if point in _HALF_WAY_POINTS:
            when["index_fraction"] = round(rng.random(), 3)
        found.append(
            Arm(id=f"armed-{number + 1:03d}-{point}-{action}", point=point, action=_fitting(action, point), when=when)
        )
    return tuple(found)


def _fitting(action: Action, point: str) -> Action:
    """In the coordinator no rank's pid is known: what was to kill a rank kills the coordinator there."""
    in_coordinator = point.startswith(("commit.", "retention.", "generation."))
    return "kill_self" if in_coordinator and action == "kill_rank" else action


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is observed at a moment: `at` in seconds of any clock; step: the highest finished; training: whether all
    ranks train; recovering: whether a failure is being repaired; save: the step that is being saved, if one is;
    save_seconds: how long a save takes about."""

    at: float
    step: int
    training: bool
    recovering: bool
    save: int | None
    save_seconds: float


class Pacer:
    """Says when the next fault is due. `look` often; `struck` when it was carried out."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._sequence = sequence(faults, seed)
        self._next: Planned | None = next(self._sequence, None)
        self._over = False
        self._furthest = -1
        self._without_progress = 0
        self._struck_at: float | None = None
        self._calm_since: float | None = None
        self._window: tuple[int | None, float] | None = None  # a save or a recovery, and since when it is known
        self._saves_before: int | None = None

    @property
    def done(self) -> bool:
        """Whether no more faults come."""
        return self._over or self._next is None

    def look(self, seen: Seen) -> Planned | None:
        """The fault to inject now, if one is due."""
        if seen.step > self._furthest:
            self._furthest, self._without_progress = seen.step, 0
        if seen.step >= self._faults.until_step:
            self._over = True
        planned = self._next
        if self._over or planned is None or seen.step < self._faults.from_step:
            return None
        if not seen.training:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = seen.at
        if self._without_progress >= self._faults.without_progress_max:
            return None
        return planned if self._due(planned, seen) else None

    def struck(self, at: float) -> None:
        """The fault that was due was injected."""
        self._next = next(self._sequence, None)
        self._without_progress += 1
        self._struck_at, self._calm_since, self._window = at, None, None

    def _due(self, planned: Planned, seen: Seen) -> bool:
        if planned.follows:
            return True
        if planned.moment == "recovery" and self._struck_at is not None:
            if seen.recovering:
                return self._within(None, planned.spread * _RECOVERY_SECONDS, seen.at)
            if seen.at - self._struck_at < _RECOVERY_WAIT_SECONDS:
                return False
        if self._calm_since is None or seen.at - self._calm_since < planned.gap_seconds:
            self._saves_before = seen.save
            return False
        if planned.moment != "save":
            return True
        if seen.save is None:
            self._saves_before = self._window = None
            return False
        # One that had begun before the gap was over might be almost done.
        return seen.save != self._saves_before and self._within(seen.save, planned.spread * seen.save_seconds, seen.at)

    def _within(self, what: int | None, seconds: float, at: float) -> bool:
        if self._window is None or self._window[0] != what:
            self._window = (what, at)
        return at - self._window[1] >= seconds


def _weighted(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _gap_seconds(rng: random.Random, gap: Gap) -> float:
    if gap.trace is not None:
        return rng.choice(gap.trace) * gap.scale
    if gap.mean is not None:
        return rng.expovariate(1 / gap.mean) * gap.scale
    low, high = gap.uniform or (0.0, 0.0)
    return rng.uniform(low, high) * gap.scale
