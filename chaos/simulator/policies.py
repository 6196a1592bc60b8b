"""Ways to decide how often to save: the production tuner, and what it is compared with.

The others know more than a run can: "young" and "overhead" are told the true costs, and "young" the true mean failure
rate. Where snapshots stay in memory, a policy that says nothing of them takes them as often as production lets them
cost.
"""

import math
import re
from dataclasses import dataclass

from chaos.simulator.failures import Failure
from chaos.simulator.job import Intervals, Job, Policy
from chaos.simulator.scenario import Scenario
from orchestrator.cli.durations import parse_duration
from orchestrator.decide.cost import SaveCost, optimal_interval_seconds, young_interval_seconds
from orchestrator.decide.failure_rate import FailureRate
from orchestrator.decide.tuner import FIRST_STEPS, MISSES_ALONE, MISSES_REPLICATED, TierName, Tuner
from workers.errors import CallerError

CHECKFREQ_OVERHEAD = 0.035
"""What CheckFreq (J. Mohan et al., FAST 2021) lets saves take; its interval follows from that, whatever fails."""

_STEPS = re.compile(r"([1-9]\d{0,11}) steps", re.ASCII)


@dataclass(frozen=True, slots=True)
class Every:
    """Fixed intervals."""

    durable_seconds: float
    memory_seconds: float | None = None
    review_at: float = math.inf

    def intervals(self, up: float) -> Intervals:
        return Intervals(durable_seconds=self.durable_seconds, memory_seconds=self.memory_seconds)

    def saved(
        self, tier: TierName, stall_seconds: float, durable_seconds: float, interference_seconds: float
    ) -> None: ...

    def failed(self, failure: Failure, up: float) -> None: ...

    def restarted(self, tier: TierName, seconds: float) -> None: ...


_ASKED_AGAIN_AFTER = 0.2
"""Production asks its tuner after each save. Between two failures nothing but time passes, so here it is asked once a
fifth of the mean time between failures has passed, or later where the tuner says so: goodput is the same to 3e-4."""


class Auto:
    """The production tuner; when the first save of each tier comes is its rule too. `mtbf_seconds`: the true mean."""

    def __init__(self, tuner: Tuner, job: Job, mtbf_seconds: float) -> None:
        self._tuner = tuner
        self._wait_seconds = _ASKED_AGAIN_AFTER * mtbf_seconds
        self._asked_at = 0.0
        self._first_seconds = FIRST_STEPS * job.step_seconds
        self._tiers: tuple[TierName, ...] = ("durable",) if job.memory is None else ("durable", "memory")
        self._undecided = True
        tuner.steps_took([job.step_seconds])

    @property
    def review_at(self) -> float:
        return 0.0 if self._undecided else max(self._tuner.review_at, self._asked_at + self._wait_seconds)

    def intervals(self, up: float) -> Intervals:
        self._tuner.decide(up)
        self._asked_at = up
        current = {tier: self._tuner.current(tier) for tier in self._tiers}
        self._undecided = None in current.values()
        seconds = {tier: one.interval_seconds if one else self._first_seconds for tier, one in current.items()}
        return Intervals(durable_seconds=seconds["durable"], memory_seconds=seconds.get("memory"))

    def saved(self, tier: TierName, stall_seconds: float, durable_seconds: float, interference_seconds: float) -> None:
        self._tuner.saved(
            tier,
            stall_seconds=stall_seconds,
            durable_seconds=durable_seconds,
            interference_seconds=interference_seconds,
        )

    def failed(self, failure: Failure, up: float) -> None:
        self._tuner.failed(up, cause=failure.cause, domain=failure.domain)

    def restarted(self, tier: TierName, seconds: float) -> None:
        self._tuner.restarted(tier, seconds)


BEST_FIXED = "best-fixed"
POLICIES = ("auto", "young", "overhead", BEST_FIXED)
"""Beside fixed intervals, such as "30min" or "500 steps". The best fixed one is found by compare.py."""


def known(name: str, field: str) -> str:
    """The name of a policy; CallerError, which names `field`, for any other."""
    if name in POLICIES or _STEPS.fullmatch(name):
        return name
    try:
        parse_duration(name, field=field)
    except CallerError:
        wanted = f"{', '.join(POLICIES)}, a duration such as 30min, or a number of steps such as '500 steps'"
        raise CallerError(f"{field} is {name!r}; it has to be one of {wanted}") from None
    return name


def build(name: str, scenario: Scenario) -> Policy:
    """A policy at its beginning, by its name."""
    job, limits = scenario.job, scenario.limits
    if name == "auto":
        return Auto(
            Tuner(
                FailureRate(scenario.prior),
                limits=limits,
                memory=job.memory is not None,
                memory_misses=MISSES_REPLICATED if scenario.replicated else MISSES_ALONE,
            ),
            job,
            1.0 / scenario.failures_per_second,
        )
    all_rate, missed_rate = scenario.failures_per_second, scenario.missed_per_second
    memory = job.memory.pause_seconds if job.memory is not None else 0.0
    durable = job.durable.pause_seconds
    if name == "young":
        return Every(_young(durable, missed_rate), _young(memory, all_rate - missed_rate))
    if name == "overhead":
        return Every(_within(durable, CHECKFREQ_OVERHEAD), _within(memory, CHECKFREQ_OVERHEAD))
    steps = _STEPS.fullmatch(name)
    seconds = int(steps[1]) * job.step_seconds if steps else parse_duration(name, field="policy")
    return Every(seconds, _within(memory, limits.memory_overhead_max or 1.0))


def memoryless_best_seconds(scenario: Scenario) -> float:
    """The durable interval that would be best if failures came evenly, at their mean rate; at most the whole run."""
    cost = SaveCost(scenario.job.durable.stall.mean, 0.0, scenario.job.durable.interference.mean)
    best = optimal_interval_seconds(cost, scenario.missed_per_second)
    return min(max(best, scenario.job.step_seconds), scenario.job.horizon_seconds)


def _young(pause_seconds: float, failures_per_second: float) -> float:
    return young_interval_seconds(pause_seconds, 1.0 / failures_per_second) if failures_per_second > 0 else math.inf


def _within(pause_seconds: float, overhead: float) -> float:
    """The shortest interval at which saves take no more than this part of the time."""
    return pause_seconds * (1.0 / overhead - 1.0)
