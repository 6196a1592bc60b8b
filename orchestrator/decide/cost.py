"""What saving costs and what it spares: goodput as a function of how often is saved. Pure formulas.

The model. Training runs for one interval, stops for the stall of a save, runs on, and so forth. A save slows training
while it is written, by `interference_seconds` in all, and can be restored from `durable_seconds` after its boundary on.
Failures come at a constant rate, also while the job restarts; each takes the job back to the newest save that can be
restored, and costs `restart_seconds` until training goes on from there.

Words:
- interval: the training time from the end of one save's stall to the start of the next one's, stall and slowdown not
  counted.
- goodput ratio: of the time that passes, the part that goes into training which is never repeated; 0 to 1. What Meta
  calls ETTR is this for a job that never queues.
- overhead ratio: of the time that passes without failures, the part that saving takes; 0 to 1.

Failures whose rate changes are hazard.py's business: over one interval a rate is as good as constant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

_SEARCH_ROUNDS = 200
_TINY = 1e-14
"""Of the cost over the MTBF: below, Young's interval is within 1e-7 of the best one, and floats cannot tell them."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """One save stops training for `stall_seconds`, slows it by `interference_seconds` in all, and can be restored
    `durable_seconds` after its boundary (not before the stall ends). Raises ValueError for what is negative."""

    stall_seconds: float
    durable_seconds: float = 0.0
    interference_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stall_seconds", "durable_seconds", "interference_seconds"):
            _require(name, getattr(self, name))

    @property
    def cost_seconds(self) -> float:
        """What training loses to one save."""
        return self.stall_seconds + self.interference_seconds

    @property
    def exposed_seconds(self) -> float:
        """For how long training has gone on already when the save can be restored."""
        return max(0.0, self.durable_seconds - self.stall_seconds)


@dataclass(frozen=True, slots=True)
class Tier:
    """Where saves go: what each costs, and the failures that are recovered from there.

    `failures_per_second`: those after which nothing cheaper than this tier can be restored. `restart_seconds`: from
    such a failure until training goes on.
    """

    cost: SaveCost
    failures_per_second: float
    restart_seconds: float

    def __post_init__(self) -> None:
        _require("failures_per_second", self.failures_per_second)
        _require("restart_seconds", self.restart_seconds)

    @property
    def optimal_interval_seconds(self) -> float:
        return optimal_interval_seconds(self.cost, self.failures_per_second)

    def goodput_ratio(self, interval_seconds: float) -> float:
        return goodput_ratio(self.cost, interval_seconds, self.failures_per_second, self.restart_seconds)


def young_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 C M): where the cost of saving equals the work lost.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    _require("cost_seconds", cost_seconds)
    _require("mtbf_seconds", mtbf_seconds)
    return math.sqrt(2.0 * cost_seconds * mtbf_seconds)


def daly_first_order_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 C M) - C, at least 0: Young's, counted to the start of the save instead of its end; for C << M.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, the first-order model without the restart time, which optima do not depend on.
    """
    return max(0.0, young_interval_seconds(cost_seconds, mtbf_seconds) - cost_seconds)


def daly_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 C M) (1 + x/3 + x^2/9) - C with x = sqrt(C / 2M) where C < 2M, else M.

    Daly 2006, the higher-order estimate: a perturbation solution of what `optimal_interval_seconds` solves exactly,
    within 0.6 % of it for C up to M / 2, and within 7 % anywhere.
    """
    first = young_interval_seconds(cost_seconds, mtbf_seconds)
    if cost_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    x = math.sqrt(cost_seconds / (2.0 * mtbf_seconds))
    return first * (1.0 + x / 3.0 + x * x / 9.0) - cost_seconds


def optimal_interval_seconds(cost: SaveCost, failures_per_second: float) -> float:
    """The interval with the highest goodput ratio: the t with (1 - r t) exp(r (t + C)) = 1 at failure rate r.

    It minimizes Daly's complete cost function (2006); with Lambert's W it reads r t = 1 + W(-e^(-1 - r C)). Neither the
    restart time nor the time until durable moves it: they cost the same per failure however often is saved. Infinite
    without failures, and 0 if saving is free.
    """
    _require("failures_per_second", failures_per_second)
    c = cost.cost_seconds
    if c == 0.0:
        return 0.0
    if failures_per_second == 0.0:
        return math.inf
    x = failures_per_second * c
    if x < _TINY:
        return young_interval_seconds(c, 1.0 / failures_per_second)
    # ln(1 - y) + y + x falls from x to minus infinity for y from 0 to 1, and is concave, so Newton from the right of
    # the root goes down to it. Where y differs from 1 by less than a float shows, the interval is the MTBF.
    if x > 30.0:
        return 1.0 / failures_per_second
    y = min(math.sqrt(2.0 * x), 1.0 - math.exp(-1.0 - x))
    for _ in range(_SEARCH_ROUNDS):
        step = (math.log1p(-y) + y + x) * (1.0 - y) / y
        y += step
        if abs(step) <= 1e-8 * y:  # the next one would be less than its square
            break
    return y / failures_per_second


def goodput_ratio(cost: SaveCost, interval_seconds: float, failures_per_second: float, restart_seconds: float) -> float:
    """Expected goodput ratio: r t exp(-r (R + E)) / (exp(r (t + C)) - 1), exact for exponential failures.

    t is the interval, C the cost of a save, R the restart, r the failure rate, and E how long training has gone on
    already when a save can be restored. For blocking saves, E = 0, it is the inverse of Daly's complete cost function
    (2006) over the solution time. With E: between two failures the k-th save helps if k (t + C) + R + E pass without
    one; summing the probabilities gives the number of intervals kept, and 1 / r is the time that they took.
    """
    _require("interval_seconds", interval_seconds)
    _require("failures_per_second", failures_per_second)
    _require("restart_seconds", restart_seconds)
    if interval_seconds == 0.0:
        return 0.0 if cost.cost_seconds else math.exp(-failures_per_second * (restart_seconds + cost.exposed_seconds))
    if failures_per_second == 0.0:
        return 1.0 if math.isinf(interval_seconds) else interval_seconds / (interval_seconds + cost.cost_seconds)
    cycle = failures_per_second * (interval_seconds + cost.cost_seconds)
    if cycle > 700.0:
        return 0.0
    kept = cycle / math.expm1(cycle) if cycle else 1.0
    return (
        (1.0 - overhead_ratio(cost, interval_seconds))
        * kept
        * math.exp(-failures_per_second * (restart_seconds + cost.exposed_seconds))
    )


def overhead_ratio(cost: SaveCost, interval_seconds: float) -> float:
    """C / (t + C): of the time without failures, the part that goes into saving."""
    _require("interval_seconds", interval_seconds)
    cycle = interval_seconds + cost.cost_seconds
    return cost.cost_seconds / cycle if cycle else 0.0


def lost_seconds_per_failure(cost: SaveCost, interval_seconds: float) -> float:
    """Training that is repeated after a failure, on average: half an interval, and what was trained while the newest
    save could not be restored yet. First order: for failures that are rare against the interval."""
    _require("interval_seconds", interval_seconds)
    return interval_seconds / 2.0 + cost.exposed_seconds


def first_order_goodput_ratio(
    cost: SaveCost, interval_seconds: float, failures_per_second: float, restart_seconds: float
) -> float:
    """1 - r (R + t / 2 + E) - C / (t + C), at least 0: what remains after each loss on its own, for small losses.

    With C = 0 and E = 0 it is the estimate of A. Kokolis et al., "Revisiting reliability in large-scale machine
    learning research clusters" (2024), for a long job that does not queue: ETTR = 1 - N r_f (u + dt / 2), with N nodes,
    r_f failures per node and time, u to initialize, and dt between checkpoints.
    """
    lost = restart_seconds + lost_seconds_per_failure(cost, interval_seconds)
    return max(0.0, 1.0 - failures_per_second * lost - overhead_ratio(cost, interval_seconds))


def interval_range_within(
    ratio: float, cost: SaveCost, failures_per_second: float, restart_seconds: float
) -> tuple[float, float]:
    """The shortest and the longest interval whose goodput is at least `ratio` of the best one's; 0 < ratio <= 1.

    How flat the optimum is: near it, an interval that is wrong by a factor f wastes (f + 1/f) / 2 times what the best
    one does.
    """
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio is {ratio!r}; it has to be above 0 and at most 1")
    best = optimal_interval_seconds(cost, failures_per_second)
    if best == 0.0 or math.isinf(best):
        return best, best
    wanted = ratio * goodput_ratio(cost, best, failures_per_second, restart_seconds)

    def enough(interval: float) -> bool:
        return goodput_ratio(cost, interval, failures_per_second, restart_seconds) >= wanted

    return _edge(best, 0.5, enough), _edge(best, 2.0, enough)


def two_tier_intervals_seconds(memory: Tier, durable: Tier) -> tuple[float, float]:
    """The best interval of each tier, memory's first: each weighs its own saves against its own failures.

    N. Vaidya, "A case for two-level recovery schemes", IEEE Trans. Computers 47(6), 1998, and A. Moody et al., "Design,
    modeling, and evaluation of a scalable multi-level checkpointing system" (SCR), SC 2010, give the general model; to
    first order it falls apart into one Young problem a tier.
    """
    return memory.optimal_interval_seconds, durable.optimal_interval_seconds


def two_tier_goodput_ratio(
    memory: Tier, memory_interval_seconds: float, durable: Tier, durable_interval_seconds: float
) -> float:
    """Expected goodput ratio with both: the product of what each tier alone would give.

    Equal to the sum of all losses in first order, and to one tier's exact expression if the other costs nothing and
    nothing is recovered from it. Left out: what is lost twice, at most the product of both tiers' losses.
    """
    return memory.goodput_ratio(memory_interval_seconds) * durable.goodput_ratio(durable_interval_seconds)


def _edge(best: float, factor: float, enough: Callable[[float], bool]) -> float:
    """The last interval, going away from the best one, that is good enough."""
    good, bad = best, best * factor
    while enough(bad) and 1e-9 * best < bad < 1e9 * best:
        good, bad = bad, bad * factor
    for _ in range(60):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if enough(middle) else (good, middle)
    return good


def _require(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"{name} is {value!r}; it has to be at least 0")
