"""Builds one batch, in a loader worker or in the rank itself, with the same bits in either.

Invariants: random numbers that `dataset[i]` draws from the global generators of Python, NumPy and torch (CPU) depend on
(seed, epoch, sample id) and on nothing else: not on the worker, not on what it loaded before. `collate_fn` goes on with
the numbers of the batch's last item. The global generators are left as they were found. Generators that a dataset keeps
for itself are its own affair.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What a loader worker is told to build: this rank's part of one global batch."""

    epoch: int
    batch: int
    ids: list[int]


class BatchFetcher:
    """A map from batch keys to (key, collated batch), in the shape of a torch dataset."""

    def __init__(self, dataset: Any, *, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, Any]:
        with _global_generators_kept(), _one_thread():
            items = []
            for sample in key.ids:
                _seed_global_generators(self._seed, key.epoch, sample)
                items.append(self._dataset[sample])
            return key, self._collate(items)


def _seed_global_generators(seed: int, epoch: int, sample: int) -> None:
    digest = hashlib.blake2b(f"lastgood item {seed} {epoch} {sample}".encode(), digest_size=32).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(np.frombuffer(digest[8:24], dtype="<u4").astype(np.uint32))
    # Not torch.manual_seed: that seeds the CUDA generators too, which belong to the training.
    torch.default_generator.manual_seed(int.from_bytes(digest[24:], "little"))


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    python, torch_cpu = random.getstate(), torch.default_generator.get_state()
    numpy = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_cpu)


@contextmanager
def _one_thread() -> Iterator[None]:
    # torch gives a loader worker one thread, and a mean over many threads has other bits than a mean over one: the rank
    # must load as a worker would.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
