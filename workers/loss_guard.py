"""Whether a step's loss and gradient norm are fit to go on from. Pure: numbers in, a judgement out.

Invariants: a value that is not finite is bad; an exploding one is, if a factor is set and enough good steps were seen;
only steps of which every value is good are remembered. What is remembered is a part of the saved state, so that a
restored run judges as the uninterrupted one does.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_REMEMBERED = 50
_SEEN_MIN = 20
WATCHED = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """`what` is "loss" or "grad_norm"; `limit` is what the value exceeds, None if it is not finite."""

    what: str
    value: float
    limit: float | None

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.what]
        above = "" if self.limit is None else f", above its limit of {self.limit:g}"
        return f"the {name} is {self.value:g}{above}"


class LossGuard:
    """Judges one rank's steps, in their order.

    spike_factor: a value above this factor times the median size of the last 50 good ones is exploding, once there are
    20; None judges only whether values are finite.
    """

    def __init__(self, spike_factor: float | None) -> None:
        self._spike_factor = spike_factor
        self._good = {what: deque[float](maxlen=_REMEMBERED) for what in WATCHED}

    def judge(self, values: Mapping[str, float], *, may_overflow: Collection[str] = ()) -> BadValue | None:
        """The first bad one of a step's values by name, None if all are good.

        `may_overflow`: those that are not finite now and then in a healthy run too; such a value is neither bad nor
        remembered.
        """
        remembered = {}
        for what, value in values.items():
            if not math.isfinite(value):
                if what in may_overflow:
                    continue
                return BadValue(what=what, value=value, limit=None)
            limit = self._limit(what)
            if limit is not None and value > limit:
                return BadValue(what=what, value=value, limit=limit)
            remembered[what] = value
        if self._spike_factor is not None:
            for what, value in remembered.items():
                self._good[what].append(value)
        return None

    def _limit(self, what: str) -> float | None:
        if self._spike_factor is None or len(self._good[what]) < _SEEN_MIN:
            return None
        # The size, for a negative log-likelihood of densities may well be below zero. Nothing is a multiple of zero.
        return self._spike_factor * abs(statistics.median(self._good[what])) or None

    def state_dict(self) -> dict[str, list[float]]:
        return {what: list(values) for what, values in self._good.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._good = {what: deque(state[what], maxlen=_REMEMBERED) for what in WATCHED}
