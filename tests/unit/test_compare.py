"""The comparison sees every single bit, and is never satisfied with nothing."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chaos.compare import compare_checkpoints

SHARD = "rank-00000-of-00001.safetensors"


def checkpoint(directory: Path, tensors: dict[str, torch.Tensor], file: str = SHARD) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / file)
    return directory


def weights() -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.arange(6.0).reshape(2, 3),
        "model.half": torch.ones(3, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(7),
        "rank.00000.nan": torch.tensor([math.nan, 1.0]),
        "empty": torch.empty(0, 4),
    }


def test_equal_checkpoints_are_equal_even_where_they_hold_nan(tmp_path: Path) -> None:
    found = compare_checkpoints(checkpoint(tmp_path / "a", weights()), checkpoint(tmp_path / "b", weights()))
    assert found.bitwise_equal
    assert (found.tensors, found.bytes) == (5, 6 * 4 + 3 * 2 + 8 + 2 * 4)


@pytest.mark.parametrize("name", ["model.w", "model.half", "optimizer.step", "rank.00000.nan"])
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    changed = weights()
    changed[name].view(-1).view(torch.uint8)[-1] ^= 1
    found = compare_checkpoints(checkpoint(tmp_path / "a", weights()), checkpoint(tmp_path / "b", changed))
    assert found.different == (f"{SHARD}: {name}",)


def test_minus_zero_differs_from_zero(tmp_path: Path) -> None:
    plus, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(plus, minus)
    found = compare_checkpoints(checkpoint(tmp_path / "a", {"w": plus}), checkpoint(tmp_path / "b", {"w": minus}))
    assert not found.bitwise_equal


def test_equal_bytes_of_another_dtype_or_shape_differ(tmp_path: Path) -> None:
    first = {"dtype": torch.zeros(2, dtype=torch.int32), "shape": torch.zeros(2, 3)}
    second = {"dtype": torch.zeros(2, dtype=torch.float32), "shape": torch.zeros(3, 2)}
    found = compare_checkpoints(checkpoint(tmp_path / "a", first), checkpoint(tmp_path / "b", second))
    assert found.different == (f"{SHARD}: dtype", f"{SHARD}: shape")


def test_a_tensor_or_shard_that_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    more = weights() | {"extra": torch.ones(1)}
    first = checkpoint(tmp_path / "a", weights())
    assert compare_checkpoints(first, checkpoint(tmp_path / "b", more)).different == (f"{SHARD}: extra",)
    checkpoint(first, {"late": torch.ones(1)}, "rank-00001-of-00002.safetensors")
    found = compare_checkpoints(first, checkpoint(tmp_path / "c", weights()))
    assert found.different == ("rank-00001-of-00002.safetensors: late",)


def test_two_empty_checkpoints_are_not_called_equal(tmp_path: Path) -> None:
    assert not compare_checkpoints(tmp_path, tmp_path).bitwise_equal
