"""A snapshot is of one point in time, though most of it is copied while the loop goes on.

In each test the copy thread is stopped in the middle of its work until the loop waits for it, which is as late as it
can be; the loop changes everything as early as it may. Then all bytes are compared with those of the boundary.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import Rig
from memory_source import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from workers import failpoint
from workers.checkpoint.header import parse_header
from workers.checkpoint.slots import Slot, SlotState
from workers.overlap import Copy
from workers.session import Session, run_as_current
from workers.state.identity import Identity

BATCH = 4


class Held:
    """The copy thread stands still at its first steady tensor, until the loop waits for it."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._faults = rig.run_dir / "faults"
        self._number = 0
        self.waits = 0
        stands = Copy.loop_stands

        def loop_stands(copy: Copy) -> None:
            stands(copy)
            self.waits += 1
            failpoint.release(f"hold-{self._number}", self._faults)

        monkeypatch.setattr(Copy, "loop_stands", loop_stands)

    def next_copy(self, session: Session) -> None:
        captured = session._state.capture(progress=session.progress, identity=Identity({}))
        late = captured.steady.keys() - session._saver._snapshots._copier._unsteady
        early = sum(named.name not in late for named in captured.tensors if named.tensor.numel())
        self._number += 1
        hold = failpoint.Arm(
            id=f"hold-{self._number}", point="snapshot.copy", action="pause", when={"index_min": early}
        )
        failpoint.arm((hold,), self._faults)


@pytest.fixture
def held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    yield Held(rig, monkeypatch)
    rig.settle()
    failpoint.arm((), rig.run_dir)


def at_boundary(session: Session) -> dict[str, bytes]:
    captured = session._state.capture(progress=session.progress, identity=Identity({}))
    return {named.name: bits(named.tensor) for named in captured.tensors}


def content(slot: Slot) -> dict[str, bytes]:
    parsed = parse_header(slot.image[: slot.image_bytes])
    return {name: bytes(slot.image[record.start : record.stop]) for name, record in parsed.tensors.items()}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Net(nn.Module):
    """BatchNorm changes its statistics in forward, dropout draws from the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.norm(self.first(inputs)), 0.3))


class Training:
    """One kind of training. `early` is done as soon as the loop has its batch."""

    def __init__(self, session: Session, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model: nn.Module = Net()
        self.optimizers = [optimizer(self.model.parameters())]
        self.extra: dict[str, Any] = {}

    def track(self) -> None:
        data = self.session.data_loader(list(range(64)), global_batch_size=BATCH)
        optimizer: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.session.track(model=self.model, optimizer=optimizer, scheduler=None, data=data, **self.extra)
        self.session.restore()
        self.batches = iter(data)

    def early(self) -> None:
        pass

    def backward(self) -> None:
        self.model(torch.randn(BATCH, 3)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class WithAverage(Training):
    """An average of the weights, kept up to date through `.data`, as is common."""

    def track(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.extra = {"average": self.average}
        super().track()

    def early(self) -> None:
        for mine, theirs in zip(self.average.module.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data)


class Clipping(Training):
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        super().step()


class InBackward(Training):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""

    def __init__(self, session: Session, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(session, optimizer)
        self.optimizers = [optimizer([parameter]) for parameter in self.model.parameters()]
        for parameter, own in zip(self.model.parameters(), self.optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad())[1])  # type: ignore[misc]

    def step(self) -> None:
        pass


class Scaled(Training):
    """The first steps overflow and are skipped, so the optimizer's state appears while a copy is in flight."""

    def __init__(self, session: Session, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(session, optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        self.extra = {"scaler": self.scaler}

    def backward(self) -> None:
        self.scaler.scale(self.model(torch.randn(BATCH, 3)).square().mean()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.optimizers[0].zero_grad()


def plain(rig: Rig, **orders: Any) -> Training:
    session = rig.session(**{"save_every_steps": 1, **orders})
    training = Training(session, lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    training.track()
    return training


def finish_step(training: Training) -> None:
    training.early()
    training.backward()
    training.step()
    training.session.end_step()


def writing(rig: Rig) -> Slot:
    while rig.keeper.next_message() is not None:
        pass
    return next(slot for slot in rig.keeper.slots if slot.state is SlotState.WRITING)


def steps(training: Training, held: Held, rig: Rig, count: int) -> None:
    """Steps whose snapshots are held in the middle until the loop waits for them, each compared with its boundary."""
    if training.session.step == 0:
        next(training.batches)
        finish_step(training)
    for step in range(training.session.step, training.session.step + count):
        expected = at_boundary(training.session)
        held.next_copy(training.session)
        waits = held.waits
        next(training.batches)
        assert writing(rig).step == step
        assert held.waits == waits, "the loop waited for the copy before it had to"
        finish_step(training)  # a step that a scaler leaves out waits only at its end
        assert held.waits > waits
        assert rig.keeper.snapshot_steps() == [step]
        assert differing(content(rig.keeper.slot_of(step)), expected) == []
        rig.keeper.release_all()


KINDS: dict[str, tuple[type[Training], Callable[[Any], torch.optim.Optimizer]]] = {
    "batchnorm, foreach": (Training, lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "fused": (Training, lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
    "one by one": (Training, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)),
    "average": (WithAverage, lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
    "clipping": (Clipping, lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
    "in backward": (InBackward, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "scaled, state appears": (Scaled, lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_all_bytes_are_those_of_the_boundary_however_the_state_is_changed(kind: str, rig: Rig, held: Held) -> None:
    made, optimizer = KINDS[kind]
    training = made(rig.session(save_every_steps=1), optimizer)
    training.track()
    steps(training, held, rig, 5)


class Sharded(Training):
    """Sharded over one rank: parameters are DTensors, and others take their place during forward and backward."""

    def __init__(self, session: Session, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(session, optimizer)
        mesh = init_device_mesh("cpu", (1,))
        for layer in (self.model.first, self.model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizers = [optimizer(self.model.parameters())]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
@pytest.mark.usefixtures("one_rank")
def test_shards_are_those_of_the_boundary_while_the_whole_parameters_are_gathered(
    options: dict[str, Any], rig: Rig, held: Held
) -> None:
    training = Sharded(rig.session(save_every_steps=1), lambda found: torch.optim.AdamW(found, lr=0.1, **options))
    training.track()
    steps(training, held, rig, 4)


def test_a_change_that_no_step_made_discards_the_snapshot_and_the_tensor_is_copied_at_the_boundary_from_then_on(
    rig: Rig, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    training = plain(rig)
    steps(training, held, rig, 1)
    other = {name: value + 1 for name, value in training.model.state_dict().items()}
    held.next_copy(training.session)
    next(training.batches)
    training.model.load_state_dict(other)
    finish_step(training)
    (skipped,) = rig.keeper.messages("skipped")
    assert (skipped["step"], skipped["durable"]) == (2, True)
    assert "model.first.weight" in skipped["reason"]
    assert "model.first.weight" in caplog.text
    assert {slot.state for slot in rig.keeper.slots} == {SlotState.FREE}
    expected = at_boundary(training.session)
    held.next_copy(training.session)
    next(training.batches)
    training.model.load_state_dict(other)
    finish_step(training)
    assert rig.keeper.snapshot_steps() == [3]
    assert differing(content(rig.keeper.slot_of(3)), expected) == []


def test_optimizer_state_that_is_loaded_during_the_run_leaves_the_snapshot_as_it_was(rig: Rig, held: Held) -> None:
    training = plain(rig)
    steps(training, held, rig, 1)
    expected = at_boundary(training.session)
    held.next_copy(training.session)
    next(training.batches)
    loaded = training.optimizers[0].state_dict()
    for state in loaded["state"].values():
        state["exp_avg"] = state["exp_avg"] + 1
    training.optimizers[0].load_state_dict(loaded)
    finish_step(training)
    assert rig.keeper.snapshot_steps() == [2]
    assert differing(content(rig.keeper.slot_of(2)), expected) == []
    rig.keeper.release_all()
    steps(training, held, rig, 2)


def test_a_grown_layer_is_saved_as_it_is_from_the_next_boundary_on(rig: Rig, held: Held) -> None:
    training = plain(rig)
    steps(training, held, rig, 1)
    expected = at_boundary(training.session)
    held.next_copy(training.session)
    next(training.batches)
    grown = nn.Linear(6, 3000)
    training.model.second = grown
    training.optimizers[0].add_param_group({"params": grown.parameters()})
    del training.optimizers[0].param_groups[0]["params"][-2:]
    finish_step(training)
    assert rig.keeper.snapshot_steps() == [2]
    assert differing(content(rig.keeper.slot_of(2)), expected) == []
    rig.keeper.release_all()
    steps(training, held, rig, 2)


class Unannounced(torch.optim.SGD):
    """Steps without telling torch's hooks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])

    step.hooked = True  # type: ignore[attr-defined]


def test_nothing_is_copied_beside_the_steps_of_an_optimizer_that_torch_does_not_announce(rig: Rig) -> None:
    training = Training(rig.session(save_every_steps=1), lambda parameters: Unannounced(parameters, lr=0.1))
    del Unannounced.step.hooked  # type: ignore[attr-defined]
    training.track()
    next(training.batches)
    finish_step(training)
    expected = at_boundary(training.session)
    next(training.batches)
    while rig.keeper.next_message() is not None:
        pass
    assert rig.keeper.slot_of(1)
    finish_step(training)
    assert differing(content(rig.keeper.slot_of(1)), expected) == []


def test_a_save_that_is_waited_for_is_copied_at_once(rig: Rig) -> None:
    training = plain(rig, save_every_steps=None)
    next(training.batches)
    finish_step(training)
    with rig.answering([True]):
        assert training.session.save_now(wait=True)
    assert training.session._saver._snapshots._copier._thread is None


def test_what_fails_in_the_copy_thread_is_raised_in_the_loop_and_leaves_the_slot_free(rig: Rig) -> None:
    training = plain(rig)
    next(training.batches)
    finish_step(training)
    fault = failpoint.Arm(id="bad", point="snapshot.copy", action="raise", when={"index_fraction": 0.5})
    failpoint.arm((fault,), rig.run_dir / "faults")
    next(training.batches)
    training.backward()
    training.step()
    with pytest.raises(failpoint.InjectedError):
        training.session.end_step()
    failpoint.arm((), rig.run_dir)
    while rig.keeper.next_message() is not None:
        pass
    assert {slot.state for slot in rig.keeper.slots} == {SlotState.FREE}


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_what_fails_at_the_boundary_is_raised_there_and_leaves_the_slot_free(
    optimizer: bool, fraction: float, rig: Rig
) -> None:
    session = rig.session(save_every_steps=None)
    model = Net()
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    session.track(model=model, optimizer=adam, scheduler=None, data=None)
    session.restore()
    session.end_step()
    fault = failpoint.Arm(id="bad", point="snapshot.copy", action="raise", when={"index_fraction": fraction})
    failpoint.arm((fault,), rig.run_dir / "faults")
    with pytest.raises(failpoint.InjectedError):
        session.save_now(wait=True)
    failpoint.arm((), rig.run_dir)
    while rig.keeper.next_message() is not None:
        pass
    assert {slot.state for slot in rig.keeper.slots} == {SlotState.FREE}
    with rig.answering([True]):
        assert session.save_now(wait=True)


def test_the_copy_gives_no_sign_of_life_for_the_loop_and_the_loop_gives_one_only_while_the_copy_advances(
    rig: Rig, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = plain(rig)
    next(training.batches)
    finish_step(training)
    session = training.session
    held.next_copy(session)
    next(training.batches)
    copier = session._saver._snapshots._copier
    copy = copier._copy
    assert copy is not None
    moves = session._page.read().moves

    class Stuck:
        """Nothing is done for two rounds, then something twice, then nothing, then all."""

        progress = iter([0, 0, 1, 1, 0])

        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            done = next(self.progress, None)
            copy.copied += done or 0
            return done is None

    copier._wait(copy, Stuck())  # type: ignore[arg-type]
    assert session._page.read().moves == moves + 2
    assert copy.finished.wait(20)
    assert session._page.read().moves == moves + 2


def test_a_copy_that_is_in_flight_when_the_loop_fails_is_finished(rig: Rig, held: Held) -> None:
    training = plain(rig)
    next(training.batches)
    finish_step(training)
    held.next_copy(training.session)
    next(training.batches)
    with pytest.raises(RuntimeError, match="the loop"), run_as_current(training.session):
        raise RuntimeError("the loop")
    assert rig.keeper.snapshot_steps() == [1]
    training.backward()
    training.step()  # nothing holds it back any more
