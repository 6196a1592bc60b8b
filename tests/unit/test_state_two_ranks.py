"""Training state of two real ranks: sharded, replicated and per-rank tensors are written once and come back exactly.

Both ranks are started once and run every scenario; a test then looks at the outcome of its own.
"""

import os
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory_source import MemoryCheckpoint, assert_same_bits, whole_document
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from orchestrator.decide.replicas import differences
from workers.errors import CallerError, ResumeMismatch
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState

IDENTITY = Identity({"world_size": 2})
PROGRESS = Progress(step=1, epoch=0, samples=0, tokens=0, training_seconds=0.0)


def save(state: TrainingState) -> MemoryCheckpoint:
    """What both ranks write; fails if they write a part twice."""
    captures: list[Any] = [None, None]
    # What the training has cannot travel.
    dist.all_gather_object(captures, replace(state.capture(PROGRESS, IDENTITY), steady={}))
    return MemoryCheckpoint(captures)


def restore(state: TrainingState, checkpoint: MemoryCheckpoint) -> None:
    source = checkpoint.source(dist.get_rank())
    state.apply(source)
    state.check_certificate(source.document()["certificate"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Tied(nn.Module):
    """Of 5 rows and 1: over two ranks the shards are uneven, and one is empty. Embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.bend = nn.Linear(3, 1)
        self.widen = nn.Linear(1, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += float(dist.get_rank() + 1)
        hidden = nn.functional.dropout(self.inner(self.embedding(tokens)), 0.5)
        return self.head(hidden + self.widen(self.bend(hidden)))


class Sharded:
    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = Tied().to(dtype)
        fully_shard(self.model.inner)
        fully_shard(self.model)
        self.average: dict[str, Any] = {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainingState(dist.get_rank(), 2)
        self.state.track(model=self.model, optimizer=self.optimizer, scheduler=None, data=None, average=self)
        torch.manual_seed(100 * seed + dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randint(0, 5, (4,))).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.average = {name: parameter.detach() / 3 for name, parameter in self.model.named_parameters()}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: local(value) for name, value in self.model.state_dict().items()}
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state[parameter].items():
                found[f"{index}.{key}"] = local(value)
        return found | {f"average.{name}": local(value) for name, value in self.average.items()}


def sharded_model_continues(dtype: torch.dtype = torch.float32) -> None:
    run = Sharded(1, dtype)
    run.train(2)
    checkpoint = save(run.state)
    run.train(2)
    other = Sharded(2, dtype)
    restore(other.state, checkpoint)
    other.train(2)
    mine, theirs = run.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_same_bits(theirs[name], value)
    again = save(other.state)
    restore(other.state, checkpoint)
    restore(other.state, again)
    assert all(torch.equal(value, theirs[name]) for name, value in other.tensors().items())


def sharded_model_continues_in_bfloat16() -> None:
    sharded_model_continues(torch.bfloat16)


def sharded_tensors_are_covered_by_their_parts() -> None:
    run = Sharded(1)
    run.train(1)
    checkpoint = save(run.state)
    names = {name for name in checkpoint.parts if not name.startswith("rank.")}
    assert "model.head.weight" not in names, "a tied tensor was stored under both names"
    rows = {at: tuple(part.shape) for at, part in checkpoint.parts["model.embedding.weight"].items()}
    assert rows == {(0, 0): (3, 3), (3, 0): (2, 3)}
    assert {at: tuple(part.shape) for at, part in checkpoint.parts["model.bend.weight"].items()} == {(0, 0): (1, 3)}
    assert len(checkpoint.parts["optimizer.state.embedding.weight.exp_avg"]) == 2
    assert len(checkpoint.parts["average.embedding.weight"]) == 2
    assert {"model.seen", "rank.00001.model.seen"} <= checkpoint.parts.keys()
    step = "optimizer.state.embedding.weight.step"
    assert {step, f"rank.00001.{step}"} <= checkpoint.parts.keys()
    whole = torch.cat([part for _, part in sorted(checkpoint.parts["model.embedding.weight"].items())])
    full = run.model.embedding.weight
    assert isinstance(full, DTensor)
    assert_same_bits(whole, full.full_tensor().detach())


def a_forward_that_leaves_parameters_gathered_does_not_confuse_a_save() -> None:
    run = Sharded(1)
    run.train(1)
    before = save(run.state)
    with torch.no_grad():
        run.model(torch.randint(0, 5, (4,)))
    assert not isinstance(run.model._modules["bend"].weight, DTensor), "the scenario does not happen"  # type: ignore[union-attr]
    after = save(run.state)
    for name, parts in before.parts.items():
        if name.startswith(("model.", "optimizer.")) and name != "model.seen":
            for at, part in parts.items():
                assert_same_bits(after.parts[name][at], part)
    run.train(1)


def replicated_parameters_are_written_once_and_buffers_by_each() -> None:
    def made(seed: int) -> tuple[Any, torch.optim.Optimizer, TrainingState]:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        inner[2].weight = nn.Parameter(inner[0].weight.detach().t().clone())
        model = DistributedDataParallel(inner, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TrainingState(dist.get_rank(), 2)
        state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
        torch.manual_seed(seed + dist.get_rank())
        return model, optimizer, state

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model(torch.randn(6, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, state = made(1)
    train(model, optimizer)
    checkpoint = save(state)
    shared = {f"model.{name}" for name, _ in model.module.named_parameters()}
    shared |= {f"optimizer.state.{name}.momentum_buffer" for name, _ in model.module.named_parameters()}
    buffers = {f"model.{name}" for name, _ in model.module.named_buffers()}
    named = {name for name in checkpoint.parts if ".rng." not in name}
    assert named == shared | buffers | {f"rank.00001.{name}" for name in buffers}
    one, two = (checkpoint.parts[f"{prefix}model.1.running_mean"][(0,)] for prefix in ("", "rank.00001."))
    assert not torch.equal(one, two), "the scenario does not happen"

    shares: list[Any] = [None, None]
    written = [each for each in state.capture(PROGRESS, IDENTITY).tensors if each.name in shared]
    dist.all_gather_object(shares, sum(each.tensor.nbytes for each in written))
    assert abs(shares[0] - shares[1]) <= 48, f"one rank writes much more than the other: {shares}"

    train(model, optimizer)
    other, fresh, restored = made(7)
    restore(restored, checkpoint)
    train(other, fresh)
    for name, value in model.state_dict().items():
        assert_same_bits(other.state_dict()[name], value)


def parameters_that_ddp_ignores_belong_to_their_rank() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    model = DistributedDataParallel(inner)
    with torch.no_grad():
        inner[0].weight.fill_(dist.get_rank())
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=None, scheduler=None, data=None)
    checkpoint = save(state)
    assert "rank.00001.model.1.weight" not in checkpoint.parts
    with torch.no_grad():
        inner[0].weight.fill_(9)
    restore(state, checkpoint)
    assert bool((inner[0].weight == dist.get_rank()).all())


def plain_models_that_differ_between_ranks_stay_different() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=None, scheduler=None, data=None)
    checkpoint = save(state)
    with torch.no_grad():
        model.weight.fill_(9)
    restore(state, checkpoint)
    assert bool((model.weight == dist.get_rank()).all())


def tensors_of_every_placement_come_back() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(5)
    whole = {
        "replicated": (torch.randn(3, 4), [Replicate()]),
        "second dimension": (torch.randn(3, 5), [Shard(1)]),
        "empty": (torch.randn(0, 4), [Shard(0)]),
        "complex": (torch.randn(5, 2, dtype=torch.complex64), [Shard(0)]),
        "float16": (torch.randn(5).half(), [Shard(0)]),
        "odd": (torch.tensor([float("nan"), float("inf"), -0.0]).double(), [Shard(0)]),
    }

    class Holder(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            for name, (value, placements) in whole.items():
                self.register_parameter(name, nn.Parameter(distribute_tensor(value * scale, mesh, placements)))

    model = Holder(1)
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=None, scheduler=None, data=None)
    checkpoint = save(state)
    assert [len(checkpoint.parts[f"model.{name}"]) for name in ("replicated", "second dimension", "empty")] == [1, 2, 1]
    assert state.mesh() == [{"names": ["dp"], "ranks": [0, 1]}]
    other = Holder(0.5)
    fresh = TrainingState(dist.get_rank(), 2)
    fresh.track(model=other, optimizer=None, scheduler=None, data=None)
    restore(fresh, checkpoint)
    for name, parameter in model.named_parameters():
        assert_same_bits(local(dict(other.named_parameters())[name]), local(parameter))


def each_rank_draws_its_own_numbers_after_a_restore() -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(2).tolist()]

    rank = dist.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(50 + rank)
    state = TrainingState(rank, 2)
    state.track(model=None, optimizer=None, scheduler=None, data=None, dice=random.Random(rank))
    checkpoint = save(state)
    drawn: list[Any] = [None, None]
    dist.all_gather_object(drawn, draw())
    restore(state, checkpoint)
    again: list[Any] = [None, None]
    dist.all_gather_object(again, draw())
    assert again == drawn
    assert all(one != other for one, other in zip(*again, strict=True))
    try:
        state.apply(checkpoint.source(0))
    except ResumeMismatch:
        assert rank == 1
    else:
        assert rank == 0


def an_optimizer_made_before_sharding_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    try:
        TrainingState(dist.get_rank(), 2).track(model=model, optimizer=optimizer, scheduler=None, data=None)
    except CallerError as error:
        assert "create the optimizer after fully_shard" in str(error)
    else:
        raise AssertionError("it was accepted")


def differing(state: TrainingState, turn: int = 0) -> set[str]:
    """What the two ranks do not hold alike, as the coordinator sees it."""
    said: list[Any] = [None, None]
    dist.all_gather_object(said, whole_document(state.capture(PROGRESS, IDENTITY, turn=turn))["replicas"])
    return {found.what for found in differences(dict(enumerate(said)))}


def flip_a_bit_on_rank_1(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        local(tensor).view(torch.int32).view(-1)[-1] ^= 1


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    both: list[Any] = [None, None]
    dist.all_gather_object(both, tensor)
    return both


def a_flipped_bit_on_one_of_ddps_ranks_shows_wherever_it_is() -> None:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(6, 3)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(*gathered(inner[1].running_mean)), "the buffers are equal, so they prove nothing"
    assert differing(state) == set()
    weight = inner[0].weight
    for what, tensor in (
        ("model.0.weight", weight),
        ("model.1.bias", inner[1].bias),
        ("optimizer.state.0.weight.exp_avg_sq", optimizer.state[weight]["exp_avg_sq"]),
        ("optimizer.state.0.weight.step", optimizer.state[weight]["step"]),
    ):
        flip_a_bit_on_rank_1(tensor)
        assert differing(state) == {what}
        flip_a_bit_on_rank_1(tensor)
        assert differing(state) == set()
    optimizer.param_groups[0]["lr"] += dist.get_rank()
    assert differing(state) == {"lr.optimizer"}
    assert "replicas" not in whole_document(state.capture(PROGRESS, IDENTITY))


def a_flipped_bit_in_a_shard_that_is_replicated_shows() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    assert differing(state) == set()
    flip_a_bit_on_rank_1(model.weight)
    assert differing(state) == {"model.weight"}
    flip_a_bit_on_rank_1(model.weight)
    flip_a_bit_on_rank_1(optimizer.state[model.bias]["exp_avg"])
    assert differing(state) == {"optimizer.state.bias.exp_avg"}


def what_nothing_guarantees_to_be_equal_raises_no_alarm() -> None:
    sharded = Sharded(1)
    sharded.train(1)
    assert differing(sharded.state) == set()
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1 + dist.get_rank())
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=plain, optimizer=optimizer, scheduler=None, data=None)
    with torch.no_grad():
        plain.weight.fill_(dist.get_rank())
    assert differing(state) == set()


SCENARIOS: list[Callable[[], None]] = [
    sharded_model_continues,
    sharded_model_continues_in_bfloat16,
    sharded_tensors_are_covered_by_their_parts,
    a_forward_that_leaves_parameters_gathered_does_not_confuse_a_save,
    replicated_parameters_are_written_once_and_buffers_by_each,
    parameters_that_ddp_ignores_belong_to_their_rank,
    plain_models_that_differ_between_ranks_stay_different,
    tensors_of_every_placement_come_back,
    each_rank_draws_its_own_numbers_after_a_restore,
    an_optimizer_made_before_sharding_is_refused,
    a_flipped_bit_on_one_of_ddps_ranks_shows_wherever_it_is,
    a_flipped_bit_in_a_shard_that_is_replicated_shows,
    what_nothing_guarantees_to_be_equal_raises_no_alarm,
]


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    for scenario in SCENARIOS:
        outcome = ""
        try:
            scenario()
        except Exception:
            outcome = traceback.format_exc()
        Path(directory, f"{scenario.__name__}.{rank}").write_text(outcome)
        # A rank that failed alone would leave its peer inside a collective of the next scenario.
        failed: list[Any] = [None, None]
        dist.all_gather_object(failed, bool(outcome))
    # As real ranks end: torch, with DDP on gloo, now and then aborts while the interpreter shuts down.
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(run_rank, args=(str(directory),), nprocs=2)
    return directory


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_with_two_ranks(scenario: str, outcomes: Path) -> None:
    told = [Path(outcomes, f"{scenario}.{rank}").read_text() for rank in range(2)]
    assert told == ["", ""], "\n".join(told)
