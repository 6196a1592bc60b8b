"""The resumable data loader: what `session.data_loader` returns.

Invariants: the position counts the batches that were handed to the loop, never the ones that loader workers have
prefetched; a batch's bits are a function of (seed, epoch, batch, rank), so a loader restored to a position hands out
exactly what the uninterrupted one would have, for any number of workers; the global random generators are never drawn
from.

Batches that the run skips are handed to nobody, on no rank, and do not count as consumed.

The position stays where the last batch ended until the next one is handed over, or a `for` ends with its epoch. A run
that is restored at the end of an epoch with endless=False gets an empty `for` first, and so does whatever its loop does
at the end of an epoch, as the uninterrupted run did.

Faults survived: the death of the rank (loader workers die with it); an exception in the dataset (the position stays,
the same batch is tried again if the loop goes on); a restore at any time, any number of times.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from workers.data.course import BatchId, Course
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
        self._course = Course(self.order)
        self._position: BatchId = (0, 0)
        self._taken = self._position
        self._last: BatchId | None = None
        self._first_pending = True
        self._source: Iterator[tuple[BatchKey, Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Continues after the last batch that was handed over."""
        while not self.ended:
            if self.between_batches is not None:
                self.between_batches()
            if not self._endless and self._course.epoch_is_over(self._position):
                self._position = (self.epoch + 1, 0)
                return
            yield self._hand_over()

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was handed over; the next one's once a `for` has ended with its epoch."""
        return self._position[0]

    @property
    def batches_per_epoch(self) -> int:
        return self.order.batches_per_epoch

    @property
    def samples_consumed(self) -> int:
        """How many samples all ranks together have had, in all epochs."""
        return self._course.samples_before(self._position)

    def next_sample_ids(self) -> list[int]:
        """This rank's sample ids of the batch that will be handed over next."""
        return self.order.batch_ids(*self._course.following(self._position))

    def skip_batches(self, batches: Iterable[BatchId]) -> None:
        """Pass over these global batches, as far as they lie ahead. Every rank has to be told the same.

        Raises CallerError for a batch that no epoch has: they were counted in batches of another size.
        """
        wanted = frozenset(batches)
        for epoch, batch in sorted(wanted):
            if epoch < 0 or not 0 <= batch < self.order.batches_per_epoch:
                raise CallerError(
                    f"the run skips batch {batch} of epoch {epoch}, and an epoch has "
                    f"{self.order.batches_per_epoch} batches of global_batch_size={self.order.global_batch_size}: use "
                    "the data and batch size that the run began with, or start another run."
                )
        self.close()  # prefetching may be past them
        ahead = {batch for batch in wanted if batch >= self._position}
        self._course = Course(self.order, self._course.skipped | ahead)

    @property
    def skipped(self) -> list[BatchId]:
        """The global batches that are passed over, sorted: those behind and those ahead."""
        return sorted(self._course.skipped)

    def batches_in_use(self) -> list[BatchId]:
        """The global batches handed over since the last `take_consumed`; if none were, the loop still has the last."""
        since = list(self._course.between(self._taken, self._position))
        return since or ([self._last] if self._last is not None else [])

    def take_consumed(self) -> list[tuple[int, int]]:
        """The (epoch, sample id) of all samples that were handed to this rank since the last call."""
        # Computed again rather than collected at the hand-over: a loader that nobody asks would grow without limit.
        batches = self._course.between(self._taken, self._position)
        self._taken = self._position
        return [(epoch, sample) for epoch, batch in batches for sample in self.order.batch_ids(epoch, batch)]

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
        epoch, batch = self._position
        skipped = [list(one) for one in self.skipped]
        position = {"epoch": epoch, "batch": batch, "samples_consumed": self.samples_consumed, "skipped": skipped}
        return {**position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. What was prefetched or not yet taken with `take_consumed` is forgotten.

        Raises CallerError, naming the field, if the position would mean other samples here: nothing has changed then.
        The revision is not compared here: it is a part of the run's identity, where a difference may be allowed by
        name.
        """
        position, course = self._checked_position(state)
        self.close()
        self._position = self._taken = position
        self._course = course
        self._last = None
        self._first_pending = True

    def close(self) -> None:
        """End the loader workers and wait for them. The position stays; iterating again starts new ones."""
        source, self._source = self._source, None
        # Dropping the last reference would do the same, but a traceback may hold one: then the workers would stay.
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _checked_position(self, state: dict[str, Any]) -> tuple[BatchId, Course]:
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
        course = Course(self.order, self._checked_skips(state["skipped"]))
        if state["samples_consumed"] != course.samples_before((epoch, batch)):
            raise CallerError(
                f"samples_consumed={state['samples_consumed']!r} in the saved position of the data loader contradicts "
                f"epoch={epoch} and batch={batch}: the checkpoint was altered."
            )
        return (epoch, batch), course

    def _checked_skips(self, skipped: Any) -> frozenset[BatchId]:
        try:
            checked = frozenset((epoch, batch) for epoch, batch in skipped)
            whole = all(type(epoch) is type(batch) is int for epoch, batch in checked)
        except (TypeError, ValueError):
            whole = False
        if not whole or not all(epoch >= 0 and 0 <= batch < self.order.batches_per_epoch for epoch, batch in checked):
            raise CallerError(
                f"skipped={skipped!r} in the saved position of the data loader is no list of its batches."
            )
        return checked

    def _hand_over(self) -> Any:
        due = self._course.following(self._position)
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
        assert (key.epoch, key.batch) == due, "the loader workers are at another position"
        self._last, self._position = due, (due[0], due[1] + 1)
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
            sampler=self._keys(self._position),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # Without one of its own, torch draws the workers' seeds from the global generator.
            generator=torch.Generator().manual_seed(0),
            **with_workers,
        )
        return iter(loader)

    def _keys(self, position: BatchId) -> Iterator[BatchKey]:
        while True:
            epoch, batch = self._course.following(position)
            yield BatchKey(epoch, batch, self.order.batch_ids(epoch, batch))
            position = epoch, batch + 1


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
