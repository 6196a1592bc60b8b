"""A rank's notes of what it consumed, for later proof that no sample was lost or used twice.

Invariant: notes are evidence and nothing else, so a storage that refuses them costs a warning, never the run.
"""

import contextlib
import logging
from collections.abc import Iterator

from workers.data.journal import Sample, SampleJournal
from workers.data.loader import ShardedLoader
from workers.orders import RankOrders

logger = logging.getLogger("lastgood")


class SampleNotes:
    """Of one rank in one generation, while it reads from `loader`."""

    def __init__(self, orders: RankOrders, loader: ShardedLoader) -> None:
        self._rank = orders.rank
        self._loader = loader
        self._journal: SampleJournal | None = None
        with self._warning():
            path = orders.run_dir / f"samples/g{orders.generation:04d}-rank-{orders.rank:05d}.jsonl"
            self._journal = SampleJournal(path)

    def skips(self) -> None:
        """Note the batches that this generation passes over; on rank 0, for all ranks."""
        if self._journal is None or self._rank != 0:
            return
        with self._warning():
            for epoch, batch in self._loader.skipped:
                self._journal.skipped(epoch, batch, self._loader.order.global_batch_ids(epoch, batch))

    def step(self, step: int, consumed: list[Sample], *, epoch_before: int) -> None:
        """Note a finished step, and what was left out of the epochs that ended since `epoch_before`."""
        if self._journal is None:
            return
        with self._warning():  # what was not written goes with the next line
            self._journal.record(step, consumed)
            for epoch in range(epoch_before, self._loader.epoch) if self._rank == 0 else ():
                self._journal.dropped(epoch, self._loader.dropped_ids(epoch))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("rank %d: the sample journal cannot be written: %s", self._rank, error)
