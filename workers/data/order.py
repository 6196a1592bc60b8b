"""Which samples make up which batch: a pure function of (seed, epoch, place in the epoch).

Invariants: the ranks' parts of a global batch are disjoint and together are that batch, in order; over an epoch each
sample is in exactly one batch, except the ones `dropped_ids` names; nothing here depends on what was drawn before or on
how many workers load; the global batch k of an epoch is the same samples for every world size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from workers.data.permutation import SIZE_MAX, KeyedPermutation
from workers.errors import CallerError

LastBatch = Literal["drop", "short"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The order in which one rank reads a dataset, in all epochs.

    samples: how many samples the dataset holds.
    global_batch_size: samples of a batch over all ranks; a multiple of `world_size`.
    last_batch: when the dataset does not divide into batches, "drop" leaves the rest of an epoch out and "short" hands
        out a smaller last batch, of which every rank gets at least one sample.
    shuffle: False reads the samples in the order of their ids, in every epoch.

    Raises CallerError, naming the field, its value and the remedy.
    """

    samples: int
    global_batch_size: int
    seed: int
    rank: int
    world_size: int
    last_batch: LastBatch = "drop"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= SIZE_MAX:
            raise CallerError(f"the dataset has {self.samples} samples; it needs at least 1 and at most 2**62.")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise CallerError(
                f"rank={self.rank} with world_size={self.world_size} does not exist: ranks count from 0 to "
                "world_size - 1."
            )
        if self.last_batch not in get_args(LastBatch):
            raise CallerError(f'last_batch={self.last_batch!r} is unknown: use "drop" or "short".')
        size, world = self.global_batch_size, self.world_size
        if size < 1 or size % world:
            raise CallerError(
                f"global_batch_size={size} cannot be shared equally by {world} ranks: use a multiple of {world}, for "
                f"example {max(1, round(size / world)) * world}."
            )
        rest = self.samples % size
        if self.last_batch == "drop" and self.samples < size:
            raise CallerError(
                f"global_batch_size={size} is more than the dataset's {self.samples} samples, so that dropping the "
                f'last batch leaves nothing: use at most {self.samples}, or last_batch="short".'
            )
        if self.last_batch == "short" and 0 < rest < world:
            raise CallerError(
                f'last_batch="short" leaves a last batch of {rest} samples for {world} ranks, and every rank needs '
                f'one: use last_batch="drop" or another global_batch_size than {size}.'
            )

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch_size)
        return whole + (self.last_batch == "short" and rest > 0)

    @property
    def samples_per_epoch(self) -> int:
        """How many samples all ranks together get from one epoch."""
        return min(self.samples, self.batches_per_epoch * self.global_batch_size)

    def samples_before(self, epoch: int, batch: int) -> int:
        """How many samples all ranks together have had before this batch."""
        return epoch * self.samples_per_epoch + min(batch * self.global_batch_size, self.samples_per_epoch)

    def batch_samples(self, batch: int) -> int:
        """How many samples this batch of an epoch has over all ranks."""
        start, stop = self._places(batch)
        return stop - start

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """This rank's sample ids of one global batch."""
        start, stop = self._places(batch)
        size = stop - start
        first = start + size * self.rank // self.world_size
        last = start + size * (self.rank + 1) // self.world_size
        return self._ids(epoch, first, last)

    def global_batch_ids(self, epoch: int, batch: int) -> list[int]:
        """The sample ids of one global batch: the ranks' parts, one after the other."""
        return self._ids(epoch, *self._places(batch))

    def dropped_ids(self, epoch: int) -> list[int]:
        """The sample ids that this epoch leaves out: fewer than a global batch, none with "short"."""
        return self._ids(epoch, self.samples_per_epoch, self.samples)

    def handed_out(self, epoch: int, batch: int) -> Iterator[tuple[int, int]]:
        """Every (epoch, sample id) that all ranks together have had before this batch, from the very first on."""
        for past in range(epoch + 1):
            for number in range(batch if past == epoch else self.batches_per_epoch):
                for sample in self.global_batch_ids(past, number):
                    yield past, sample

    def _places(self, batch: int) -> tuple[int, int]:
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is outside an epoch of {self.batches_per_epoch} batches")
        start = batch * self.global_batch_size
        return start, min(start + self.global_batch_size, self.samples)

    def _ids(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self.shuffle:
            return list(range(start, stop))
        places = np.arange(start, stop, dtype=np.int64)
        return [int(sample) for sample in KeyedPermutation(self.samples, seed=self.seed, epoch=epoch)(places)]
