"""What becomes of a run whose loss or gradient norm is bad in some step.

Invariants:
- A step with a bad value is never committed: the rank that sees it ends unsaved, and only what all ranks have saved is
  committed. So the newest checkpoint is from before it, and going back to that is enough.
- What is skipped stays skipped for the rest of the run, on whichever path through its checkpoints: in the ledger first,
  then in every generation's file from the next one on.

Faults survived: the coordinator or the driver dies between those two (the ledger is read when either comes back), or
before the first (the restored run meets the same batch again, computes the same, and it is all judged once more).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.decide.budget import Stop
from workers.data.course import SKIPPED_MAX, BatchId

Policy = Literal["stop", "rollback"]

_UNSAVED = "nothing of that step or a later one was saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Go on from the newest checkpoint without these batches."""

    batches: tuple[BatchId, ...]


def answer(detail: Mapping[str, Any], policy: Policy, skipped: Collection[BatchId]) -> Skip | Stop:
    """`detail`: of the failure's cause, as the rank told it (workers.bad_step). `skipped`: what is skipped already."""
    if policy == "stop":
        return Stop(
            reason=f'RecoveryConfig.on_bad_loss is "stop", and {_UNSAVED}; correct the data or the loop, or set it to '
            f'"rollback", which passes over the batches of such a step'
        )
    batches = {(epoch, batch) for epoch, batch in detail["batches"]}
    if not batches:
        return Stop(reason=f"there is no batch to skip, and {_UNSAVED}; it would go wrong in the same way again")
    if len(batches | set(skipped)) > SKIPPED_MAX:
        return Stop(reason=f"it would have to skip more than {SKIPPED_MAX} batches in all, and {_UNSAVED}")
    return Skip(batches=tuple(sorted(batches)))
