"""How often to save, what that costs, and what would help: the cost model (decide/cost.py) applied to one job. Pure."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.decide.cost import (
    SaveCost,
    Tier,
    interval_range_within,
    lost_seconds_per_failure,
    overhead_ratio,
    two_tier_goodput_ratio,
)
from orchestrator.decide.failure_rate import RatePosterior

JSON_VERSION = 1
FLAT_RATIO = 0.999
MEMORY_STALL_FACTOR = 0.1
"""A snapshot that stays in memory is assumed to stall so much less than a save, where nothing is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job. `durable`: its saves, and the failures and restarts that they are for; `memory`: the same of snapshots in
    memory, None without. `step_seconds`: 0 if unknown."""

    durable: Tier
    memory: Tier | None = None
    step_seconds: float = 0.0

    @property
    def failures_per_second(self) -> float:
        return self.durable.failures_per_second + (self.memory.failures_per_second if self.memory else 0.0)

    @property
    def restart_seconds(self) -> float:
        """Of a failure, on average."""
        return self._average(self.durable.restart_seconds, self.memory.restart_seconds if self.memory else 0.0)

    def best_seconds(self, tier: Tier) -> float:
        """The best interval in whole steps; a save does not begin before the last one can be restored."""
        best = max(tier.optimal_interval_seconds, tier.cost.exposed_seconds)
        if not self.step_seconds or math.isinf(best):
            return best
        least = math.ceil(tier.cost.exposed_seconds / self.step_seconds - 1e-9)
        return self.step_seconds * max(1, least, round(best / self.step_seconds))

    def score(self, every_seconds: float | None = None, memory_every_seconds: float | None = None) -> "Score":
        """Of saving so often; of the best intervals where none is given."""
        durable, memory = self.durable, self.memory
        every = self.best_seconds(durable) if every_seconds is None else every_seconds
        if memory is None:
            return Score(
                interval_seconds=every,
                memory_interval_seconds=None,
                goodput_ratio=durable.goodput_ratio(every),
                overhead_ratio=overhead_ratio(durable.cost, every),
                lost_seconds_per_failure=lost_seconds_per_failure(durable.cost, every),
            )
        memory_every = self.best_seconds(memory) if memory_every_seconds is None else memory_every_seconds
        overheads = overhead_ratio(durable.cost, every), overhead_ratio(memory.cost, memory_every)
        return Score(
            interval_seconds=every,
            memory_interval_seconds=memory_every,
            goodput_ratio=two_tier_goodput_ratio(memory, memory_every, durable, every),
            overhead_ratio=1.0 - (1.0 - overheads[0]) * (1.0 - overheads[1]),
            lost_seconds_per_failure=self._average(
                lost_seconds_per_failure(durable.cost, every), lost_seconds_per_failure(memory.cost, memory_every)
            ),
        )

    def waste(self, score: "Score") -> dict[str, float]:
        """Parts of the time, 0 to 1: saving, starting again after failures, and the rest, training that is repeated."""
        saving = restarting = 0.0
        every = (self.durable, score.interval_seconds), (self.memory, score.memory_interval_seconds)
        for tier, interval in every:
            if tier is not None and interval:
                saving += score.goodput_ratio * tier.cost.cost_seconds / interval
                restarting += tier.failures_per_second * tier.restart_seconds
        all_waste = 1.0 - score.goodput_ratio
        restarting = min(restarting, all_waste)
        saving = min(saving, all_waste - restarting)
        return {"saving": saving, "repeated": all_waste - restarting - saving, "restarting": restarting}

    def flat_seconds(self) -> tuple[float, float]:
        """The shortest and the longest durable interval that costs next to nothing against the best one."""
        durable = self.durable
        return interval_range_within(FLAT_RATIO, durable.cost, durable.failures_per_second, durable.restart_seconds)

    def levers(self, memory_misses: float) -> "tuple[Lever, ...]":
        """What could be better, what that gains first. `memory_misses`: the part of failures after which snapshots in
        memory, if there were any, would be of no use; 0 to 1."""
        now = self.score().goodput_ratio
        found = [Lever(what, better.score().goodput_ratio - now) for what, better in self._better(memory_misses)]
        return tuple(sorted(found, key=lambda lever: -lever.gain_ratio))

    def _better(self, memory_misses: float) -> "Iterator[tuple[str, Situation]]":
        yield "half the stall", self._with(stall_seconds=0.5)
        if self.durable.cost.durable_seconds:
            yield "half the time until durable", self._with(durable_seconds=0.5)
        if self.durable.cost.interference_seconds:
            yield "half the slowdown while saving", self._with(interference_seconds=0.5)
        if self.restart_seconds:
            durable, memory = self.durable, self.memory
            faster = replace(durable, restart_seconds=durable.restart_seconds / 2)
            if memory is not None:
                memory = replace(memory, restart_seconds=memory.restart_seconds / 2)
            yield "half the restart time", replace(self, durable=faster, memory=memory)
        if self.memory is None:
            rate, cost = self.durable.failures_per_second, self.durable.cost
            memory = Tier(
                SaveCost(MEMORY_STALL_FACTOR * cost.stall_seconds),
                rate * (1.0 - memory_misses),
                self.durable.restart_seconds,
            )
            durable = replace(self.durable, failures_per_second=rate * memory_misses)
            yield "snapshots in memory between saves", replace(self, durable=durable, memory=memory)

    def _with(self, **factors: float) -> "Situation":
        """With costs of the durable tier that are so many times what they are."""
        cost = self.durable.cost
        changed = {name: factor * getattr(cost, name) for name, factor in factors.items()}
        return replace(self, durable=replace(self.durable, cost=replace(cost, **changed)))

    def _average(self, durable: float, memory: float) -> float:
        """Over failures."""
        if self.memory is None or not self.memory.failures_per_second:
            return durable
        if not self.durable.failures_per_second:
            return memory  # durable may be infinite
        share = self.memory.failures_per_second / self.failures_per_second
        return durable * (1.0 - share) + memory * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What saving so often comes to. Ratios are 0 to 1."""

    interval_seconds: float
    memory_interval_seconds: float | None
    goodput_ratio: float
    overhead_ratio: float
    lost_seconds_per_failure: float


@dataclass(frozen=True, slots=True)
class Lever:
    """An improvement, and the goodput that it gains."""

    what: str
    gain_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Of a situation: the best interval, or `every_seconds` if the user wants that one scored. `memory_misses` as
    above. `believed`: the failure rate, as far as data support it."""

    situation: Situation
    every_seconds: float | None
    memory_misses: float
    believed: RatePosterior | None

    @property
    def score(self) -> Score:
        return self.situation.score(self.every_seconds)

    def times(self, factor: float) -> Score:
        """With a durable interval that is so many times as long."""
        return self.situation.score(factor * self.score.interval_seconds)

    def memory_times(self, factor: float) -> Score | None:
        """The same of the interval in memory."""
        score = self.score
        if score.memory_interval_seconds is None:
            return None
        return self.situation.score(score.interval_seconds, factor * score.memory_interval_seconds)

    @property
    def levers(self) -> tuple[Lever, ...]:
        return self.situation.levers(self.memory_misses)

    def as_json(self) -> dict[str, Any]:
        situation, score = self.situation, self.score
        step, rate = situation.step_seconds, situation.failures_per_second
        every, flat = _number(score.interval_seconds), situation.flat_seconds()
        costs = {"half": 0.5, "double": 2.0}
        return {
            "v": JSON_VERSION,
            **_finite(asdict(score)),
            "interval_steps": round(every / step) if step and every is not None else None,
            "waste_ratio": situation.waste(score),
            "best_interval_seconds": _number(situation.score().interval_seconds),
            "mtbf_seconds": 1.0 / rate if rate else None,
            "failure_rate": asdict(self.believed) if self.believed is not None else None,
            "flat": {"goodput_ratio_of_best": FLAT_RATIO, "from_seconds": flat[0], "to_seconds": _number(flat[1])},
            **{name: _finite(asdict(self.times(factor))) for name, factor in costs.items()},
            **{
                f"memory_{name}": _finite(asdict(found)) if (found := self.memory_times(factor)) else None
                for name, factor in costs.items()
            },
            "levers": [asdict(lever) for lever in self.levers],
            "inputs": {
                "durable": asdict(situation.durable),
                "memory": asdict(situation.memory) if situation.memory else None,
                "step_seconds": step or None,
            },
        }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in fields.items()}


def _number(value: float | None) -> float | None:
    """JSON knows no infinity: None is for never."""
    return value if value is not None and math.isfinite(value) else None
