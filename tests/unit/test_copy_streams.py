"""The order of copies on a device, where all that is asked for happens later, on a device that a test runs by hand.

What two streams do is independent unless one waits for an event of the other; each test runs both ways round.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fakes import DEADLINE_SECONDS
from torch import nn

from workers.checkpoint import image
from workers.checkpoint.document import to_bytes
from workers.checkpoint.header import parse_header
from workers.checkpoint.slots import Slot, SlotState
from workers.overlap import Copier, Copy
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState
from workers.streams import HostStream

PROGRESS = Progress(step=1, epoch=0, samples=0, tokens=0, training_seconds=0.0)


@dataclass
class Device:
    """Two streams of work. `run` does what can be done, of the first stream as long as there is any."""

    streams: dict[str, deque[Any]] = field(default_factory=lambda: {"training": deque(), "side": deque()})

    def launch(self, stream: str, work: Callable[[], None]) -> None:
        self.streams[stream].append(work)

    def record(self, stream: str) -> threading.Event:
        event = threading.Event()
        self.streams[stream].append(event.set)
        return event

    def wait(self, stream: str, event: threading.Event) -> None:
        self.streams[stream].append(event)

    def run(self, first: str) -> None:
        order = [first, *(name for name in self.streams if name != first)]
        while any(self.streams.values()):
            ready = next(self.streams[name] for name in order if self.streams[name] and _ready(self.streams[name][0]))
            work = ready.popleft()
            if not isinstance(work, threading.Event):
                work()


def _ready(work: Any) -> bool:
    return not isinstance(work, threading.Event) or work.is_set()


class DeviceStream:
    """A CopyStream of the device's side stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pinned: list[Slot] = []
        self.unpinned: list[Slot] = []

    def pin(self, slot: Slot) -> None:
        self.pinned.append(slot)

    def unpin(self, slot: Slot) -> None:
        self.unpinned.append(slot)

    def follow(self) -> None:
        self.device.wait("side", self.device.record("training"))

    def active(self) -> Any:
        return nullcontext()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.device.launch("side", lambda: HostStream().copy(targets, sources))

    def mark(self) -> "DeviceMark":
        return DeviceMark(self.device, self.device.record("side"))


class DeviceMark:
    def __init__(self, device: Device, event: threading.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        assert self._event.wait(DEADLINE_SECONDS)

    def hold(self) -> None:
        self._device.wait("training", self._event)


class DeviceOptimizer(torch.optim.Optimizer):
    """Its steps happen on the device; a tensor's version goes up when they are asked for."""

    def __init__(self, parameters: Any, device: Device) -> None:
        super().__init__(parameters, {})
        self._device = device

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.autograd.graph.increment_version(parameter)
                self._device.launch("training", lambda parameter=parameter: parameter.data.add_(1))  # type: ignore[misc]


class Rig:
    def __init__(self) -> None:
        self.device = Device()
        self.stream = DeviceStream(self.device)
        self.model = nn.BatchNorm1d(4)
        self.optimizer = DeviceOptimizer(self.model.parameters(), self.device)
        self.state = TrainingState(0, 1)
        self.state.track(model=self.model, optimizer=self.optimizer, scheduler=None, data=None)
        self.alive = 0
        self.copier = Copier(self.stream, self.lives)
        self.done: list[Copy] = []
        captured = self.state.capture(PROGRESS, Identity({}))
        self.layout = image.plan(captured.tensors, captured.document)
        self.slots = [Slot.create(self.layout.image_bytes) for _ in range(2)]

    def lives(self) -> None:
        self.alive += 1

    def compute(self, value: float) -> None:
        """A step's worth of work on the device, which changes buffers as it goes."""
        for buffer in (self.model.running_mean, self.model.running_var):
            self.device.launch("training", lambda buffer=buffer: buffer.add_(value))  # type: ignore[misc]

    def begin(self, slot: Slot, *, beside: bool = True) -> None:
        captured = self.state.capture(PROGRESS, Identity({}))
        slot.begin(rank=0, generation=1, step=1)
        self.copier.begin(
            self.layout,
            captured,
            to_bytes(captured.document),
            slot,
            began_at=0.0,
            beside=beside,
            before_group=lambda copied, total: None,
            done=self.done.append,
        )

    def asked_for(self) -> None:
        copy = self.copier._copy
        assert copy is not None
        assert copy.asked_for.wait(DEADLINE_SECONDS)

    def saved(self, slot: Slot, name: str) -> list[float]:
        record = parse_header(slot.image[: slot.image_bytes]).tensors[name]
        return torch.frombuffer(bytearray(slot.image[record.start : record.stop]), dtype=torch.float32).tolist()

    def close(self) -> None:
        self.copier.close()
        for slot in self.slots:
            self.copier.forget(slot)
            slot.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.mark.parametrize("first", ["training", "side"])
def test_copies_come_after_the_work_of_the_boundary_and_before_what_the_next_step_changes(rig: Rig, first: str) -> None:
    slot = rig.slots[0]
    rig.compute(1.0)
    rig.optimizer.step()  # of the step that is saved: parameters are 2 and 1 at its boundary
    rig.begin(slot)
    rig.compute(10.0)
    rig.asked_for()
    rig.optimizer.step()
    rig.device.run(first)
    copy = rig.copier.settle()
    assert copy is not None
    assert copy.changed == []
    assert slot.state is SlotState.COMPLETE
    assert rig.saved(slot, "model.weight") == [2.0] * 4
    assert rig.saved(slot, "model.bias") == [1.0] * 4
    assert rig.saved(slot, "model.running_mean") == [1.0] * 4
    assert rig.saved(slot, "model.running_var") == [2.0] * 4
    assert rig.model.weight.tolist() == [3.0] * 4


def test_a_slot_is_complete_only_when_the_device_has_copied_all(rig: Rig) -> None:
    slot = rig.slots[0]
    rig.begin(slot)
    rig.asked_for()
    rig.optimizer.step()  # goes on: only the device waits
    copy = rig.copier._copy
    assert copy is not None
    assert not copy.finished.is_set()
    assert (slot.state, rig.done) == (SlotState.WRITING, [])
    rig.device.run("side")
    assert rig.copier.settle() is copy
    assert (slot.state, rig.done) == (SlotState.COMPLETE, [copy])


def test_a_change_that_is_asked_for_before_the_copy_has_happened_discards_the_snapshot(rig: Rig) -> None:
    slot = rig.slots[0]
    rig.begin(slot)
    rig.asked_for()
    with torch.no_grad():
        rig.model.weight.mul_(5)  # no step of an optimizer
    rig.device.run("training")
    copy = rig.copier.settle()
    assert copy is not None
    assert copy.changed == ["model.weight"]
    assert slot.state is SlotState.FREE


def test_a_slot_is_pinned_once_and_unpinned_before_it_is_closed(rig: Rig) -> None:
    def settle() -> None:
        rig.device.run("side")
        rig.copier.settle()

    for slot in (*rig.slots, *rig.slots):
        rig.begin(slot)
        rig.asked_for()
        settle()
        slot.release()
    assert rig.stream.pinned == rig.slots
    assert rig.stream.unpinned == []
    rig.copier.forget(rig.slots[0])
    assert rig.stream.unpinned == rig.slots[:1]
    rig.copier.forget(rig.slots[0])
    assert rig.stream.unpinned == rig.slots[:1]
