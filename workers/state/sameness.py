"""Whether what was planned from still is what it was: exact, and fast enough to ask at every snapshot.

The work is left to loops in C, for a model may have tens of thousands of tensors.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workers.state.tree import local_part

_values = methodcaller("values")


class Contents:
    """What a number of dicts hold: the same keys, in the same order, with the same objects."""

    def __init__(self, dicts: Sequence[Mapping[Any, Any]]) -> None:
        self._sizes = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        self._values = [*chain.from_iterable(map(_values, dicts))]

    def are(self, dicts: Sequence[Mapping[Any, Any]]) -> bool:
        return (
            [*map(len, dicts)] == self._sizes
            and all(map(is_, chain.from_iterable(map(_values, dicts)), self._values))
            and [*chain.from_iterable(dicts)] == self._keys
        )


class Memories:
    """Tensors, and where this rank's parts of them lie: what was planned with them holds while these are the same.

    Exact: `tensor.data = other`, `resize_`, and another view of the same memory keep the object, and are noticed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._parts = [local_part(tensor) for tensor in tensors]
        self._dtypes = [part.dtype for part in self._parts]
        self._sharded = any(isinstance(tensor, DTensor) for tensor in tensors)

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same objects, and lie where they did."""
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors)) and self.are_at(tensors)

    def are_at(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these, as many, lie where the known ones did, in whatever objects."""
        if self._sharded:
            with torch.no_grad():
                tensors = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        try:
            return all(map(torch.Tensor.is_set_to, tensors, self._parts)) and (
                list(map(attrgetter("dtype"), tensors)) == self._dtypes
            )
        except RuntimeError:  # it went to another device
            return False
