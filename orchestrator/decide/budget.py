"""Whether to try again after a failure, and after how long.

Invariants:
- Each kind of cause has one budget for the whole run, not one a rank or node. A limit that the user sets for it is how
  many such failures may happen without a newer checkpoint in between; one more stops the run. A newer checkpoint
  refills all budgets.
- Causes without a limit share another rule: as many failures in a row as `_STUCK_MAX`, none of which got further than
  an earlier one, stop the run. So no sequence of causes restarts it for ever.
- A restore is exact, so what the loop itself did wrong it will do again: it is stopped when it fails a few times in a
  row after the same step, or before it finished one, however large the budget. A hang is given more tries, since each
  time it is waited for longer. The last try is made from an older checkpoint, if there is one (decide/probation.py).
- A run whose loss goes bad again and again is stopped after five rollbacks without a newer checkpoint in between.
- The first retry is immediate, and so is every one after a generation that finished a step. Otherwise each wait is
  about twice as long as the one before, jittered, so that runs that share what broke do not come back at once.
- A checkpoint that cannot be restored is never tried again, so going on without it neither counts as standing still
  nor waits.
- Causes that are no failures (causes.UNCHARGED) change nothing.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.decide.causes import CAUSES, LOOP_CAUSES, UNCHARGED, repeatable

SAME_STEP_MAX: Mapping[str, int] = {"exception": 3, "exit": 3}
"""Failures in a row after the same step that stop the run, of causes that may repeat exactly."""
SAME_STEP_MAX_OTHER = 5
"""The same for all others of these: a hang, a crash in native code, corruption."""

_BARREN_FRESH_MAX = 2
_BARREN_RESTORED_MAX = 3
_STUCK_MAX = 10
_ROLLBACKS_MAX = 5
_RESTORES_FAILED_MAX = 1000
"""Only a bound: each failed restore uses up a checkpoint."""
_DELAY_SECONDS_BASE = 1.0
_DELAY_SECONDS_MAX = 60.0

Limits = int | Mapping[str, int] | None
"""For every cause, by name of the cause, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start a new generation after this many seconds."""

    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Start no more generations; `reason` completes the sentence "the run was stopped because ..."."""

    reason: str


class FailureBudget:
    """Counts failures; `rng` draws the jitter."""

    def __init__(self, max_failures: Limits, *, rng: random.Random) -> None:
        self._limits = _limits(max_failures)
        self._rng = rng
        self._counts: Counter[str] = Counter()
        self._restored_step = 0
        self._committed_step = 0
        self._furthest_step = 0
        self._barren_in_a_row = 0
        self._stuck_in_a_row = 0
        self._same_step_in_a_row = 0
        self._repeated_at: int | None = None

    def generation_started(self, restored_step: int) -> None:
        """A generation begins after this many finished steps."""
        self._restored_step = restored_step

    def committed(self, step: int) -> None:
        """A checkpoint was committed; one that is newer than all before refills the budgets."""
        if step > self._committed_step:
            self._committed_step = step
            self._counts.clear()
            self._stuck_in_a_row = 0

    def failure(self, cause: str, step: int, exit_code: int | None = None) -> Retry | Stop:
        """The generation failed after `step` finished steps, the restored ones included."""
        if cause in UNCHARGED:
            return Retry(delay_seconds=0.0)
        self._counts[cause] += 1
        if cause == "restore_failed":
            reason = self._over_limit(cause) or self._out_of_rungs()
            return Stop(reason=reason) if reason else Retry(delay_seconds=0.0)
        self._barren_in_a_row = self._barren_in_a_row + 1 if step <= self._restored_step else 0
        if step > self._furthest_step:
            self._furthest_step, self._stuck_in_a_row = step, 0
        elif cause not in self._limits:
            self._stuck_in_a_row += 1
        if repeatable(cause, exit_code):
            self._same_step_in_a_row = self._same_step_in_a_row + 1 if step == self._repeated_at else 1
            self._repeated_at = step
        if reason := self._repeats(cause, exit_code, step) or self._over_limit(cause) or self._stuck(cause):
            return Stop(reason=reason)
        return Retry(delay_seconds=self._delay_seconds())

    def _repeats(self, cause: str, exit_code: int | None, step: int) -> str:
        barren_max = _BARREN_RESTORED_MAX if self._restored_step else _BARREN_FRESH_MAX
        if cause in LOOP_CAUSES and self._barren_in_a_row >= barren_max:
            return f"it failed {self._barren_in_a_row} times in a row before it finished a step"
        most = SAME_STEP_MAX.get(cause, SAME_STEP_MAX_OTHER)
        if repeatable(cause, exit_code) and self._same_step_in_a_row >= most:
            return f"the training loop failed {self._same_step_in_a_row} times in a row after step {step}"
        if cause == "loss" and self._counts[cause] > _ROLLBACKS_MAX:
            tries = f"after {_ROLLBACKS_MAX} rollbacks {self._saved}, each without the batches before"
            return f"its loss went bad again {tries}"
        return ""

    @property
    def _saved(self) -> str:
        return f"since step {self._committed_step} was saved" if self._committed_step else "before anything was saved"

    def _over_limit(self, cause: str) -> str:
        count, limit = self._counts[cause], self._limits.get(cause)
        if limit is None or count <= limit:
            return ""
        return f"it failed {count} times ({cause}) {self._saved}, and max_failures is {limit}"

    def _stuck(self, cause: str) -> str:
        if cause in self._limits or self._stuck_in_a_row < _STUCK_MAX:
            return ""
        return f"it failed {self._stuck_in_a_row} times in a row without getting past step {self._furthest_step}"

    def _out_of_rungs(self) -> str:
        failed = self._counts["restore_failed"]
        return f"{failed} checkpoints could not be restored" if failed >= _RESTORES_FAILED_MAX else ""

    def _delay_seconds(self) -> float:
        if self._barren_in_a_row <= 1:
            return 0.0
        # The exponent is bounded because a large budget may see thousands of failures.
        longest = min(_DELAY_SECONDS_MAX, _DELAY_SECONDS_BASE * 2.0 ** min(self._barren_in_a_row - 2, 16))
        return longest * self._rng.uniform(0.5, 1.0)


def limits_problem(max_failures: object) -> str:
    """What is wrong with limits that a user gave; empty if nothing is."""
    if max_failures is None or _is_count(max_failures):
        return ""
    if not isinstance(max_failures, Mapping):
        return "a whole number, at least 0, a mapping of causes to such numbers, or None for no limit"
    if set(max_failures) - set(CAUSES):
        return f"a mapping that names only these causes: {', '.join(CAUSES)}"
    if UNCHARGED & set(max_failures):
        return f"a mapping without {', '.join(sorted(UNCHARGED))}, which never counts as a failure"
    return "" if all(map(_is_count, max_failures.values())) else "a mapping of causes to whole numbers, at least 0"


def _limits(max_failures: Limits) -> dict[str, int]:
    if problem := limits_problem(max_failures):
        raise ValueError(f"max_failures is {max_failures!r}; it has to be {problem}")
    if max_failures is None:
        return {}
    return dict(max_failures) if isinstance(max_failures, Mapping) else dict.fromkeys(CAUSES, max_failures)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
