"""What a save policy keeps of a series of failures; see cadence.py for the metric."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.decide.cost import young_interval_seconds
from orchestrator.decide.failure_rate import FailureRate
from orchestrator.decide.hazard import Prior
from orchestrator.decide.tuner import Limits, Tuner

Gaps = npt.NDArray[np.float64]

RESTART_OVER_MTBF = 0.005
DURABLE_OVER_STALL = 3.0
PRIORS = (0.1, 10.0)
CHECKFREQ_OVERHEAD = 0.035
EVERY_STEPS, STEP_SECONDS = 500, 5.0
EVERY_SECONDS = 1800.0
HINDSIGHT = np.geomspace(0.15, 8.0, 241)
"""Fixed intervals to choose from, over Young's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a save and a restart cost, in seconds. `mtbf`: what the clairvoyant takes the mean to be."""

    mtbf: float
    stall: float
    restart: float
    durable: float

    @classmethod
    def of(cls, mtbf: float, stall_over_mtbf: float) -> "Setting":
        stall = stall_over_mtbf * mtbf
        return cls(mtbf=mtbf, stall=stall, restart=RESTART_OVER_MTBF * mtbf, durable=DURABLE_OVER_STALL * stall)

    @property
    def exposed(self) -> float:
        return self.durable - self.stall


Goodputs = dict[str, tuple[float, ...]]
"""By policy; one for each of PRIORS where it has a prior, and for each of HINDSIGHT under "fixed"."""


def goodputs(gaps: Gaps, setting: Setting, *, ceiling: bool = True) -> Goodputs:
    """Of all policies on one series of failures; `ceiling`: whether the tuner with its default limits is one."""
    young = young_interval_seconds(setting.stall, setting.mtbf)
    hindsight = goodput_fixed(gaps, setting, young * HINDSIGHT)
    return {
        "fixed": tuple(map(float, hindsight)),
        "hindsight": (float(hindsight.max()),),
        "tuner": tuple(goodput_tuner(gaps, setting, prior) for prior in PRIORS),
        **({"with_ceiling": (goodput_tuner(gaps, setting, PRIORS[1], Limits()),)} if ceiling else {}),
        "every_steps": (one_fixed(gaps, setting, EVERY_STEPS * STEP_SECONDS),),
        "every_minutes": (one_fixed(gaps, setting, EVERY_SECONDS),),
        "checkfreq": (one_fixed(gaps, setting, setting.stall * (1.0 / CHECKFREQ_OVERHEAD - 1.0)),),
        "young_mean_so_far": tuple(goodput_young_so_far(gaps, setting, prior) for prior in PRIORS),
        "young_clairvoyant": (one_fixed(gaps, setting, young),),
    }


def goodput_fixed(gaps: Gaps, setting: Setting, intervals: Gaps) -> Gaps:
    """Of each interval, held throughout."""
    room = np.maximum(gaps - setting.restart - setting.exposed, 0.0)
    kept = np.floor(room / (intervals[:, np.newaxis] + setting.stall)).sum(axis=1) * intervals
    return np.asarray(kept / gaps.sum())


def one_fixed(gaps: Gaps, setting: Setting, interval: float) -> float:
    return float(goodput_fixed(gaps, setting, np.array([interval]))[0])


def goodput_young_so_far(gaps: Gaps, setting: Setting, prior: float) -> float:
    """Young's interval for the mean of all gaps so far, the prior's counted as one of them."""
    means = (np.concatenate([[setting.mtbf / prior], gaps[:-1]]).cumsum()) / np.arange(1, len(gaps) + 1)
    intervals = np.sqrt(2.0 * setting.stall * means)
    room = np.maximum(gaps - setting.restart - setting.exposed, 0.0)
    return float((np.floor(room / (intervals + setting.stall)) * intervals).sum() / gaps.sum())


def goodput_tuner(gaps: Gaps, setting: Setting, prior: float, limits: Limits | None = None) -> float:
    """Of the production tuner, which believes in `prior` times the true rate at first."""
    tuner = Tuner(
        FailureRate(Prior(failures_per_second=prior / setting.mtbf)),
        limits=limits or Limits(durable_overhead_max=None),
        memory=False,
    )
    tuner.saved("durable", stall_seconds=setting.stall, durable_seconds=setting.durable)
    tuner.restarted("durable", setting.restart)
    began = kept = 0.0
    for gap in map(float, gaps):
        age = setting.restart
        while True:
            tuner.decide(began + age)
            decision = tuner.current("durable")
            assert decision is not None
            cycle = decision.interval_seconds + setting.stall
            saves = math.floor((gap - setting.exposed - age) / cycle)
            if saves <= 0:
                break
            # Nothing changes before the tuner wants to look again, so these saves need no asking.
            saves = min(saves, max(1, math.ceil((tuner.review_at - began - age) / cycle)))
            kept += saves * decision.interval_seconds
            age += saves * cycle
        began += gap
        tuner.failed(began, cause="signal", domain="process")
    return kept / float(gaps.sum())


# ---------------------------------------------------------------- series of failures


def exponential(rng: np.random.Generator, n: int, mtbf: float) -> Gaps:
    return rng.exponential(mtbf, n)


def weibull(rng: np.random.Generator, n: int, mtbf: float, shape: float) -> Gaps:
    return rng.weibull(shape, n) * (mtbf / math.gamma(1.0 + 1.0 / shape))


def step(rng: np.random.Generator, n: int, mtbf: float, factor: float) -> Gaps:
    """The rate is `factor` times as high from half of the failures on."""
    gaps = rng.exponential(mtbf, n)
    gaps[n // 2 :] /= factor
    return gaps


def modulated(rng: np.random.Generator, n: int, mtbf: float) -> Gaps:
    """Markov-modulated: calm and bad times that last 10 and 20 failures on average, ten times as many in the bad."""
    scales = [1.7 * mtbf, 0.17 * mtbf]
    gaps, state = np.empty(n), 0
    for index in range(n):
        gaps[index] = rng.exponential(scales[state])
        state = 1 - state if rng.random() < (0.1, 0.05)[state] else state
    return gaps
