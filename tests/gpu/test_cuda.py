"""What only a machine with a GPU can show: CUDA state comes back bit for bit, and forked ranks can use the device."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))

from fakes import DEADLINE_SECONDS, Rig, make_orders
from memory_source import MemoryCheckpoint, bits

from workers.checkpoint import image
from workers.checkpoint.document import to_bytes
from workers.checkpoint.header import parse_header
from workers.checkpoint.slots import Slot
from workers.checkpoint.tensors import NamedTensor
from workers.errors import ResumeMismatch
from workers.forks import ZygoteClient
from workers.overlap import Copier
from workers.state.identity import Identity
from workers.state.pieces import Piece
from workers.state.replicas import Holdings
from workers.state.training import Progress, TrainingState
from workers.streams import CudaStream, stream_for

pytestmark = pytest.mark.gpu

PRELOAD_SECONDS = 120.0
PROGRESS = Progress(step=3, epoch=0, samples=12, tokens=0, training_seconds=1.0)


class Run:
    """Dropout draws from the device's generator; the scaler and the optimizer hold state there."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(0)
        layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 16), nn.BatchNorm1d(16))
        self.model = layers.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=2)
        self.state = TrainingState(0, 1)
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.state.track(**parts, scheduler=None, data=None)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(32, 16, device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (self.model(inputs) - inputs).square().mean()
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        captured = self.state.capture(PROGRESS, Identity({}))
        return {named.name: named.tensor.detach().clone() for named in captured.tensors}


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.device == other[name].device, name
        assert bits(tensor.cpu()) == bits(other[name].cpu()), name


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "run")
    rig.run_dir.mkdir()
    yield rig
    rig.close()


def test_a_restored_run_on_the_gpu_continues_bit_for_bit() -> None:
    run = Run()
    run.train(3)
    captured = run.state.capture(PROGRESS, Identity({}))
    source = MemoryCheckpoint([captured]).source()
    saved = {named.name: named.tensor.detach().clone() for named in captured.tensors}
    run.train(4)
    other = Run(seed=9)
    other.state.apply(source)
    other.state.check_certificate(source.document()["certificate"])
    assert_equal_bits(other.tensors(), saved)
    other.train(4)
    assert_equal_bits(other.tensors(), run.tensors())


def test_a_checkpoint_written_from_the_gpu_and_read_back_is_exact(rig: Rig) -> None:
    def start(seed: int, **orders: Any) -> Run:
        run = Run(seed)
        session = rig.session(cadence=3, **orders)
        parts = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
        session.track(**parts, scheduler=None, data=None)
        session.restore()
        run.session = session  # type: ignore[attr-defined]
        return run

    run = start(0)
    for _ in range(3):
        run.train(1)
        run.session.end_step()  # type: ignore[attr-defined]
    assert rig.keeper.snapshot_steps() == [3]
    order = rig.keeper.commit(rig.run_dir, 3)
    run.train(4)
    other = start(9, restore=order)
    other.train(4)
    assert_equal_bits(other.tensors(), run.tensors())


def test_another_state_of_the_gpu_generator_is_named_by_the_certificate() -> None:
    run = Run()
    run.train(1)
    source = MemoryCheckpoint([run.state.capture(PROGRESS, Identity({}))]).source()
    run.state.apply(source)
    torch.randn(1, device="cuda")
    with pytest.raises(ResumeMismatch, match=r"rng\.cuda\.0 was"):
        run.state.check_certificate(source.document()["certificate"])


def train_loop(config: dict[str, Any]) -> None:
    import torch

    import workers

    session = workers.get_session()
    value = torch.ones(64, 64, device=session.device).mm(torch.ones(64, 64, device=session.device)).sum()
    session.report({"device": session.device.type, "value": float(value)})


def test_a_rank_that_was_forked_from_the_zygote_can_use_the_gpu_and_so_can_the_next_one(tmp_path: Path) -> None:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    payload = cloudpickle.dumps((train_loop, {}))
    cloudpickle.unregister_pickle_by_value(module)
    inherited = os.open("/dev/null", os.O_RDONLY)
    zygote = ZygoteClient(preload=(), payload=payload, inherited_fd=inherited, directory=tmp_path)
    try:
        received = zygote.channel.receive(PRELOAD_SECONDS)
        assert received is not None
        assert received[0]["kind"] == "ready", received[0]
        for generation in (1, 2):
            rank = zygote.fork()
            forked = zygote.channel.receive(DEADLINE_SECONDS)
            assert forked is not None
            heard: dict[str, Any] = {}
            while "finished" not in heard:
                message = rank.channel.receive(PRELOAD_SECONDS)
                assert message is not None, heard
                heard[message[0]["kind"]] = message[0]
                assert "error" not in heard, heard["error"]["traceback"]
                if message[0]["kind"] == "ready":
                    rank.channel.send("start", orders=make_orders(tmp_path, generation=generation).to_json())
            assert heard["report"]["metrics"] == {"device": "cuda", "value": 64.0**3}
            exited = zygote.channel.receive(DEADLINE_SECONDS)
            assert exited is not None
            assert exited[0]["code"] == 0
            os.close(forked[1][0])
            rank.close()
    finally:
        zygote.close()
        os.close(inherited)


def test_a_replica_on_a_gpu_has_the_digests_of_the_same_bytes_on_the_cpu() -> None:
    values = torch.arange(6000).to(torch.bfloat16).reshape(60, 100)

    def digests(tensor: torch.Tensor) -> dict[str, Any]:
        named = NamedTensor(name="w", tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0, 0))
        found = Holdings([Piece(named, (0, 1))]).digests({}, turn=3, limit_bytes=2048)
        found.take(lambda name: True)
        return found.document()

    assert digests(values.cuda()) == digests(values)
    assert digests(values.cuda().t()) == digests(values.t())


def snapshot_while_training(run: Run, beside: bool) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What a snapshot holds whose copy was begun right before more steps, and what it should hold."""
    captured = run.state.capture(PROGRESS, Identity({}))
    expected = {named.name: bits(named.tensor.cpu()) for named in captured.tensors}
    layout = image.plan(captured.tensors, captured.document)
    slot = Slot.create(layout.image_bytes)
    copier = Copier(stream_for(torch.device("cuda")), lambda: None)
    saved: dict[str, bytes] = {}
    try:
        for step in range(3):
            captured = run.state.capture(PROGRESS, Identity({}))
            expected = {named.name: bits(named.tensor.cpu()) for named in captured.tensors}
            slot.begin(rank=0, generation=1, step=step)
            copier.begin(
                layout,
                captured,
                to_bytes(captured.document),
                slot,
                began_at=0.0,
                beside=beside,
                before_group=lambda copied, total: None,
                done=lambda copy: None,
            )
            run.train(2)
            copy = copier.settle()
            assert copy is not None
            assert copy.changed == []
            parsed = parse_header(slot.image[: slot.image_bytes])
            saved = {name: bytes(slot.image[one.start : one.stop]) for name, one in parsed.tensors.items()}
            assert sorted(name for name in expected if saved[name] != expected[name]) == []
            slot.release()
    finally:
        copier.close()
        copier.forget(slot)
        slot.close()
    return saved, expected


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_snapshot_copied_beside_the_next_steps_is_of_its_boundary(beside: bool, options: dict[str, Any]) -> None:
    run = Run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, **options)
    run.state = TrainingState(0, 1)
    run.state.track(model=run.model, optimizer=run.optimizer, scaler=run.scaler, scheduler=None, data=None)
    run.train(4)
    saved, expected = snapshot_while_training(run, beside)
    assert saved.keys() == expected.keys()


def test_a_large_snapshot_is_copied_while_the_device_goes_on_and_holds_the_optimizer_back() -> None:
    run = Run()
    run.model = nn.Linear(4096, 16384, bias=False).cuda()  # 256 MiB, and twice as much state
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.state = TrainingState(0, 1)
    run.state.track(model=run.model, optimizer=run.optimizer, scheduler=None, data=None)

    def train(steps: int) -> None:
        for _ in range(steps):
            run.model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    run.train = train  # type: ignore[method-assign]
    train(1)
    saved, expected = snapshot_while_training(run, True)
    assert saved.keys() == expected.keys()


def test_slots_are_page_locked_once_and_can_be_locked_again_after_they_were_let_go() -> None:
    stream = CudaStream(torch.device("cuda", 0))
    slot = Slot.create(1 << 20)
    memory = torch.frombuffer(slot.image, dtype=torch.uint8)
    try:
        for _ in range(2):
            stream.pin(slot)
            assert memory.is_pinned()
            stream.unpin(slot)
            assert not memory.is_pinned()
    finally:
        del memory
        slot.close()
