"""A restored run continues bit for bit, and what would make it diverge is refused or named."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from memory_source import MemoryCheckpoint, MemorySource, assert_same_bits, check_is_source
from torch import nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from workers.data.loader import ShardedLoader
from workers.errors import CallerError, CheckpointDamaged, ResumeMismatch, StateNotStorable
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState

IDENTITY = Identity({"world_size": 1})
PROGRESS = Progress(step=4, epoch=1, samples=32, tokens=7, training_seconds=1.5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would only wait for each other over tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Noisy(nn.Module):
    """Draws from every CPU generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(inputs)), 0.3)
        return self.second(hidden) * (1 + random.random()) + float(np.random.rand())


class Run:
    """A small training run in which every part of the state changes the weights."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Noisy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        # It starts where gradients overflow, so the first steps are left out.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        self.data = ShardedLoader(list(range(20)), global_batch_size=4, seed=1, rank=0, world_size=1)
        self.state = TrainingState(0, 1)

    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "data")}

    def track(self, **changes: Any) -> "Run":
        self.state.track(**{**self.parts(), **changes})
        return self

    def train(self, steps: int) -> None:
        if steps == 0:
            return
        for done, batch in enumerate(self.data, start=1):
            loss = (self.model(batch[:, None].float()) - batch[:, None]).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if done == steps:
                return

    def save(self) -> MemorySource:
        return MemoryCheckpoint([self.state.capture(PROGRESS, IDENTITY)]).source()

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.weights(), other.weights(), strict=True))


STEPS = 6
pytestmark = pytest.mark.filterwarnings(
    # The scaler leaves out the first steps on purpose.
    "ignore:Detected call of `lr_scheduler.step",
    "ignore:'set_vital' is deprecated",
)


@pytest.fixture
def saved() -> Iterator[MemorySource]:
    run = Run().track()
    run.train(STEPS)
    source = run.save()
    yield source


@pytest.fixture(scope="module")
def uninterrupted() -> Run:
    run = Run()
    run.train(2 * STEPS)
    return run


def test_a_restored_run_continues_bit_for_bit(saved: MemorySource, uninterrupted: Run) -> None:
    run = Run(seed=9).track()
    run.state.apply(check_is_source(saved))
    run.state.check_certificate(saved.document()["certificate"])
    assert Progress.from_document(saved.document()["progress"]) == PROGRESS
    run.train(STEPS)
    for mine, theirs in zip(run.weights(), uninterrupted.weights(), strict=True):
        assert_same_bits(mine, theirs)


def test_saving_changes_nothing_and_two_restores_in_a_row_are_exact(saved: MemorySource, uninterrupted: Run) -> None:
    run = Run(seed=9).track()
    run.state.apply(saved)
    again = run.save()
    run.train(3)
    run.save()
    other = Run(seed=8).track()
    other.state.apply(again)
    other.state.apply(again)
    other.train(STEPS)
    assert same(other, uninterrupted)
    assert again.document()["parts"] == saved.document()["parts"]


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "scaler", "data"])
def test_without_one_part_the_run_would_diverge_and_it_is_named(
    part: str, saved: MemorySource, uninterrupted: Run
) -> None:
    changes: dict[str, Any] = {part: None}
    if part == "model":
        # An optimizer alone cannot be tracked: it goes by the names of the model's parameters.
        changes = {"model": None, "optimizer": None}
    lacking = Run().track(**changes)
    lacking.train(STEPS)
    run = Run(seed=9).track(**changes)
    run.state.apply(lacking.save())
    run.train(STEPS)
    assert not same(run, uninterrupted)

    run = Run(seed=9).track(**changes)
    before = run.weights()
    with pytest.raises(CallerError, match=rf"the checkpoint holds {part}, but it is not tracked"):
        run.state.apply(saved)
    assert all(torch.equal(was, now) for was, now in zip(before, run.weights(), strict=True))
    with pytest.raises(CallerError, match=rf"{part} is tracked, but the checkpoint does not hold it"):
        Run().track().state.apply(lacking.save())
    if part != "scaler":
        with pytest.raises(CallerError, match=rf"pass {part}=\.\.\., or {part}=None if there is none"):
            Run().state.track(**{key: value for key, value in Run().parts().items() if key not in changes})


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_without_one_generator_the_run_would_diverge_and_it_is_named(
    generator: str, saved: MemorySource, uninterrupted: Run
) -> None:
    run = Run(seed=9).track()
    run.state.apply(saved)
    {"python": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}[generator](9)  # type: ignore[operator]
    with pytest.raises(ResumeMismatch, match=rf"rng\.{generator} was"):
        run.state.check_certificate(saved.document()["certificate"])
    run.train(STEPS)
    assert not same(run, uninterrupted)


SCHEDULERS: list[Any] = [
    lambda own: lr_scheduler.MultiStepLR(own, [2, 3, 3]),
    lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 3),
    lambda own: lr_scheduler.OneCycleLR(own, 0.5, total_steps=20),
    lambda own: lr_scheduler.CyclicLR(own, 0.1, 0.5, step_size_up=2, cycle_momentum=False),
    lambda own: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(own, 2), lr_scheduler.ExponentialLR(own, 0.9)]),
    lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(own, 9)], [3]
    ),
    lambda own: lr_scheduler.MultiplicativeLR(own, lambda step: 0.9),
]


@pytest.mark.parametrize("build", SCHEDULERS)
def test_the_rates_of_every_scheduler_continue_where_they_were(build: Any) -> None:
    def made() -> tuple[TrainingState, torch.optim.Optimizer, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        scheduler, state = build(optimizer), TrainingState(0, 1)
        state.track(model=model, optimizer=optimizer, scheduler=scheduler, data=None)
        return state, optimizer, scheduler

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(5):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return found

    state, optimizer, scheduler = made()
    rates(optimizer, scheduler)
    source = MemoryCheckpoint([state.capture(PROGRESS, IDENTITY)]).source()
    expected = rates(optimizer, scheduler)
    state, optimizer, scheduler = made()
    state.apply(source)
    assert rates(optimizer, scheduler) == expected


def endless(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_a_loader_of_torchdata_continues_and_draws_nothing_that_the_uninterrupted_run_did_not(
    workers: int, steps: int
) -> None:
    class Stateful(Run):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.loader: Any = StatefulDataLoader(list(range(20)), batch_size=4, shuffle=True, num_workers=workers)
            self.data = endless(self.loader)  # type: ignore[assignment]

        def parts(self) -> dict[str, Any]:
            return {**super().parts(), "data": self.loader}

    run = Stateful().track()
    run.train(steps)
    source = run.save()
    run.train(4)
    other = Stateful(seed=9).track()
    other.state.apply(source)
    other.state.check_certificate(source.document()["certificate"])
    other.train(4)
    assert same(run, other)


class Average:
    """Weights averaged by hand, as many loops do."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.clone() for name, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "decay": (0.9, {1: float("inf")}), "half": torch.ones(2, dtype=torch.bfloat16)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]
        self.rest = state


def test_extras_modules_and_lists_of_optimizers_are_stored_under_their_keywords() -> None:
    def made() -> tuple[Run, dict[str, Any]]:
        run = Run()
        teacher = nn.Linear(2, 2)
        optimizers = [run.optimizer, torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9)]
        extras = {"teacher": teacher, "average": Average(run.model), "optimizer": optimizers}
        return run, {**extras, "noise": random.Random(3)}

    run, extras = made()
    run.track(**extras)
    run.train(1)
    extras["teacher"](torch.ones(2)).sum().backward()
    extras["optimizer"][1].step()
    captured = run.state.capture(PROGRESS, IDENTITY)
    names = {named.name for named in captured.tensors}
    assert "rank.00000.average.values.first.weight" in names
    assert "teacher.weight" in names
    assert "optimizer.1.state.teacher.weight.momentum_buffer" in names
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "teacher", "rank"}
    other, others = made()
    other.track(**others)
    other.state.apply(MemoryCheckpoint([captured]).source())
    assert others["average"].rest["decay"] == (0.9, {1: float("inf")})
    assert_same_bits(others["average"].rest["half"], torch.ones(2, dtype=torch.bfloat16))
    assert_same_bits(others["teacher"].weight.detach(), extras["teacher"].weight.detach())
    assert others["noise"].random() == extras["noise"].random()


def test_restored_tensors_share_no_memory_with_the_source(saved: MemorySource) -> None:
    run = Run().track(average=Average(Run().model))
    source = run.save()
    other = Run()
    average = Average(other.model)
    other.track(average=average)
    other.state.apply(source)
    average.values["first.weight"].fill_(77)
    again = torch.empty(6, 1)
    source.fill([("rank.00000.average.values.first.weight", (0, 0), again)])
    assert not (again == 77).any()


class Unstorable:
    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"callback": print}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"extra": Unstorable()}, StateNotStorable, r"^extra\.deep\.0\.callback: "),
        ({"extra": 5}, CallerError, r"^extra: an object of type int has no state_dict"),
        ({"data": [1, 2]}, CallerError, r"^data\.0: the loader of type int"),
        ({"data": torch.utils.data.DataLoader([1])}, CallerError, r"^data: the loader of type DataLoader is iterable"),
        ({"optimizer": []}, CallerError, r"optimizer=\.\.\.\): it is empty"),
        ({"rng": random.Random()}, CallerError, r"the name rng is taken"),
    ],
)
def test_what_cannot_be_tracked_is_refused_when_it_is_tracked(changes: Any, error: Any, told: str) -> None:
    run = Run()
    with pytest.raises(error, match=told):
        run.track(**changes)
    with pytest.raises(CallerError, match="nothing to save"):
        run.state.capture(PROGRESS, IDENTITY)
    run.track()


def test_tracking_a_name_twice_is_refused() -> None:
    run = Run().track()
    with pytest.raises(CallerError, match="model is tracked already"):
        run.state.track(model=Noisy())
    run.state.track(late=random.Random())


def test_the_state_of_another_rank_or_world_is_refused(saved: MemorySource) -> None:
    other_rank, other_world = TrainingState(1, 1), TrainingState(0, 2)
    for state, told in ((other_rank, "rank 1 was given the state of rank 0"), (other_world, "these are 2; use as")):
        state.track(**Run().parts())
        with pytest.raises((ResumeMismatch, CallerError), match=told):
            state.apply(saved)


def test_a_part_of_another_kind_is_refused(saved: MemorySource) -> None:
    run = Run().track(scaler=nn.Linear(1, 1))
    with pytest.raises(CallerError, match="scaler is tracked as model, but was saved as object"):
        run.state.apply(saved)


def test_a_missing_tensor_of_any_part_is_noticed_before_anything_changes(saved: MemorySource) -> None:
    for name in list(saved.names()):
        removed = saved._checkpoint.parts.pop(name)
        run = Run(seed=9).track()
        before = run.weights()
        with pytest.raises(CheckpointDamaged) as caught:
            run.state.apply(saved)
        assert name in str(caught.value)
        assert all(torch.equal(was, now) for was, now in zip(before, run.weights(), strict=True))
        saved._checkpoint.parts[name] = removed


def test_the_estimate_before_the_first_step_covers_the_image_after_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(0, 1)
    state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    estimate = state.bytes_estimate()
    model(torch.ones(512)).sum().backward()
    optimizer.step()
    held = sum(named.tensor.nbytes for named in state.capture(PROGRESS, IDENTITY).tensors)
    assert held < estimate < held + 2 * 2**20


def test_what_was_tracked_is_freed_as_soon_as_it_is_dropped() -> None:
    # In a reference cycle it would stay until a collection: GPU memory, and loader workers that then end too late.
    gc.disable()
    try:
        run = Run().track()
        run.save()
        model, data = weakref.ref(run.model), weakref.ref(run.data)
        run.state.apply(run.save())
        run.scheduler = run.scaler = None  # type: ignore[assignment]
        state = weakref.ref(run.state)
        del run
        assert state() is None
        assert model() is None
        assert data() is None
    finally:
        gc.enable()
