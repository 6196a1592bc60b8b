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

SHAPES = ((1.0, 0.7), (0.8, 0.12), (0.6, 0.12), (1.4, 0.06))
"""Weibull shapes, and how far each is believed before there is data."""
MEMORYLESS = ((1.0, 1.0),)
DISCOUNTS = ((1.0, 0.7), (0.97, 0.15), (0.85, 0.1), (0.5, 0.05))
"""What remains of the weight of earlier failures after one more, and how far each is believed before there is data."""
_WEIGHT_DISCOUNT = 0.98
_GAP_SECONDS_MIN = 1.0
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


@dataclass(frozen=True, slots=True)
class _Model:
    """`log_start`: of its weight before there is data."""

    shape: float
    discount: float
    log_start: float
    a: float
    b: float
    log_weight: float

    def after(self, gap: float, log_gap: float) -> "_Model":
        power = gap**self.shape
        log_density = (
            math.log(self.shape * self.a)
            + (self.shape - 1.0) * log_gap
            + self.a * math.log(self.b)
            - (self.a + 1.0) * math.log(self.b + power)
        )
        return _Model(
            shape=self.shape,
            discount=self.discount,
            log_start=self.log_start,
            a=self.discount * self.a + 1.0,
            b=self.discount * self.b + power,
            log_weight=_WEIGHT_DISCOUNT * self.log_weight + (1.0 - _WEIGHT_DISCOUNT) * self.log_start + log_density,
        )


class Hazard:
    """Of one kind of failure. Ages and gaps are in seconds, above 0. Immutable: `after` gives the next one."""

    __slots__ = ("_likely", "_models")

    def __init__(self, models: Sequence[_Model]) -> None:
        top = max(model.log_weight for model in models)
        self._models = tuple(_Model(m.shape, m.discount, m.log_start, m.a, m.b, m.log_weight - top) for m in models)
        # What counts for rates, by shape: the logarithm of weight times b^a, a, and b.
        likely: dict[float, list[tuple[float, float, float]]] = {}
        for m in self._models:
            if m.log_weight > _LOG_WEIGHT_MIN:
                likely.setdefault(m.shape, []).append((m.log_weight + m.a * math.log(m.b), m.a, m.b))
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
        return Hazard([model.after(gap, log_gap) for model in self._models])

    def per_second(self, age_seconds: float, ahead_seconds: float) -> float:
        """The rate of failures over the time ahead, if none has come until that age: the one in the middle of it."""
        age = max(age_seconds + ahead_seconds / 2.0, _GAP_SECONDS_MIN)
        alive_all = rate = 0.0
        for shape, models in self._likely:
            power = age**shape
            slope = shape * power / age
            for log_scale, a, b in models:
                whole = b + power
                alive = math.exp(log_scale - a * math.log(whole))
                alive_all += alive
                rate += alive * a * slope / whole
        return rate / alive_all

    def memoryless(self, age_seconds: float) -> list[tuple[float, float, float]]:
        """Of the models that are memoryless: how far each is believed (summing to 1), a, and b with the age counted."""
        found = []
        for m in self._models:
            if m.shape == 1.0:
                b = m.b + age_seconds
                found.append((math.exp(m.log_weight + m.a * math.log(m.b / b)), m.a, b))
        total = sum(weight for weight, _, _ in found)
        return [(weight / total, a, b) for weight, a, b in found]

    def shape_mean(self, age_seconds: float) -> float:
        """The Weibull shape, averaged over what is believed; 1: memoryless."""
        weights = [
            (math.exp(m.log_weight + m.a * math.log(m.b / (m.b + age_seconds**m.shape))), m.shape) for m in self._models
        ]
        return sum(weight * shape for weight, shape in weights) / sum(weight for weight, _ in weights)
