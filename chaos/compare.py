"""Whether two checkpoints are equal bit by bit, read with stock safetensors and none of lastgood's own code."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.errors import CheckpointDamaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`different` names tensors that differ in any bit, in dtype or shape, or that only one side has."""

    tensors: int
    bytes: int
    different: tuple[str, ...]

    @property
    def bitwise_equal(self) -> bool:
        """Whether there was something to compare and all of it is equal."""
        return self.tensors > 0 and not self.different


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compare all tensors of two checkpoint directories of equal world size: weights, optimizer state, RNG, the lot.

    Raises CheckpointDamaged, which names the file, for one that safetensors does not take.
    """
    left, right = _tensors(first), _tensors(second)
    different = sorted(left.keys() ^ right.keys())
    different += sorted(key for key in left.keys() & right.keys() if not _same_bits(left[key], right[key]))
    return Comparison(
        tensors=len(left),
        bytes=sum(tensor.nbytes for tensor in left.values()),
        different=tuple(f"{file}: {name}" for file, name in different),
    )


def _tensors(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    tensors = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(shard, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    tensors[shard.name, name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{shard} cannot be read: {error}") from None
    return tensors


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Compared as bytes: NaNs with equal bits are equal, and 0.0 and -0.0 are not.
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
