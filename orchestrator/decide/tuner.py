"""How often each tier saves. Measurements, failures and clock readings in, intervals out.

Invariants:
- A tier's interval is the best one (cost.py) for what its saves were measured to cost and for the rate of the failures
  that it is restored after (failure_rate.py), at least as long as each of its bounds asks for.
- Bounds: "overhead", the part of the time that its saves may take; "bandwidth", a save begins only when the one before
  can be restored; "disk", while the disk has no room for another save they are rarely tried; "memory", the slots serve
  snapshots only so many steps apart. A decision names those that bit, and what each costs: a ceiling on overhead that
  loses more training than it spares says so.
- The bound "prudence" is the other way round: saves that take no more than a thousandth of the time are made also where
  they do not pay by what is believed of failures, for that may be wrong, and lost training costs more than that.
- An interval changes only when it is off by more than a tenth, or a fifth where a bound holds, so that noise does not
  change it; and the first decision after a change in any input takes it into account.
- Before a tier's saves are measured nothing is decided of it; the first of them comes after `FIRST_STEPS` steps.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from orchestrator.decide.cost import SaveCost, Tier, optimal_interval_seconds
from orchestrator.decide.failure_rate import Domain, FailureRate
from orchestrator.decide.measure import Measure

FIRST_STEPS = 10

CHANGE_MIN = 1.1
_REVIEW_AGE_MIN, _REVIEW_AGE_MAX = 0.5, 2.0
"""By how much of itself the time since the last failure has to grow until it may have moved an interval noticeably: by
the more, the less it moved it before."""
_UNMOVED = 0.03
_ROUNDS = 5
_CLOSE = 0.05
_ROUNDING = 1e-9
_FULL_DISK_FACTOR = 4.0
_RESTART_SECONDS = {"memory": 10.0, "durable": 120.0}

TierName = Literal["memory", "durable"]
_Parts = dict[TierName, list[tuple[Domain | None, float]]]
"""By tier, what part of the failures of each domain it is restored after; None: of all."""
BoundName = Literal["overhead", "bandwidth", "disk", "memory", "prudence"]

MISSES_ALONE: Mapping[Domain, float] = {"process": 0.0, "node": 1.0}
"""After what part of a domain's failures memory has nothing to restore, if each node keeps its own snapshots only."""
MISSES_REPLICATED: Mapping[Domain, float] = {"process": 0.0, "node": 0.05}
"""The same if other nodes keep copies: a node's are lost with it if both go together. A guess, and the interval moves
with its root only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`durable_overhead_max`, `memory_overhead_max`: the part of the time that a tier's saves may take, 0 to 1; None
    for as much as pays. `overhead_min`: the part that they may take in any case, 0 to 1. `memory_steps_min`: how many
    steps apart the slots can serve snapshots."""

    durable_overhead_max: float | None = 0.01
    memory_overhead_max: float | None = 0.02
    overhead_min: float = 0.001
    memory_steps_min: int = 2

    def __post_init__(self) -> None:
        for name in ("durable_overhead_max", "memory_overhead_max"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name} is {value!r}; it has to be above 0 and at most 1, or None")
        if not 0.0 <= self.overhead_min < 1.0:
            raise ValueError(f"overhead_min is {self.overhead_min!r}; it has to be at least 0 and below 1")
        if self.memory_steps_min < 1:
            raise ValueError(f"memory_steps_min is {self.memory_steps_min!r}; it has to be at least 1")

    def overhead_max(self, tier: TierName) -> float | None:
        return self.memory_overhead_max if tier == "memory" else self.durable_overhead_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`interval_seconds`: the shortest that it allows, of "prudence" the longest. `goodput_cost_ratio`: how much
    goodput that one costs against the interval that would pay best."""

    name: BoundName
    interval_seconds: float
    goodput_cost_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What an interval was decided from. `failures_per_second`: of the tier's failures over the interval to come; how
    sure that is, `FailureRate.posterior` says. `step_seconds`: None if not measured."""

    cost: SaveCost
    failures_per_second: float
    restart_seconds: float
    step_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalDecision:
    """From now on this tier saves so often. `at`: on the run's clock.

    `interval_steps`: None if step times were not measured. `best_seconds`: what would pay best without bounds.
    `bounds`: those that ask for another interval than that, the longest first. The goodput ratios are of this tier
    alone, also with half and double the interval.
    """

    tier: TierName
    at: float
    interval_seconds: float
    interval_steps: int | None
    best_seconds: float
    bounds: tuple[Bound, ...]
    goodput_ratio: float
    goodput_ratio_half: float
    goodput_ratio_double: float
    inputs: Inputs


class Tuner:
    """`memory`: whether snapshots are kept in memory between durable saves; `memory_misses` is then the part of each
    domain's failures after which memory has nothing to restore. `rates` learns through `failed` and `resized` here."""

    def __init__(
        self,
        rates: FailureRate,
        *,
        limits: Limits | None = None,
        memory: bool = True,
        memory_misses: Mapping[Domain, float] = MISSES_ALONE,
    ) -> None:
        self.rates = rates
        self._limits = limits or Limits()
        self._parts: _Parts = _parts(memory_misses) if memory else {"durable": [(None, 1.0)]}
        self._tiers: dict[TierName, _Measured] = {name: _Measured(name) for name in self._parts}
        self._step_seconds = Measure()
        self._saves_that_fit = math.inf
        self._review_at = 0.0

    # ------------------------------------------------------------ what was measured

    def saved(
        self, tier: TierName, *, stall_seconds: float, durable_seconds: float, interference_seconds: float = 0.0
    ) -> None:
        """A save of this tier was made; `cost.SaveCost` says what is what. Of several ranks, the slowest counts."""
        measured = self._tiers[tier]
        before = measured.cost
        measured.saved(SaveCost(stall_seconds, durable_seconds, interference_seconds))
        self._look_again(measured.cost != before)

    def steps_took(self, seconds: Iterable[float]) -> None:
        """The last steps of some rank took so long, saves not counted."""
        before = self._step_seconds.value
        for sample in seconds:
            self._step_seconds.add(sample)
        self._look_again(self._step_seconds.value != before)

    def restarted(self, tier: TierName, seconds: float) -> None:
        """From a failure until training went on from there, it took so long. Moves no interval."""
        self._tiers[tier].restart_seconds.add(seconds)

    def room(self, free_bytes: float, save_bytes: float) -> None:
        """The disk has so much room, what may be deleted counted as free; a save takes so much."""
        before = self._saves_that_fit < 1.0
        self._saves_that_fit = free_bytes / save_bytes if save_bytes else math.inf
        self._look_again((self._saves_that_fit < 1.0) != before)

    def failed(self, at: float, *, cause: str, domain: Domain) -> None:
        """The run failed, at this time on its clock."""
        self.rates.failed(at, cause=cause, domain=domain)
        self._look_again(True)

    def resized(self, at: float, ranks: int) -> None:
        """From now on the run has so many ranks."""
        self.rates.resized(at, ranks)
        self._look_again(True)

    def _look_again(self, changed: bool) -> None:
        if changed:
            self._review_at = 0.0
            for tier in self._tiers.values():
                tier.review_at, tier.review_age = 0.0, _REVIEW_AGE_MIN

    # ------------------------------------------------------------ what follows

    @property
    def review_at(self) -> float:
        """Until then, `decide` has nothing new to say unless something is measured or fails before."""
        return self._review_at

    def current(self, tier: TierName) -> IntervalDecision | None:
        """What holds for this tier; None before the first decision."""
        return self._tiers[tier].current

    def decide(self, at: float) -> tuple[IntervalDecision, ...]:
        """The tiers whose interval changes now. To be called often, at least after each save: it costs nothing before
        `review_at`."""
        if at < self._review_at:
            return ()
        changed = []
        for tier in self._tiers.values():
            cost = tier.cost
            if cost is None or at < tier.review_at:
                continue
            plan = self._plan(at, tier, cost)
            if tier.current is None or _differ(tier.current, plan):
                tier.current = self._decision(at, tier, plan)
                changed.append(tier.current)
            unmoved = abs(plan.best_seconds - tier.best_seconds) <= _UNMOVED * plan.best_seconds
            tier.best_seconds = plan.best_seconds
            tier.review_age = min(2.0 * tier.review_age, _REVIEW_AGE_MAX) if unmoved else _REVIEW_AGE_MIN
            tier.review_at = at + max(tier.current.interval_seconds, tier.review_age * self._age_seconds(at, tier.name))
        self._review_at = min(tier.review_at for tier in self._tiers.values())
        return tuple(changed)

    def _plan(self, at: float, tier: "_Measured", cost: SaveCost) -> "_Plan":
        # The rate is that of the interval to come, whose length depends on the rate in turn. A save helps only once it
        # can be restored, so what counts is the rate from then on.
        best = tier.best_seconds
        for _ in range(_ROUNDS):
            before = best
            rate = self._failures_per_second(at + cost.exposed_seconds, tier.name, best + cost.cost_seconds)
            best = optimal_interval_seconds(cost, rate)
            if abs(best - before) <= _CLOSE * best:
                break
        step_seconds = self._step_seconds.value
        prudent = _shortest_with(cost, self._limits.overhead_min)
        wanted = min(best, prudent)
        least = self._least_seconds(tier.name, cost, best, step_seconds)
        strictest = max(least.values())
        interval = max(wanted, strictest)
        bounds = {name: seconds for name, seconds in least.items() if seconds > wanted}
        if prudent < best:
            bounds["prudence"] = prudent
        steps = None
        if step_seconds:
            steps = max(1, round(wanted / step_seconds), math.ceil(strictest / step_seconds - _ROUNDING))
            interval = steps * step_seconds
        return _Plan(
            cost=cost,
            failures_per_second=rate,
            best_seconds=best,
            bounds=bounds,
            step_seconds=step_seconds,
            interval_seconds=interval,
            interval_steps=steps,
        )

    def _decision(self, at: float, tier: "_Measured", plan: "_Plan") -> IntervalDecision:
        restart_seconds = tier.restart_seconds.value or _RESTART_SECONDS[tier.name]
        model, interval = Tier(plan.cost, plan.failures_per_second, restart_seconds), plan.interval_seconds
        at_best = model.goodput_ratio(plan.best_seconds)
        bounds = [
            Bound(name=name, interval_seconds=least, goodput_cost_ratio=at_best - model.goodput_ratio(least))
            for name, least in plan.bounds.items()
        ]
        return IntervalDecision(
            tier=tier.name,
            at=at,
            interval_seconds=interval,
            interval_steps=plan.interval_steps,
            best_seconds=plan.best_seconds,
            bounds=tuple(sorted(bounds, key=lambda bound: -bound.interval_seconds)),
            goodput_ratio=model.goodput_ratio(interval),
            goodput_ratio_half=model.goodput_ratio(interval / 2),
            goodput_ratio_double=model.goodput_ratio(interval * 2),
            inputs=Inputs(
                cost=model.cost,
                failures_per_second=model.failures_per_second,
                restart_seconds=model.restart_seconds,
                step_seconds=plan.step_seconds,
            ),
        )

    def _least_seconds(
        self, tier: TierName, cost: SaveCost, best: float, step_seconds: float | None
    ) -> dict[BoundName, float]:
        """The shortest interval that each bound allows."""
        least: dict[BoundName, float] = {"bandwidth": cost.exposed_seconds}
        overhead_max = self._limits.overhead_max(tier)
        if overhead_max is not None:
            least["overhead"] = _shortest_with(cost, overhead_max)
        if tier == "memory" and step_seconds:
            least["memory"] = self._limits.memory_steps_min * step_seconds
        if tier == "durable" and self._saves_that_fit < 1.0:
            least["disk"] = _FULL_DISK_FACTOR * best
        return least

    def _failures_per_second(self, at: float, tier: TierName, ahead_seconds: float) -> float:
        """Of the failures after which this tier is what the run is restored from."""
        parts = self._parts[tier]
        return sum(part * self.rates.hazard_per_second(at, ahead_seconds, domain) for domain, part in parts)

    def _age_seconds(self, at: float, tier: TierName) -> float:
        return min(self.rates.age_seconds(at, domain) for domain, _ in self._parts[tier])


class _Measured:
    """What is known of one tier. `cost`: None before the first save. `best_seconds`: as last computed. `review_at`:
    until then time alone changes nothing; the time since the last failure has grown by `review_age` of itself then."""

    def __init__(self, name: TierName) -> None:
        self.name = name
        self.current: IntervalDecision | None = None
        self.best_seconds = 0.0
        self.review_at = 0.0
        self.review_age = _REVIEW_AGE_MIN
        self.restart_seconds = Measure()
        self._stall_seconds = Measure()
        self._durable_seconds = Measure()
        self._interference_seconds = Measure()
        self.cost: SaveCost | None = None

    def saved(self, cost: SaveCost) -> None:
        self._stall_seconds.add(cost.stall_seconds)
        self._durable_seconds.add(cost.durable_seconds)
        self._interference_seconds.add(cost.interference_seconds)
        self.cost = SaveCost(
            self._stall_seconds.value or 0.0,
            self._durable_seconds.value or 0.0,
            self._interference_seconds.value or 0.0,
        )


class _Plan(NamedTuple):
    """A decision in the making: what it may turn out to be, before it is compared with what holds. `bounds`: of those
    that bit, the interval that each asks for. A tuple, for many are made in a simulation."""

    cost: SaveCost
    failures_per_second: float
    best_seconds: float
    bounds: Mapping[BoundName, float]
    step_seconds: float | None
    interval_seconds: float
    interval_steps: int | None


def _shortest_with(cost: SaveCost, overhead: float) -> float:
    """The shortest interval at which saves take this part of the time."""
    return cost.cost_seconds * (1.0 / overhead - 1.0) if overhead > 0.0 else math.inf


def _parts(memory_misses: Mapping[Domain, float]) -> _Parts:
    parts: _Parts = {
        "memory": [(domain, 1.0 - missed) for domain, missed in memory_misses.items() if missed < 1.0],
        "durable": [(domain, missed) for domain, missed in memory_misses.items() if missed > 0.0],
    }
    if not all(parts.values()):
        raise ValueError(f"memory_misses is {memory_misses!r}; each tier has to be what some failure is restored from")
    return parts


def _differ(current: IntervalDecision, plan: _Plan) -> bool:
    if plan.interval_steps is not None and (current.interval_steps in (None, plan.interval_steps)):
        return current.interval_steps is None
    low, high = sorted((current.interval_seconds, plan.interval_seconds))
    # Bounds are in proportion to what they come from, and the best interval to its root.
    return high > (CHANGE_MIN**2 if plan.bounds else CHANGE_MIN) * low
