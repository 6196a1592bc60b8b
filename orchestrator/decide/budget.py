"""Whether to try again after a failure, and after how long.

Invariants:
- Failures are counted per cause over the whole run, not per rank or node: `max_failures` of one cause without a newer
  checkpoint in between may happen, one more stops the run. A newer checkpoint refills the budget.
- A restore is exact, so what the loop itself did wrong it will do again: it is stopped when it fails twice in a row
  before finishing a step, or three times in a row after the same step, however large the budget.
- A run whose loss goes bad again and again is stopped after five rollbacks without a newer checkpoint in between.
- Without a limit, failures of which none gets further than an earlier one stop the run as well, whatever their cause.
- The first retry is immediate, and so is every one after a generation that finished a step. Otherwise each wait is
  about twice as long as the one before, jittered, so that runs that share what broke do not come back at once.
"""

import random
from collections import Counter
from dataclasses import dataclass

LOOP_CAUSES = frozenset({"exception", "exit"})
"""Causes that lie in the training loop: it raised, or ended its process. All others may lie in the machines."""

FREE_CAUSES = frozenset({"drain", "controller"})
"""Causes that cost nothing here: it was announced and nothing failed, or decide/rounds.py has a budget for it."""

_LOOP_BARREN_MAX = 2
_SAME_STEP_MAX = 3
_STUCK_MAX = 10
_ROLLBACKS_MAX = 5
_DELAY_SECONDS_BASE = 1.0
_DELAY_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start a new generation after this many seconds."""

    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Start no more generations; `reason` completes the sentence "the run was stopped because ..."."""

    reason: str


class FailureBudget:
    """Counts failures. `max_failures` is None for no limit; `rng` draws the jitter."""

    def __init__(self, max_failures: int | None, *, rng: random.Random) -> None:
        if max_failures is not None and max_failures < 0:
            raise ValueError(f"max_failures is {max_failures}; it is a number of failures, or None for no limit")
        self._max_failures = max_failures
        self._rng = rng
        self._counts: Counter[str] = Counter()
        self._restored_step = 0
        self._committed_step = 0
        self._furthest_step = 0
        self._barren_in_a_row = 0
        self._stuck_in_a_row = 0
        self._same_step_in_a_row = 0
        self._loop_failed_at: int | None = None

    def generation_started(self, restored_step: int) -> None:
        """A generation begins after this many finished steps."""
        self._restored_step = restored_step

    def committed(self, step: int) -> None:
        """A checkpoint was committed; one that is newer than all before refills the budget."""
        if step > self._committed_step:
            self._committed_step = step
            self._counts.clear()
            self._stuck_in_a_row = 0

    def failure(self, cause: str, step: int) -> Retry | Stop:
        """The generation failed after `step` finished steps, the restored ones included."""
        if cause in FREE_CAUSES:
            return Retry(delay_seconds=0.0)
        self._counts[cause] += 1
        self._barren_in_a_row = self._barren_in_a_row + 1 if step <= self._restored_step else 0
        self._stuck_in_a_row = self._stuck_in_a_row + 1 if step <= self._furthest_step else 0
        self._furthest_step = max(self._furthest_step, step)
        if cause in LOOP_CAUSES:
            self._same_step_in_a_row = self._same_step_in_a_row + 1 if step == self._loop_failed_at else 1
            self._loop_failed_at = step
        if reason := self._exhausted(cause, step):
            return Stop(reason=reason)
        return Retry(delay_seconds=self._delay_seconds())

    def _exhausted(self, cause: str, step: int) -> str:
        if cause in LOOP_CAUSES and self._barren_in_a_row >= _LOOP_BARREN_MAX:
            return f"it failed {self._barren_in_a_row} times in a row before it finished a step"
        if cause in LOOP_CAUSES and self._same_step_in_a_row >= _SAME_STEP_MAX:
            return f"the training loop failed {self._same_step_in_a_row} times in a row after step {step}"
        count, limit = self._counts[cause], self._max_failures
        saved = f"since step {self._committed_step} was saved" if self._committed_step else "before anything was saved"
        if cause == "loss" and count > _ROLLBACKS_MAX:
            return f"its loss went bad again after {_ROLLBACKS_MAX} rollbacks {saved}, each without the batches before"
        if limit is None:
            if self._stuck_in_a_row < _STUCK_MAX:
                return ""
            return f"it failed {self._stuck_in_a_row} times in a row without getting past step {self._furthest_step}"
        if count <= limit:
            return ""
        return f"it failed {count} times ({cause}) {saved}, and max_failures is {limit}"

    def _delay_seconds(self) -> float:
        if self._barren_in_a_row <= 1:
            return 0.0
        # The exponent is bounded because an unlimited budget may see thousands of failures.
        longest = min(_DELAY_SECONDS_MAX, _DELAY_SECONDS_BASE * 2.0 ** min(self._barren_in_a_row - 2, 16))
        return longest * self._rng.uniform(0.5, 1.0)
