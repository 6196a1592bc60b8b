"""What passes between the training state and the checkpoint format."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """This rank's part of a tensor.

    `name` is unique over all shards of a checkpoint, except that the parts of one sharded tensor share it.
    `tensor` is the local part: detached, on any device, of any strides. It starts at `offsets` within the whole
    tensor, whose shape is `global_shape`.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """All that one rank saves: the tensors it writes and a document of JSON values that refers to them."""

    tensors: list[NamedTensor]
    document: dict[str, Any]


class TensorSource(Protocol):
    """Where a restore reads from: a committed checkpoint, or a snapshot that is still in memory."""

    def document(self) -> dict[str, Any]:
        """The document that this rank saved."""

    def names(self) -> Collection[str]:
        """Every tensor name in the checkpoint, over all ranks."""

    def fetch(self, name: str, *, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A CPU tensor with the bytes of that part, checked against the digest of what was saved. It may be a view of
        the source's memory: to be copied, not written to or kept.

        Raises KeyError if there is no such part and CheckpointDamaged if its bytes are not the committed ones.
        """
