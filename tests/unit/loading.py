"""Datasets and loaders for the tests of the data path."""

import json
import random
from itertools import islice
from typing import Any

import numpy as np
import torch

from workers.data.loader import ShardedLoader


class Augmented:
    """Each item is its id and a draw from each global generator, as a random augmentation would make."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *draws], dtype=torch.float64)


class FailsOnce(Augmented):
    """Fails the first time that sample 5 is read; a file tells, for the loader workers share no memory."""

    def __init__(self, marker: Any) -> None:
        super().__init__()
        self.marker = marker

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and not self.marker.exists():
            self.marker.touch()
            raise ValueError("sample 5 cannot be read")
        return super().__getitem__(index)


def mask_some(items: list[torch.Tensor]) -> torch.Tensor:
    """A collator with randomness of its own, as for masked language models."""
    draws = torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item()], dtype=torch.float64)
    return torch.stack(items) * draws.sum()


def loader_of(dataset: Any = None, **options: Any) -> ShardedLoader:
    fields = {"global_batch_size": 4, "seed": 1, "rank": 0, "world_size": 1, **options}
    return ShardedLoader(Augmented() if dataset is None else dataset, **fields)


def take(loader: ShardedLoader, batches: int) -> list[torch.Tensor]:
    return list(islice(loader, batches))


def ids(batches: list[torch.Tensor]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def moved(loader: ShardedLoader) -> dict[str, Any]:
    """The state as it comes back from a checkpoint."""
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state
