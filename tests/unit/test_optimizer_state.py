"""Optimizer state goes by parameter name, and comes back in its own dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_source import MemoryCheckpoint, assert_same_bits
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from workers.checkpoint.tensors import CapturedState
from workers.errors import CallerError, StateNotStorable
from workers.state.model import ModelPart
from workers.state.optimizer import OptimizerPart
from workers.state.pieces import Restorer, assign


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    return model.to(dtype)


def part_of(model: nn.Module, optimizer: Optimizer, name: str = "optimizer") -> OptimizerPart:
    return OptimizerPart(name, optimizer, 0, [ModelPart("model", model, 0)])


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        inputs = torch.randn(5, 3, generator=generator).to(dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()


def saved(part: OptimizerPart) -> MemoryCheckpoint:
    pieces, document = part.capture()
    return MemoryCheckpoint([CapturedState(tensors=assign(pieces, 0), document=document)])


def restore(part: OptimizerPart, checkpoint: MemoryCheckpoint) -> None:
    source = checkpoint.source()
    restorer = Restorer(source)
    part.check(source.document(), restorer)
    part.apply(source.document(), restorer)


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for key in sorted(value, key=str) for found in [key, *flat(value[key])]]
    if isinstance(value, list | tuple):
        return [type(value), *(found for item in value for found in flat(item))]
    return [value]


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    mine, theirs = flat(one.state_dict()), flat(other.state_dict())
    assert len(mine) == len(theirs)
    for left, right in zip(mine, theirs, strict=True):
        if isinstance(left, torch.Tensor):
            assert_same_bits(left, right)
        else:
            assert left == right
            assert type(left) is type(right)


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda parameters: SGD(parameters, lr=0.1),
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    lambda parameters: AdamW(parameters, lr=1e-2, amsgrad=True),
    lambda parameters: Adam(parameters, lr=torch.tensor(1e-2), foreach=False),
    lambda parameters: NAdam(parameters),
    lambda parameters: RMSprop(parameters, momentum=0.5, centered=True),
    lambda parameters: Adagrad(parameters),
    lambda parameters: Adafactor(parameters),
    lambda parameters: LBFGS(parameters, max_iter=3, history_size=4),
]


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        # torch's LBFGS does not run in bfloat16.
        *((build, dtype) for build in OPTIMIZERS for dtype in (torch.float32, torch.float64)),
        *((build, torch.bfloat16) for build in OPTIMIZERS[:-1]),
    ],
)
def test_training_goes_on_bit_for_bit_after_a_restore(build: Callable[[Any], Optimizer], dtype: torch.dtype) -> None:
    model = build_model(dtype)
    optimizer = build(model.parameters())
    train(model, optimizer, 3, seed=1)
    checkpoint = saved(part_of(model, optimizer))

    other = build_model(dtype)
    other.load_state_dict(model.state_dict())
    fresh = build(other.parameters())
    restore(part_of(other, fresh), checkpoint)
    assert_same_state(fresh, optimizer)

    train(model, optimizer, 2, seed=2)
    train(other, fresh, 2, seed=2)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
    assert_same_state(fresh, optimizer)


def test_state_in_another_dtype_than_its_parameter_is_not_cast() -> None:
    model = build_model(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameter = model[0].weight
    optimizer.state[parameter] = {
        "master": parameter.detach().float() / 3,
        "count": torch.tensor(2**40 + 1),
        "flag": True,
        "history": [(1, torch.ones(2, dtype=torch.float64))],
    }
    checkpoint = saved(part_of(model, optimizer))
    fresh = SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore(part_of(model, fresh), checkpoint)
    back = fresh.state[parameter]
    assert back["master"].dtype == torch.float32
    assert_same_bits(back["master"], optimizer.state[parameter]["master"])
    assert_same_bits(back["count"], torch.tensor(2**40 + 1))
    assert back["flag"] is True
    assert back["history"][0][0] == 1
    assert back["history"][0][1].dtype == torch.float64


def test_names_are_those_of_the_parameters() -> None:
    model = build_model()
    optimizer = AdamW(model.parameters())
    part = part_of(model, optimizer)
    assert part.capture()[0] == [], "state that appears at the first step was saved before it"
    assert part.unborn_bytes() == 2 * 4 * (12 + 8 + 2)
    train(model, optimizer, 1, seed=1)
    pieces, document = part.capture()
    names = {each.named.name for each in pieces}
    trained = ("0.weight", "1.weight", "1.bias")
    assert names == {f"optimizer.state.{name}.{key}" for name in trained for key in ("exp_avg", "exp_avg_sq", "step")}
    assert document["rest"]["groups"][0]["params"] == [
        *("model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"),
    ]
    assert part.unborn_bytes() == 0
    assert part.capture()[0] is pieces


def test_state_that_an_optimizer_replaces_is_looked_up_again() -> None:
    model = build_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1, seed=1)
    part = part_of(model, optimizer)
    part.capture()
    optimizer.state[model[0].weight]["exp_avg"] = torch.full((4, 3), 7.0)
    found = {each.named.name: each.named.tensor for each in part.capture()[0]}
    assert_same_bits(found["optimizer.state.0.weight.exp_avg"], torch.full((4, 3), 7.0))


def test_state_of_a_later_step_is_gone_after_restoring_an_earlier_one() -> None:
    model = build_model()
    optimizer = AdamW(model.parameters())
    part = part_of(model, optimizer)
    checkpoint = saved(part)
    train(model, optimizer, 1, seed=1)
    restore(part, checkpoint)
    assert dict(optimizer.state) == {}


def groups_of(model: nn.Module, order: list[int]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight, model[1].weight], "lr": 0.1, "weight_decay": 0.01},
        {"params": [model[0].bias, model[1].bias], "lr": 0.2, "betas": (0.5, 0.6)},
    ]
    return [groups[index] for index in order]


def test_groups_in_another_order_than_at_save_time_get_their_own_options_and_state() -> None:
    model = build_model()
    optimizer = AdamW(groups_of(model, [0, 1]))
    train(model, optimizer, 2, seed=1)
    optimizer.param_groups[1]["lr"] = 0.05
    checkpoint = saved(part_of(model, optimizer))
    swapped = AdamW(groups_of(model, [1, 0]), lr=9.0)
    swapped.param_groups[0]["params"].reverse()
    restore(part_of(model, swapped), checkpoint)
    assert [group["lr"] for group in swapped.param_groups] == [0.05, 0.1]
    assert swapped.param_groups[0]["betas"] == (0.5, 0.6)
    for parameter in model.parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert_same_bits(swapped.state[parameter][key], value)


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_groups_than_at_save_time_is_an_error_that_names_the_group(number: int) -> None:
    model = build_model()
    checkpoint = saved(part_of(model, AdamW(groups_of(model, [0, 1]))))
    if number == 1:
        other = AdamW(model.parameters())
    else:
        other = AdamW([*groups_of(model, [0]), {"params": [model[0].bias]}, {"params": [model[1].bias]}])
    with pytest.raises(CallerError) as caught:
        restore(part_of(model, other), checkpoint)
    index = 0 if number == 1 else 1
    assert f"group {index} (model.0.bias" in str(caught.value)


def test_a_saved_group_that_is_no_longer_there_is_named() -> None:
    model = build_model()
    checkpoint = saved(part_of(model, AdamW(groups_of(model, [0, 1]))))
    with pytest.raises(CallerError, match=r"saved group 1 \(model\.0\.bias, model\.1\.bias\)"):
        restore(part_of(model, AdamW(groups_of(model, [0]))), checkpoint)


def test_a_parameter_of_no_tracked_model_is_refused_with_its_place() -> None:
    model = build_model()
    stray = nn.Parameter(torch.zeros(3, 7))
    with pytest.raises(CallerError, match=r"parameter 1 of group 0, of shape \(3, 7\)"):
        part_of(model, SGD([model[0].weight, stray], lr=0.1))


def test_options_that_cannot_be_stored_are_refused_with_their_key() -> None:
    model = build_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = print
    with pytest.raises(StateNotStorable, match=r"^optimizer\.groups\.0\.options\.rule: "):
        part_of(model, optimizer)


class Averaging(SGD):
    """Saves more than torch's own two entries."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.rounds = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict["rounds"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_what_an_optimizer_saves_beside_state_and_groups_comes_back() -> None:
    model = build_model(torch.bfloat16)
    optimizer = Averaging(model.parameters())
    optimizer.rounds += 3
    optimizer.state[model[0].weight]["master"] = torch.rand(4, 3)
    optimizer.state["shared"] = {"count": 4}  # type: ignore[index]
    checkpoint = saved(part_of(model, optimizer))
    fresh = Averaging(model.parameters())
    restore(part_of(model, fresh), checkpoint)
    assert_same_bits(fresh.rounds, optimizer.rounds)
    assert_same_bits(fresh.state[model[0].weight]["master"], optimizer.state[model[0].weight]["master"])
    assert fresh.state["shared"] == {"count": 4}  # type: ignore[index]


def test_a_learning_rate_in_a_tensor_keeps_its_memory() -> None:
    model = build_model()
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.5))
    checkpoint = saved(part_of(model, optimizer))
    rate = torch.tensor(0.1)
    fresh = Adam(model.parameters(), lr=rate)
    live = fresh.param_groups[0]["lr"]
    restore(part_of(model, fresh), checkpoint)
    assert fresh.param_groups[0]["lr"] is live
    assert_same_bits(live, torch.tensor(0.5))


def test_large_state_comes_back_and_trains_on_as_before() -> None:
    models = [nn.Sequential(nn.Linear(3, 1 << 18), nn.Linear(1 << 18, 1)) for _ in range(2)]
    optimizers = [AdamW(model.parameters()) for model in models]
    train(models[0], optimizers[0], steps=2, seed=1)
    checkpoint = saved(part_of(models[0], optimizers[0]))
    models[1].load_state_dict(models[0].state_dict())
    restore(part_of(models[1], optimizers[1]), checkpoint)
    assert_same_state(*optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, steps=2, seed=2)
    assert_same_state(*optimizers)
    assert flat(models[0].state_dict())[1].equal(flat(models[1].state_dict())[1])
