"""A checkpoint in memory, for tests of what goes into one and comes back: copies bytes, and JSON through text."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from workers.checkpoint.tensors import CapturedState, TensorSource


class MemoryCheckpoint:
    """What all ranks saved. Fails if two shards hold the same part of a tensor."""

    def __init__(self, captures: Sequence[CapturedState]) -> None:
        self.documents = [json.dumps(whole_document(capture), allow_nan=False) for capture in captures]
        self.parts: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        for capture in captures:
            for named in capture.tensors:
                parts = self.parts.setdefault(named.name, {})
                assert named.offsets not in parts, f"{named.name} at {named.offsets} is written twice"
                assert not named.tensor.requires_grad
                assert len(named.offsets) == len(named.global_shape) == named.tensor.ndim
                ends = [at + size for at, size in zip(named.offsets, named.tensor.shape, strict=True)]
                assert all(end <= size for end, size in zip(ends, named.global_shape, strict=True))
                parts[named.offsets] = named.tensor.clone(memory_format=torch.contiguous_format)

    def source(self, rank: int = 0) -> "MemorySource":
        return MemorySource(self, json.loads(self.documents[rank]))


class MemorySource:
    def __init__(self, checkpoint: MemoryCheckpoint, document: dict[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._document = document

    def document(self) -> dict[str, Any]:
        return self._document

    def names(self) -> Collection[str]:
        return self._checkpoint.parts.keys()

    def fill(self, wanted: Iterable[tuple[str, Sequence[int], torch.Tensor]]) -> None:
        for name, offsets, target in wanted:
            stored = self._checkpoint.parts[name][tuple(offsets)]
            assert (stored.shape, stored.dtype) == (target.shape, target.dtype), name
            target.copy_(stored)


def whole_document(captured: CapturedState) -> dict[str, Any]:
    """The document with all digests."""
    if captured.digests is not None:
        captured.digests.take(lambda name: True)
    return captured.whole_document()


def check_is_source(source: MemorySource) -> TensorSource:
    return source


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.device == other.device
    assert bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
