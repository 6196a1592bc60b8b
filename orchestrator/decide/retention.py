"""What may be deleted after a commit.

Invariants:
- The newest `keep_last` checkpoints on the lineage that nothing speaks against stay, and so does everything that is
  being restored or written. Until that many exist, no committed checkpoint is deleted.
- A quarantined checkpoint stays where it is: it is evidence, and it does not count as one of those kept.
- The leftover of a save goes only once something newer is committed. So a save that began, or was even committed,
  while the directory was looked at is safe, whatever the caller knows of it.
- Nothing of a generation above one's own ever goes.

What is returned are candidates: whoever deletes must look for a higher generation again (see orchestrator.archive).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, eligible


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """This directory is no longer needed, and why."""

    name: str
    reason: str


def expired(
    *,
    generations: Iterable[GenerationRecord],
    checkpoints: Iterable[CheckpointRecord],
    orphans: Iterable[CheckpointRecord],
    rejected: Collection[str],
    protected: Collection[str],
    my_generation: int,
    keep_last: int,
) -> tuple[Delete, ...]:
    """What to delete, oldest first.

    `checkpoints` are all committed ones, `orphans` the attempts without a manifest, `rejected` the names that are
    quarantined or visibly damaged, `protected` the names of attempts in flight and of checkpoints being restored.
    Raises ValueError if `keep_last` is less than 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
    generations, checkpoints = tuple(generations), tuple(checkpoints)
    on_lineage = eligible(generations, checkpoints)
    verified = [checkpoint for checkpoint in on_lineage if checkpoint.name not in rejected]
    if not verified:
        return ()
    untouchable = {*rejected, *protected}
    newest = (verified[0].generation, verified[0].step)
    candidates = [
        (orphan, "its save was never completed") for orphan in orphans if (orphan.generation, orphan.step) <= newest
    ]
    if len(verified) >= keep_last:
        floor = verified[keep_last - 1]
        candidates += [(checkpoint, f"older than the newest {keep_last}") for checkpoint in verified[keep_last:]]
        names_on_lineage = {checkpoint.name for checkpoint in on_lineage}
        # A timeline that was left may be of interest to a person for a while; until the run has come as far again.
        candidates += [
            (checkpoint, "on a timeline that was rolled back")
            for checkpoint in checkpoints
            if checkpoint.name not in names_on_lineage and checkpoint.step <= floor.step
        ]
    return tuple(
        Delete(name=record.name, reason=reason)
        for record, reason in sorted(candidates, key=lambda item: (item[0].generation, item[0].step, item[0].attempt))
        if record.name not in untouchable and record.generation <= my_generation
    )
