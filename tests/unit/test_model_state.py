"""Models are saved by name and restored into the same tensors, bit for bit."""

import copy
import json
from typing import Any

import pytest
import torch
from memory_source import MemoryCheckpoint, assert_same_bits
from torch import nn

from workers.checkpoint.tensors import CapturedState
from workers.errors import CallerError, CheckpointDamaged, StateNotStorable
from workers.state.model import ModelPart
from workers.state.pieces import Piece, Restorer, assign, piece

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]


class Counting(nn.Module):
    """Keeps something that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = (0, float("inf"), torch.zeros(2))

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Odd(nn.Module):
    """Everything that models contain and that is easily lost."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.same_norm = self.norm
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.none = None
        self.register_parameter("no_bias", None)
        for dtype in DTYPES:
            # Any bits at all: nan payloads, numbers that fit no smaller dtype.
            anything = torch.randint(0, 2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8).view(dtype)
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", anything)
        self.register_buffer("odd_floats", torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45]))
        self.register_buffer("derived", torch.ones(2), persistent=False)
        self.counting = Counting()


def saved(part: ModelPart) -> MemoryCheckpoint:
    pieces, document = part.capture()
    return MemoryCheckpoint([CapturedState(tensors=assign(pieces, 0), document=document)])


def restored(part: ModelPart, checkpoint: MemoryCheckpoint) -> None:
    source = checkpoint.source()
    restorer = Restorer(source, [member.tensor for member in part.members()])
    part.check(source.document(), restorer)
    part.apply(source.document(), restorer)


def test_every_tensor_of_a_model_comes_back_bit_for_bit_into_the_same_memory() -> None:
    torch.manual_seed(1)
    model, other = Odd(), Odd()
    model.counting.calls = (7, float("-inf"), torch.randn(2))
    other.derived.fill_(3)
    addresses = {name: value.data_ptr() for name, value in other.state_dict(keep_vars=True).items() if name[-1] != "e"}
    restored(ModelPart("model", other, 0), saved(ModelPart("model", model, 0)))
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(other.state_dict()[name], value)
    assert other.counting.calls[:2] == (7, float("-inf"))
    assert_same_bits(other.counting.calls[2], model.counting.calls[2])
    assert other.head.weight is other.embedding.weight
    assert other.transposed.stride() == (1, 3)
    assert torch.equal(other.derived, torch.full((2,), 3.0)), "a buffer outside state_dict was touched"
    assert all(value.data_ptr() == addresses[name] for name, value in other.state_dict().items() if name in addresses)


def test_the_names_are_those_of_state_dict_and_tied_tensors_are_stored_once() -> None:
    model = Odd()
    pieces, document = ModelPart("model", model, 0).capture()
    expected = {f"model.{name}" for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert {*document["tensors"], *document["tied"]} == expected
    assert document["tied"]["model.head.weight"] == "model.embedding.weight"
    assert document["tied"]["model.same_norm.running_mean"] == "model.norm.running_mean"
    names = [each.named.name for each in pieces]
    assert len(names) == len(set(names))
    assert set(names) - {"rank.00000.model.counting._extra_state.2"} == set(document["tensors"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", ["compile", "checkpointing"])
def test_wrappers_do_not_show_in_the_names(wrap: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plain = set(ModelPart("model", model, 0).capture()[1]["tensors"])
    if wrap == "compile":
        wrapped: Any = torch.compile(model)
    else:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        wrapped = nn.Sequential(checkpoint_wrapper(model[0]))
    assert set(ModelPart("model", wrapped, 0).capture()[1]["tensors"]) == plain


def test_each_rank_keeps_plain_tensors_for_itself() -> None:
    model = nn.BatchNorm1d(2)
    own = [named.name for named in assign(ModelPart("model", model, 3).capture()[0], 3)]
    assert "rank.00003.model.running_mean" in own
    assert "rank.00003.model.weight" in own


def test_the_plan_is_reused_while_tensors_stay_and_sees_new_values() -> None:
    model = nn.Linear(2, 2)
    part = ModelPart("model", model, 0)
    pieces, document = part.capture()
    with torch.no_grad():
        model.weight.fill_(5)
    again, same_document = part.capture()
    assert again is pieces
    assert same_document is document
    assert_same_bits(again[0].named.tensor, torch.full((2, 2), 5.0))


@pytest.mark.parametrize("change", ["parameter replaced", "memory replaced", "parameter added", "buffer replaced"])
def test_the_plan_is_made_anew_when_a_tensor_changes_identity(change: str) -> None:
    model = nn.BatchNorm1d(3)
    part = ModelPart("model", model, 0)
    part.capture()
    match change:
        case "parameter replaced":
            model.weight = nn.Parameter(torch.full((3,), 9.0))
        case "memory replaced":
            model.weight.data = torch.full((3,), 9.0)
        case "parameter added":
            model.later = nn.Parameter(torch.full((3,), 9.0))
        case "buffer replaced":
            model.running_mean = torch.full((3,), 9.0)
    pieces, _ = part.capture()
    assert sum(bool((each.named.tensor == 9.0).all()) for each in pieces) == 1


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 4)), ["model.0.weight", "shape", "(4, 2)", "(3, 2)"]),
        (lambda: nn.Sequential(nn.Linear(2, 3)).double(), ["model.0.weight", "dtype", "float64", "float32"]),
        (lambda: nn.Sequential(nn.Linear(2, 3, bias=False)), ["model.0.bias", "in the checkpoint"]),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(1, 1)), ["model.1.weight", "in the model"]),
        (lambda: nn.Sequential(nn.Linear(2, 3), Counting()), ["model.1._extra_state", "in the model"]),
    ],
)
def test_a_model_that_is_not_the_saved_one_is_refused_before_anything_changes(build: Any, told: list[str]) -> None:
    checkpoint = saved(ModelPart("model", nn.Sequential(nn.Linear(2, 3)), 0))
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CallerError) as caught:
        restored(ModelPart("model", model, 0), checkpoint)
    assert all(word in str(caught.value) for word in told)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name[-1] != "e")


@pytest.mark.parametrize("tied_now", [True, False])
def test_a_changed_tie_is_refused_with_both_names(tied_now: bool) -> None:
    def build(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    checkpoint = saved(ModelPart("model", build(not tied_now), 0))
    with pytest.raises(CallerError, match=r"model\.1\.weight .* tied to model\.0\.weight"):
        restored(ModelPart("model", build(tied_now), 0), checkpoint)


def test_a_tensor_that_no_shard_holds_is_damage_and_not_silence() -> None:
    part = ModelPart("model", nn.Linear(2, 2), 0)
    checkpoint = saved(part)
    del checkpoint.parts["model.bias"]
    with pytest.raises(CheckpointDamaged, match=r"model\.bias"):
        restored(part, checkpoint)


def test_models_that_cannot_be_saved_are_refused_with_the_tensor() -> None:
    with pytest.raises(StateNotStorable, match=r"model\.weight: a tensor on the meta device"):
        ModelPart("model", nn.Linear(2, 2, device="meta"), 0)
    with pytest.raises(CallerError, match=r"model\.weight .*lazy"):
        ModelPart("model", nn.LazyLinear(2), 0)


def test_shared_parts_are_written_once_and_spread_by_bytes() -> None:
    ranks = (0, 1, 2)
    sizes = [7, 1, 5, 5, 3, 0, 9, 2]
    captures = []
    for rank in ranks:
        pieces: list[Piece] = []
        for index, size in enumerate(sizes):
            made = piece(f"w{index}", torch.zeros(size), rank=rank, replicas=ranks)
            assert made is not None
            pieces.append(made)
        captures.append(CapturedState(tensors=assign(pieces, rank), document={}))
    checkpoint = MemoryCheckpoint(captures)
    assert checkpoint.parts.keys() == {f"w{index}" for index in range(len(sizes))}
    loads = [sum(named.tensor.numel() for named in capture.tensors) for capture in captures]
    assert max(loads) - min(loads) <= max(sizes) / 2
    assert json.dumps(loads)
