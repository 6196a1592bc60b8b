"""When a checkpoint is suspected of the failures that follow it.

A checkpoint may be sound, byte for byte, and still hold a state from which training cannot go on. So the run is given
one try from the checkpoint before.

Invariants:
- Suspected is the newest checkpoint, once the run has failed twice (a hang and others that take longer to be sure of:
  four times) without getting further than the first of these failures. Only failures count that the same state may
  bring about again (causes.repeatable): a lost node says nothing about what it had restored.
- What lies after a suspected checkpoint came out of it, and is passed over with it (decide/ladder.py). The
  generation that restores the one before does not have it on its lineage, so it never comes back.
- A run that saves a newer state than it ever failed at has shown all of them good. Only that ends a suspicion.
- From the older checkpoint the count begins again, so one more may be suspected. But one more failure after the same
  step shows that no checkpoint was to blame, and the budget stops the run then: its limits lie one above these.
"""

from orchestrator.decide.budget import SAME_STEP_MAX, SAME_STEP_MAX_OTHER
from orchestrator.decide.causes import repeatable


class Probation:
    """`suspects`: names of checkpoints that are on probation, each with the reason."""

    def __init__(self) -> None:
        self.suspects: dict[str, str] = {}
        self._newest: str | None = None
        self._furthest = -1
        self._failures = 0

    def generation_started(self, checkpoint: str | None) -> None:
        """A generation begins from this checkpoint; None if it starts afresh or its checkpoint is not known."""
        self._newest = checkpoint

    def committed(self, checkpoint: str, step: int) -> None:
        """The running generation has saved this state."""
        self._newest = checkpoint
        if step > self._furthest:
            self.suspects.clear()
            self._furthest, self._failures = -1, 0

    def failure(self, cause: str, step: int, exit_code: int | None = None) -> str | None:
        """The generation failed after `step` finished steps; the checkpoint that is suspected now, if one is."""
        if not repeatable(cause, exit_code):
            return None
        if step > self._furthest:
            self._furthest, self._failures = step, 0
        self._failures += 1
        most = SAME_STEP_MAX.get(cause, SAME_STEP_MAX_OTHER) - 1
        if self._newest is None or self._failures < most:
            return None
        self.suspects[self._newest] = (
            f"on probation: the run failed {self._failures} times after it without getting past step {self._furthest}"
        )
        self._failures = 0
        return self._newest
