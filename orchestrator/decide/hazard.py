"""How likely the next failure is, given when the earlier ones were. Times between failures in, a rate out.

Invariants:
- The estimate is an average over several models, each weighed by how well it foretold the gaps so far. A model has a
  Weibull shape (1: memoryless; below 1: the longer without a failure, the safer) and a discount (how fast old failures
  are forgotten). The memoryless model that forgets nothing starts with the most weight, so another shape, or a changing
  rate, counts only as far as the data support it.
- Time that has passed since the last failure counts, as a gap that is at least so long.
- The prior is worth `Prior.weight_failures` failures, and fades with them.

Each model is conjugate: if gaps are Weibull with shape k, their k-th powers are exponential with a rate that has a
Gamma distribution of shape a and rate b; a gap x makes that a + 1 and b + x^k. Discounting, both are multiplied by d
before (the power steady model of J. Q. Smith, "A generalization of the Bayesian steady forecasting model", JRSS B
41(3), 1979). The chance that no failure comes until age t is (b / (b + t^k))^a (Lomax), so the rate at that age is
k t^(k-1) a / (b + t^k), and the density of a gap, by which models are weighed, the product of both. Weights are
forgotten slowly too (A. E. Raftery et al., "Online prediction under model uncertainty via dynamic model averaging",
Technometrics 52(1), 2010).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHAPES = ((1.0, 0.7), (0.8, 0.12), (0.6, 0.12), (1.4, 0.06))
"""Weibull shapes, and how far each is believed before there is data."""
MEMORYLESS = ((1.0, 1.0),)
DISCOUNTS = ((1.0, 0.6), (0.9, 0.3), (0.6, 0.1))
"""What remains of the weight of earlier failures after one more, and how far each is believed before there is data."""
_WEIGHT_DISCOUNT = 0.95
_GAP_SECONDS_MIN = 1.0
_ALIVE_MIN = 1e-200
_LOG_WEIGHT_MIN = -7.0
"""A model that is less likely than the likeliest by more than this, in nats, has no say in rates until it is again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed of the rate before the run has shown it, as if `weight_failures` failures had been seen.

    The mean is `caution` times `failures_per_second`, which is the usual value of a quantity that may be ten times as
    large: too high a rate is put right by a fraction of the time between failures, too low a one only by failures, each
    of which then costs too long an interval.
    """

    failures_per_second: float
    weight_failures: float = 0.5
    caution: float = 5.0

    @property
    def mean_per_second(self) -> float:
        return self.caution * self.failures_per_second

    def __post_init__(self) -> None:
        for name in ("failures_per_second", "weight_failures", "caution"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it has to be above 0 and finite")


class _Model(NamedTuple):
    """`log_start`: of its weight before there is data. A tuple, for many are made in a simulation."""

    shape: float
    discount: float
    log_start: float
    a: float
    b: float
    log_weight: float


class Hazard:
    """Of one kind of failure. Ages and gaps are in seconds, above 0. Immutable: `after` gives the next one."""

    __slots__ = ("_likely", "_models")

    def __init__(self, models: Sequence[_Model]) -> None:
        self._models = models
        top = max(model.log_weight for model in models)
        # What counts for rates, by shape: the logarithm of weight times b^a, a, and b.
        likely: dict[float, list[tuple[float, float, float]]] = {}
        for shape, _, _, a, b, log_weight in models:
            if log_weight - top > _LOG_WEIGHT_MIN:
                likely.setdefault(shape, []).append((log_weight - top + a * math.log(b), a, b))
        self._likely = tuple(likely.items())

    @classmethod
    def from_prior(
        cls,
        prior: Prior,
        *,
        shapes: Sequence[tuple[float, float]] = SHAPES,
        discounts: Sequence[tuple[float, float]] = DISCOUNTS,
    ) -> "Hazard":
        models = []
        for shape, shape_weight in shapes:
            # The rate of the k-th powers with which the mean gap is the prior's.
            power_rate = (math.gamma(1.0 + 1.0 / shape) * prior.mean_per_second) ** shape
            for discount, discount_weight in discounts:
                start = math.log(shape_weight * discount_weight)
                a = prior.weight_failures
                models.append(_Model(shape, discount, start, a, a / power_rate, start))
        return cls(models)

    def after(self, gap_seconds: float) -> "Hazard":
        """With one more failure, so long after the one before."""
        gap = max(gap_seconds, _GAP_SECONDS_MIN)
        log_gap = math.log(gap)
        top = max(model.log_weight for model in self._models)
        models = []
        for shape, discount, log_start, a, b, log_weight in self._models:
            power = gap**shape
            log_density = (
                math.log(shape * a) + (shape - 1.0) * log_gap + a * math.log(b) - (a + 1.0) * math.log(b + power)
            )
            faded = _WEIGHT_DISCOUNT * (log_weight - top) + (1.0 - _WEIGHT_DISCOUNT) * log_start
            models.append(
                _Model(shape, discount, log_start, discount * a + 1.0, discount * b + power, faded + log_density)
            )
        return Hazard(models)

    def per_second(self, age_seconds: float, ahead_seconds: float) -> float:
        """The rate of failures over the time ahead, if none has come until that age: the one in the middle of it."""
        age = max(age_seconds + ahead_seconds / 2.0, _GAP_SECONDS_MIN)
        shift = 0.0
        while True:
            alive_all = rate = 0.0
            for shape, models in self._likely:
                power: float = age**shape
                slope = shape * power / age
                for log_scale, a, b in models:
                    whole = b + power
                    alive = math.exp(log_scale - a * math.log(whole) - shift)
                    alive_all += alive
                    rate += alive * slope * a / whole
            if alive_all > _ALIVE_MIN:
                return rate / alive_all
            # At this age none is likely to be alive, by any model: only their ratios count.
            shift = max(
                log_scale - a * math.log(b + age**shape) for shape, models in self._likely for log_scale, a, b in models
            )

    def memoryless(self, age_seconds: float) -> list[tuple[float, float, float]]:
        """Of the models that are memoryless: how far each is believed (summing to 1), a, and b with the age counted."""
        models = [m for m in self._models if m.shape == 1.0]
        logs = [m.log_weight + m.a * math.log(m.b / (m.b + age_seconds)) for m in models]
        weights = [math.exp(log - max(logs)) for log in logs]
        total = sum(weights)
        return [(weight / total, m.a, m.b + age_seconds) for weight, m in zip(weights, models, strict=True)]
