"""The resumable data loader: what `session.data_loader` returns.

Invariants: the position counts the batches that were handed to the loop, never the ones that loader workers have
prefetched; a batch's bits are a function of (seed, epoch, batch, rank), so a loader restored to a position hands out
exactly what the uninterrupted one would have, for any number of workers; the global random generators are never drawn
from.

The position stays at the end of an epoch until the loop asks for more. A run that is restored there with endless=False
gets an empty `for` first, and so does whatever its loop does at the end of an epoch, as the uninterrupted run did.

Faults survived: the death of the rank (loader workers die with it); an exception in the dataset (the position stays,
the same batch is tried again if the loop goes on); a restore at any time, any number of times.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from workers.data.fetch import BatchFetcher, BatchKey
from workers.data.order import DataOrder, LastBatch
from workers.errors import CallerError
from workers.processes import die_with_parent


class ShardedLoader:
    """Hands this rank its part of each global batch, in an order that survives restarts.

    dataset: has `len()` and `dataset[i]`, as torch's map-style datasets do.
    global_batch_size: samples of a batch over all ranks; a multiple of `world_size`.
    num_workers: processes that load ahead; 0 loads in the rank itself. They are forked at the first batch, live through
        all epochs until `close()`, and see the dataset as it was when they were forked.
    last_batch: "drop" leaves out the samples that do not fill a global batch (`dropped_ids` names them); "short" hands
        them out as a smaller batch.
    collate_fn: makes a batch of a list of items; torch's `default_collate` unless given.
    prefetch_factor: batches that each worker loads ahead; torch's default (2) unless given.
    pin_memory: copies each batch into pinned memory, for faster copies to a GPU.
    revision: names the version of the dataset; a part of the run's identity.
    endless: True iterates through epoch after epoch until the loop breaks; with False a `for` ends with the epoch and
        the next `for` goes on with the next epoch. A `for` that was left early is continued by the next one.

    `between_batches`, if set, is called each time the loop asks for a batch, before the position moves: the body of the
    loop is done then. `ended` makes every `for` end at once: the saved loop had returned.

    `before_first_batch`, if set, is called once, right before the first batch after construction or `load_state_dict`
    is handed over; if it raises, no batch is handed over and the position stays.

    Raises CallerError, naming the field, its value and the remedy.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        last_batch: LastBatch = "drop",
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        revision: str | None = None,
        endless: bool = True,
    ) -> None:
        _check_dataset(dataset)
        if num_workers < 0:
            raise CallerError(f"num_workers={num_workers} is negative: use 0 to load in the rank itself.")
        if prefetch_factor is not None and (prefetch_factor < 1 or num_workers == 0):
            raise CallerError(
                f"prefetch_factor={prefetch_factor} with num_workers={num_workers} has no meaning: only worker "
                "processes load ahead, at least 1 batch each."
            )
        self.order = DataOrder(
            samples=len(dataset),
            global_batch_size=global_batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            last_batch=last_batch,
            shuffle=shuffle,
        )
        self.revision = revision
        self.before_first_batch: Callable[[], None] | None = None
        self.between_batches: Callable[[], None] | None = None
        self.ended = False
        self._endless = endless
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._fetcher = BatchFetcher(dataset, collate=collate_fn or default_collate, seed=seed)
        self._epoch = 0
        self._batch = 0
        self._first_pending = True
        self._taken = (0, 0)
        self._source: Iterator[tuple[BatchKey, Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Continues after the last batch that was handed over."""
        while not self.ended:
            if self.between_batches is not None:
                self.between_batches()
            if self._batch == self.order.batches_per_epoch:
                self._epoch, self._batch = self._epoch + 1, 0
                if not self._endless:
                    return
            yield self._hand_over()

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was handed over; the next one's once a `for` has ended with its epoch."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        return self.order.batches_per_epoch

    @property
    def samples_consumed(self) -> int:
        """How many samples all ranks together have had, in all epochs."""
        return self.order.samples_before(self._epoch, self._batch)

    def next_sample_ids(self) -> list[int]:
        """This rank's sample ids of the batch that will be handed over next."""
        return self.order.batch_ids(*self._next_position())

    def take_consumed(self) -> list[tuple[int, int]]:
        """The (epoch, sample id) of all samples that were handed to this rank since the last call."""
        consumed = []
        epoch, batch = self._taken
        self._taken = (self._epoch, self._batch)
        # Computed again rather than collected at the hand-over: a loader that nobody asks would grow without limit.
        while (epoch, batch) < self._taken:
            if batch == self.order.batches_per_epoch:
                epoch, batch = epoch + 1, 0
            else:
                consumed += [(epoch, sample) for sample in self.order.batch_ids(epoch, batch)]
                batch += 1
        return consumed

    def dropped_ids(self, epoch: int) -> list[int]:
        """The sample ids that an epoch leaves out, over all ranks; the same on every rank."""
        return self.order.dropped_ids(epoch)

    def identity(self) -> dict[str, Any]:
        """What decides the order and the contents of the batches, as JSON values."""
        return {
            "revision": self.revision,
            "samples": self.order.samples,
            "global_batch_size": self.order.global_batch_size,
            "seed": self.order.seed,
            "last_batch": self.order.last_batch,
            "shuffle": self.order.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in, as JSON values; equal on all ranks."""
        position = {"epoch": self._epoch, "batch": self._batch, "samples_consumed": self.samples_consumed}
        return {**position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. What was prefetched or not yet taken with `take_consumed` is forgotten.

        Raises CallerError, naming the field, if the position would mean other samples here: nothing has changed then.
        The revision is not compared here: it is a part of the run's identity, where a difference may be allowed by
        name.
        """
        epoch, batch = self._checked_position(state)
        self.close()
        self._epoch, self._batch = self._taken = (epoch, batch)
        self._first_pending = True

    def close(self) -> None:
        """End the loader workers and wait for them. The position stays; iterating again starts new ones."""
        source, self._source = self._source, None
        # Dropping the last reference would do the same, but a traceback may hold one: then the workers would stay.
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _checked_position(self, state: dict[str, Any]) -> tuple[int, int]:
        here = self.state_dict()
        if missing := sorted(here.keys() - state.keys()):
            raise CallerError(
                f"the saved position of the data loader lacks {', '.join(missing)}: it was saved by another loader."
            )
        different = [
            f"{name} was {state[name]!r}, is {here[name]!r}"
            for name in ("samples", "global_batch_size", "seed", "last_batch", "shuffle")
            if state[name] != here[name]
        ]
        if different:
            raise CallerError(
                f"the data loader cannot continue from the saved position: {'; '.join(different)}. Use the saved "
                "values, or start another run."
            )
        epoch, batch = state["epoch"], state["batch"]
        for name, value, limit in (("epoch", epoch, sys.maxsize), ("batch", batch, self.order.batches_per_epoch)):
            if not isinstance(value, int) or not 0 <= value <= limit:
                raise CallerError(f"{name}={value!r} in the saved position of the data loader is no place in its data.")
        if state["samples_consumed"] != self.order.samples_before(epoch, batch):
            raise CallerError(
                f"samples_consumed={state['samples_consumed']!r} in the saved position of the data loader contradicts "
                f"epoch={epoch} and batch={batch}: the checkpoint was altered."
            )
        return epoch, batch

    def _next_position(self) -> tuple[int, int]:
        if self._batch == self.order.batches_per_epoch:
            return self._epoch + 1, 0
        return self._epoch, self._batch

    def _hand_over(self) -> Any:
        if self._source is None:
            self._source = self._start_source()
        if self._first_pending:
            if self.before_first_batch is not None:
                self.before_first_batch()
            self._first_pending = False
        try:
            key, batch = next(self._source)
        except BaseException:
            # The source is past the batch that failed: a new one starts at it again.
            self.close()
            raise
        assert (key.epoch, key.batch) == (self._epoch, self._batch), "the loader workers are at another position"
        self._batch += 1
        return batch

    def _start_source(self) -> Iterator[tuple[BatchKey, Any]]:
        """torch's loader over an endless run of batch keys: workers and prefetching go on across the epochs."""
        with_workers: dict[str, Any] = {}
        if self._num_workers:
            with_workers = {
                "prefetch_factor": self._prefetch_factor,
                # Forked, never spawned: a spawned worker imports torch again, which takes seconds.
                "multiprocessing_context": multiprocessing.get_context("fork"),
                "worker_init_fn": partial(_start_worker, os.getpid()),
            }
        loader: DataLoader[Any] = DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._keys(self._epoch, self._batch),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # Without one of its own, torch draws the workers' seeds from the global generator.
            generator=torch.Generator().manual_seed(0),
            **with_workers,
        )
        return iter(loader)

    def _keys(self, epoch: int, batch: int) -> Iterator[BatchKey]:
        while True:
            for number in range(batch, self.order.batches_per_epoch):
                yield BatchKey(epoch, number, self.order.batch_ids(epoch, number))
            epoch, batch = epoch + 1, 0


def _check_dataset(dataset: Any) -> None:
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise CallerError(
            f"the dataset of type {type(dataset).__name__} has no length and no access by index: track torchdata's "
            "StatefulDataLoader over it instead of session.data_loader."
        )


def _start_worker(parent_pid: int, _worker: int) -> None:
    die_with_parent(parent_pid)


def _as_it_is(batch: Any) -> Any:
    return batch
