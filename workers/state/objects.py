"""Tracked objects that give their state as a tree: schedulers, scalers, data loaders, generators, the user's own.

Each rank saves its own. An object qualifies with `state_dict` and `load_state_dict`; random generators of torch,
NumPy and Python are taken as well.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from workers.errors import CallerError
from workers.state import tree
from workers.state.pieces import Lookup, Piece, Restorer, own_name


class ObjectPart:
    """A tracked object. `name` is the keyword it is tracked under; `kind` is what it is to training."""

    def __init__(self, name: str, value: Any, rank: int, *, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.value = value
        self._rank = rank
        self._lookup = Lookup(rank)
        self._read, self._write = _accessors(name, value, kind)
        # torchdata's loader starts its workers and draws from the global generators to answer.
        if not isinstance(value, torch.utils.data.DataLoader):
            self.capture()

    def capture(self) -> tuple[list[Piece], dict[str, Any]]:
        """The pieces to save and the document; raises StateNotStorable with the key."""
        document, tensors = tree.encode(self._read(), self.name, name_of=self._stored_name)
        return self._lookup.pieces(tensors), {"kind": self.kind, "state": document}

    def digest(self) -> str:
        """A hash of the whole state."""
        return tree.digest(self._read(), self.name)

    def check(self, document: dict[str, Any], restorer: Restorer) -> None:
        for ref in tree.refs(document["state"]):
            restorer.require_ref(ref)

    def apply(self, document: dict[str, Any], restorer: Restorer) -> None:
        (state,) = restorer.decode([(document["state"], None)])
        self._write(state)

    def _stored_name(self, path: str, tensor: torch.Tensor) -> str:
        return path if isinstance(tensor, DTensor) else own_name(path, self._rank)


def _accessors(name: str, value: Any, kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return value.state_dict, value.load_state_dict
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: _none(value.set_state(state))
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if kind == "data":
        known = "is iterable, but " if isinstance(value, Iterable) else ""
        raise CallerError(
            f"{name}: the loader of type {type(value).__name__} {known}is not resumable, for it has no state_dict and "
            f"load_state_dict; use session.data_loader(...) or torchdata's StatefulDataLoader"
        )
    raise CallerError(
        f"{name}: an object of type {type(value).__name__} has no state_dict and load_state_dict, so it cannot be "
        f"tracked; give it both, or do not track it"
    )


def _none(_result: Any) -> None:
    return None
