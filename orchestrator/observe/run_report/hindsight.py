"""How often a run should have saved, now that it is known when it failed. Pure.

What is computed. The run's failures cut its training into stretches: from the moment that all ranks had done a step
again until the next failure struck, or until the last that is known of the run. In a stretch of U seconds, saves at a
fixed interval t that cost C each (stall and slowdown, as `SaveCost.cost_seconds`) and can be restored D after their
boundary would have begun at t, t + (t + C), and so on. At its end, if that is a failure, all that was trained since the
newest one that could be restored by then is lost:

    waste(t) = sum over stretches of  C * (saves begun)  +  (lost, if it ended with a failure)

The stretches are those that the run really had, to the second; the costs are medians of what its saves really cost. So
waste(t) is what that interval would have come to had nothing else been different. The best one is looked for among 240
intervals first, and then found exactly: between two places where a stretch's number of saves changes, or the newest
that can be restored, waste falls as t grows, so only those places are tried; of a very long run, those near the first.

The two tiers are apart, as in `decide/cost.py`: a failure that was answered from memory counts for the interval of
snapshots in memory, all others for that of checkpoints. What the run really lost, its account says; compare `as_run`,
this model at the interval that the run had, with `best`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.decide.cost import SaveCost, optimal_interval_seconds
from orchestrator.observe.restarts import Restarts

_COARSE = 240
_CANDIDATES_MAX = 20_000
_FINE_FACTOR = 1.1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training without a break. `failed`: whether a failure ended it, after which this tier was restored."""

    seconds: float
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """Of one tier. `failures`: those that it answered. `best_seconds`: infinite if not saving at all had been best.
    `as_run_seconds`: the interval that the run had, None if it is not known. `formula_seconds`: what the formula for
    failures at a constant rate gives for the rate that the run had. Wastes are seconds, of saving and of lost work."""

    tier: str
    cost: SaveCost
    failures: int
    trained_seconds: float
    best_seconds: float
    best_waste_seconds: float
    as_run_seconds: float | None
    as_run_waste_seconds: float | None
    formula_seconds: float
    formula_waste_seconds: float
    curve: Sequence[tuple[float, float]] = field(repr=False)


def hindsight(
    tier: str, stretches: Sequence[Stretch], cost: SaveCost, *, step_seconds: float, as_run_seconds: float | None
) -> Hindsight | None:
    """None if there is nothing to say: no training, or saves that cost nothing, so that none is too many. No interval
    is shorter than `step_seconds`."""
    trained = sum(stretch.seconds for stretch in stretches)
    if not trained or not cost.cost_seconds:
        return None
    model = _Model(stretches, cost)
    failures = sum(stretch.failed for stretch in stretches)
    shortest = max(step_seconds, trained * 1e-5, 1e-3)
    longest = max(max(stretch.seconds for stretch in stretches), 2 * shortest)
    coarse = [shortest * (longest / shortest) ** (n / (_COARSE - 1)) for n in range(_COARSE)]
    curve = [(seconds, model.waste(seconds)) for seconds in coarse]
    around = min(curve, key=lambda point: point[1])[0]
    tried = [*curve, (math.inf, model.waste(math.inf))]
    least = min(waste for _, waste in tried)
    tried += [(seconds, model.waste(seconds)) for seconds in model.turns(around, max(shortest, model.floor(least)))]
    best, waste = min(tried, key=lambda point: (point[1], -point[0]))
    formula = max(step_seconds, optimal_interval_seconds(cost, failures / trained))
    return Hindsight(
        tier=tier,
        cost=cost,
        failures=failures,
        trained_seconds=trained,
        best_seconds=best,
        best_waste_seconds=waste,
        as_run_seconds=as_run_seconds,
        as_run_waste_seconds=model.waste(as_run_seconds) if as_run_seconds else None,
        formula_seconds=formula,
        formula_waste_seconds=model.waste(formula),
        curve=curve,
    )


def stretches_of(entries: Iterable[Mapping[str, Any]]) -> list[tuple[float, str | None]]:
    """Of the whole run: how long each lasted, and where the state after its failure came from; None if it ended
    otherwise, or that is not known yet. A failure before all ranks had done a step ends no stretch: nothing was
    trained."""
    found: list[tuple[float, str | None]] = []
    restarts = Restarts()
    began: float | None = None
    lost: int | None = None  # the stretch whose failure waits for its answer
    last_at = 0.0

    def end(at: float) -> None:
        nonlocal began
        if began is not None:
            found.append((max(0.0, at - began), None))
            began = None

    for entry in entries:
        restarts.take(entry)
        match entry["kind"]:
            case "first_step" if restarts.stepped_at is not None and began is None:
                began = restarts.stepped_at
            case "failure" if began is not None:
                end(float(entry["failed_at"]))
                lost = len(found) - 1
            case "generation":
                end(last_at)  # its driver ended without a word
                if lost is not None:
                    found[lost] = (found[lost][0], str(entry.get("source", "fresh")))
                    lost = None
            case "finished" | "stopped":
                end(float(entry["at"]))
        last_at = max(last_at, float(entry["at"]))
    end(last_at)
    return found


class _Model:
    def __init__(self, stretches: Sequence[Stretch], cost: SaveCost) -> None:
        self._up = np.array([stretch.seconds for stretch in stretches])
        self._failed = np.array([stretch.failed for stretch in stretches])
        self._cost = cost.cost_seconds
        self._ready = max(cost.stall_seconds, cost.durable_seconds)

    def waste(self, interval: float) -> float:
        """In all stretches together."""
        if math.isinf(interval):
            return float(self._up[self._failed].sum())
        cycle = interval + self._cost
        # The k-th save begins at k * interval + (k - 1) * cost; one that would begin as the stretch ends is not made.
        begun = np.maximum(0, np.ceil((self._up + self._cost) / cycle - 1e-9) - 1)
        saving = np.minimum(begun * self._cost, np.maximum(0.0, self._up - begun * interval))
        restorable = np.floor((self._up + self._cost - self._ready) / cycle + 1e-9)
        kept = np.clip(restorable, 0, begun) * interval
        lost = np.where(self._failed, np.maximum(0.0, self._up - saving - kept), 0.0)
        return float((saving + lost).sum())

    def floor(self, waste: float) -> float:
        """At any shorter interval the saves alone take longer than that."""
        whole = waste + 2 * len(self._up) * self._cost
        return float(self._up.sum()) * self._cost / whole - self._cost

    def turns(self, around: float, shortest: float) -> list[float]:
        """The intervals at which waste(t) may have its least: where the k-th save of a stretch can just be restored
        when it fails, or where there is one save less. Only those near `around`, if there were too many."""
        high = float(self._up.max()) + self._cost
        low = shortest
        if 2 * float(self._up.sum()) / (low + self._cost) > _CANDIDATES_MAX:
            low, high = max(shortest, around / _FINE_FACTOR), around * _FINE_FACTOR
        found: set[float] = set()
        for up, failed in zip(self._up.tolist(), self._failed.tolist(), strict=True):
            for end in (up + self._cost, up + self._cost - self._ready)[: 2 if failed else 1]:
                first, last = (max(1, math.floor(end / (seconds + self._cost))) for seconds in (high, low))
                for k in range(first, last + 2):
                    interval = end / k - self._cost
                    if low <= interval <= high:
                        found.add(interval)
                if len(found) > _CANDIDATES_MAX:
                    return sorted(found)
        return sorted(found)
