"""What was planned for a state is used again only while it is exact: each change is noticed by the next capture.

The measure is a state that is tracked afresh: it must find the same tensors, in the same memory, and the same document.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_source import bits
from torch import nn

from workers.checkpoint.tensors import CapturedState
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState

IDENTITY = Identity({"world_size": 1})
PROGRESS = Progress(step=4, epoch=0, samples=0, tokens=0, training_seconds=0.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.square = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        groups = [{"params": [*self.model.embedding.parameters(), *self.model.square.parameters()]}]
        self.optimizer = torch.optim.AdamW([*groups, {"params": self.model.norm.parameters()}], lr=torch.tensor(0.1))
        self.step()
        self.state = self.tracked()
        self.state.capture(PROGRESS, IDENTITY)

    def tracked(self) -> TrainingState:
        state = TrainingState(0, 1)
        state.track(model=self.model, optimizer=self.optimizer, scheduler=None, data=None, average=self.average)
        return state

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def of_square(self) -> dict[str, Any]:
        return self.optimizer.state[self.model.square.weight]


def replace_parameter(run: Run) -> None:
    run.model.head.weight = nn.Parameter(torch.full((5, 4), 9.0))


def grow_embedding(run: Run) -> None:
    grown = nn.Embedding(50, 4)
    del run.optimizer.state[run.model.embedding.weight]
    run.optimizer.param_groups[0]["params"][0] = grown.weight
    run.model.embedding = grown


def other_memory(run: Run) -> None:
    run.model.square.weight.data = torch.full((4, 4), 9.0)


def other_strides(run: Run) -> None:
    run.model.square.weight.data = run.model.square.weight.data.t()


def other_dtype(run: Run) -> None:
    run.model.norm.running_var.data = run.model.norm.running_var.data.view(torch.int32)


def resized(run: Run) -> None:
    run.model.norm.running_var.resize_(3)


def add_module(run: Run) -> None:
    run.model.later = nn.Linear(2, 2)


def swap_modules(run: Run) -> None:
    model = run.model
    model.square, model.other = nn.Linear(4, 4), model.square


def add_buffer(run: Run) -> None:
    run.model.norm.register_buffer("more", torch.ones(2))


def make_buffer_transient(run: Run) -> None:
    run.model.norm._non_persistent_buffers_set.add("running_mean")


def rename_parameter(run: Run) -> None:
    run.model.head.weights = run.model.head._parameters.pop("weight")


def rename_last_parameter(run: Run) -> None:
    run.model.head.biases = run.model.head._parameters.pop("bias")


def tie(run: Run) -> None:
    run.model.head.weight = run.model.embedding.weight


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": run.model.head.parameters(), "lr": 0.5})


def move_between_groups(run: Run) -> None:
    first, second = (group["params"] for group in run.optimizer.param_groups)
    second.append(first.pop())


def state_appears(run: Run) -> None:
    add_group(run)
    run.step()


def state_goes(run: Run) -> None:
    del run.optimizer.state[run.model.square.weight]


def state_replaced(run: Run) -> None:
    run.of_square["exp_avg"] = torch.full((4, 4), 7.0)


def state_moves_to_another_parameter(run: Run) -> None:
    run.optimizer.state[run.model.square.bias]["extra"] = run.of_square.pop("exp_avg_sq")


def state_moves_to_the_neighbour(run: Run) -> None:
    """All in all there are the same keys and values, in the same order."""
    del run.of_square["step"]
    run.state.capture(PROGRESS, IDENTITY)
    run.of_square["step"] = run.optimizer.state[run.model.square.bias].pop("step")


def state_gets_a_number(run: Run) -> None:
    run.of_square["rounds"] = 1000


def state_gets_a_list(run: Run) -> None:
    run.of_square["history"] = [torch.ones(2)]


def load_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def load_model(run: Run) -> None:
    run.model.load_state_dict({name: torch.zeros_like(value) for name, value in run.model.state_dict().items()})


def assign_average(run: Run) -> None:
    run.average.load_state_dict({name: value + 1 for name, value in run.average.state_dict().items()}, assign=True)


def change_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.7)


def replace_average(run: Run) -> None:
    run.average.module.head = nn.Linear(4, 5)


CHANGES: list[Callable[[Run], None]] = [
    *(replace_parameter, grow_embedding, other_memory, other_strides, other_dtype, resized, add_module, swap_modules),
    *(
        add_buffer,
        make_buffer_transient,
        rename_parameter,
        rename_last_parameter,
        tie,
        add_group,
        move_between_groups,
        state_appears,
    ),
    *(
        state_goes,
        state_replaced,
        state_moves_to_another_parameter,
        state_moves_to_the_neighbour,
        state_gets_a_number,
        state_gets_a_list,
    ),
    *(load_optimizer, load_model, assign_average, change_rate, replace_average),
]


def assert_alike(one: CapturedState, other: CapturedState) -> None:
    ours, theirs = ({named.name: named for named in each.tensors} for each in (one, other))
    assert ours.keys() == theirs.keys()
    for name, named in ours.items():
        assert bits(named.tensor) == bits(theirs[name].tensor), name
        assert (named.tensor.dtype, named.global_shape) == (theirs[name].tensor.dtype, theirs[name].global_shape), name
    assert one.document == other.document
    assert one.steady.keys() == other.steady.keys()
    assert all(one.steady[name] is other.steady[name] for name in one.steady)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_changed_since_the_last_capture_is_found_by_the_next(change: Callable[[Run], None]) -> None:
    run = Run()
    change(run)
    found = run.state.capture(PROGRESS, IDENTITY)
    assert_alike(found, run.tracked().capture(PROGRESS, IDENTITY))
    # Also what changes after that.
    for parameter in run.model.parameters():
        parameter.data.fill_(3)
    assert_alike(run.state.capture(PROGRESS, IDENTITY), run.tracked().capture(PROGRESS, IDENTITY))


def test_a_list_in_the_optimizers_state_is_looked_into_each_time() -> None:
    run = Run()
    state_gets_a_list(run)
    run.state.capture(PROGRESS, IDENTITY)
    run.of_square["history"][0] = torch.zeros(3)
    run.of_square["history"].append(5)
    assert_alike(run.state.capture(PROGRESS, IDENTITY), run.tracked().capture(PROGRESS, IDENTITY))


def test_while_nothing_but_values_changes_the_plan_is_the_same_and_sees_them() -> None:
    run = Run()
    before = run.state.capture(PROGRESS, IDENTITY)
    run.step()
    after = run.state.capture(PROGRESS, IDENTITY)
    assert_alike(after, run.tracked().capture(PROGRESS, IDENTITY))
    assert after.steady is before.steady
    assert after.document["parts"]["model"]["tensors"] is before.document["parts"]["model"]["tensors"]
    fresh = {now.name for was, now in zip(before.tensors, after.tensors, strict=True) if was is not now}
    assert {name.split(".")[2] for name in fresh} == {"rng"}


def test_only_what_an_optimizers_step_changes_is_steady() -> None:
    run = Run()
    captured = run.state.capture(PROGRESS, IDENTITY)
    trained = {f"{layer}.{kind}" for layer in ("square", "norm") for kind in ("weight", "bias")} | {"embedding.weight"}
    state = {f"optimizer.state.{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq")}
    assert captured.steady.keys() == {f"model.{name}" for name in trained} | state


def test_a_parameter_is_not_steady_if_another_optimizer_steps_unannounced() -> None:
    run = Run()
    quiet = torch.optim.SGD(run.model.square.parameters(), lr=0.1)
    del quiet._optimizer_step_pre_hooks
    run.state.track(quiet=quiet)
    steady = run.state.capture(PROGRESS, IDENTITY).steady
    assert "model.norm.weight" in steady
    assert not {"model.square.weight", "model.square.bias"} & steady.keys()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_any_tensors_of_a_model_saves_the_rest(rank: int) -> None:
    state = TrainingState(rank, 4)
    state.track(model=nn.Identity(), optimizer=None, scheduler=None, data=None)
    captured = state.capture(PROGRESS, IDENTITY, turn=0)
    assert captured.steady == {}
    assert {named.name.split(".")[2] for named in captured.tensors} == {"rng"}
    assert state.capture(PROGRESS, IDENTITY, turn=1).whole_document()["replicas"] == {"sets": []}
