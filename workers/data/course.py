"""The batches that a run goes through: those of a DataOrder, one after the other, but for the ones that it skips.

A position (epoch, batch) stands before that batch; batch = batches_per_epoch is the end of an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from workers.data.order import DataOrder

BatchId = tuple[int, int]
"""(epoch, batch within the epoch) of a global batch"""

SKIPPED_MAX = 1000
"""Batches that one run may skip in all: they travel in small messages, and such a run needs a person's attention."""


@dataclass(frozen=True, slots=True)
class Course:
    """`skipped` are passed over, by all ranks alike. Finitely many are, so there is always a next batch."""

    order: DataOrder
    skipped: frozenset[BatchId] = frozenset()

    def following(self, position: BatchId) -> BatchId:
        """The batch that is handed out next after this position."""
        epoch, batch = position
        while True:
            if batch >= self.order.batches_per_epoch:
                epoch, batch = epoch + 1, 0
            elif (epoch, batch) in self.skipped:
                batch += 1
            else:
                return epoch, batch

    def epoch_is_over(self, position: BatchId) -> bool:
        """Whether the epoch of this position has nothing more to hand out."""
        return self.following(position)[0] > position[0]

    def between(self, start: BatchId, stop: BatchId) -> Iterator[BatchId]:
        """The batches that are handed out from position `start` on and before position `stop`."""
        batch = self.following(start)
        while batch < stop:
            yield batch
            batch = self.following((batch[0], batch[1] + 1))

    def samples_before(self, position: BatchId) -> int:
        """How many samples all ranks together have had before this position."""
        passed = (batch for batch in self.skipped if batch < position)
        return self.order.samples_before(*position) - sum(self.order.batch_samples(batch) for _, batch in passed)
