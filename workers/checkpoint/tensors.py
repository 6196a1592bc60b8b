"""What passes between the training state and the checkpoint format."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


DIGESTS_KEY = "replicas"


class Digests(Protocol):
    """What is said of tensors in the document, and found out by reading them while they are copied."""

    def take(self, wanted: Callable[[str], bool]) -> None:
        """Read the tensors whose names are wanted."""

    def tensors(self, wanted: Callable[[str], bool]) -> list[NamedTensor]:
        """What `take` reads."""

    def document(self) -> dict[str, Any]:
        """Equally long as JSON before and after `take`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """All that one rank saves: the tensors it writes and a document of JSON values that refers to them.

    `steady`: by name, tensors that nothing but a step of a tracked optimizer changes, as the training has them (what is
    stored is this rank's part); others may change as soon as training goes on. While the state keeps its tensors, this
    is the same object, and `tensors` holds the same ones.
    `digests` belongs into the document, under DIGESTS_KEY; None if nothing is compared between ranks.
    """

    tensors: list[NamedTensor]
    document: dict[str, Any]
    steady: Mapping[str, torch.Tensor] = field(default_factory=dict)
    digests: Digests | None = None

    def whole_document(self) -> dict[str, Any]:
        """The document with the digests as far as they are taken."""
        return self.document if self.digests is None else {**self.document, DIGESTS_KEY: self.digests.document()}


class TensorSource(Protocol):
    """Where a restore reads from: a committed checkpoint, or a snapshot that is still in memory."""

    def document(self) -> dict[str, Any]:
        """The document that this rank saved."""

    def names(self) -> Collection[str]:
        """Every tensor name in the checkpoint, over all ranks."""

    def fill(self, wanted: Iterable[tuple[str, Sequence[int], torch.Tensor]]) -> None:
        """Overwrite each tensor, of whatever device, with the saved elements from its offsets on, of the whole tensor
        of that name; all bytes are compared with the digests of what was saved.

        Raises KeyError if there is no such part, and CheckpointDamaged if its bytes are not the committed ones or of
        another type; some of the tensors may have changed then.
        """
