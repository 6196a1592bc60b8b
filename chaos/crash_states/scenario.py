"""A run of several saves, carried out by the code that carries them out in production, and recorded.

What is real: the run directory's preparation, the choice of what to restore and the generation's file, the keepers'
writing and reading back of shards, the commit machine, the manifest, the ledger, retention. What is not there: Ray,
processes, training. Keepers and retention run in threads that take turns at each storage operation; a kill of all of
them at once, after a number of operations, is followed by a second driver that takes over.
"""

import itertools
import mmap
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from obstore.store import MemoryStore as Client

from chaos.crash_states.driver import Driver, ObjectDriver
from chaos.crash_states.ops import Op
from chaos.crash_states.record import Log
from chaos.crash_states.requests import Event, RequestLog
from chaos.crash_states.turns import Killed, Turns
from orchestrator.observe.ledger import LEDGER_THREAD
from workers.checkpoint import header, image
from workers.checkpoint.tensors import CapturedState, NamedTensor

OpT = TypeVar("OpT", Op, Event)
Order = Literal["drawn", "one by one", "in step"]
_STEPS_APART = 10
TINY_BYTES = 1024
"""Of tensors, up to which a shard is two pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens. saves: of the first driver, and of the one that takes over. keep_last: retention's. order: how the
    ranks' operations interleave. beside: retention runs beside the next save. back: the second driver passes over the
    newest checkpoint. killed_after: storage operations after which the first driver and its keepers are killed; None
    for after its last save.
    """

    seed: int
    ranks: int
    saves: tuple[int, int] = (3, 0)
    shard_bytes: int = 64
    keep_last: int = 2
    order: Order = "drawn"
    beside: bool = False
    back: bool = False
    killed_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Recording(Generic[OpT]):
    """`expected`: what may be under each final name, by path: the last one once it was created. `images`: of each
    checkpoint, each rank's shard. `calls`: after how many operations the first driver could have been killed."""

    plan: Plan
    ops: tuple[OpT, ...]
    calls: int = 0
    expected: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    images: dict[str, tuple[bytes, ...]] = field(default_factory=dict)


class OpLog(Protocol):
    """What was done to storage so far, with marks in between."""

    ops: list[Any]

    def mark(self, kind: str, **facts: Any) -> None:
        """Something that is no operation happened."""


class Course:
    """What a recorded run shares between its drivers: the storage, the log, the turns, the clock, the states."""

    def __init__(self, plan: Plan, storage: Any, log: OpLog, *, killable: bool = True) -> None:
        self.plan = plan
        self.storage = storage
        self.log = log
        self.turns = Turns(_picker(plan))
        self.calls = 0
        self.expected: dict[str, tuple[bytes, ...]] = {}
        self.images: dict[str, tuple[bytes, ...]] = {}
        self._left = plan.killed_after if killable else None
        self._ticks = itertools.count(1764000000)

    def expect(self, path: str, content: bytes) -> None:
        """A file is about to get this name."""
        self.expected[path] = (*(known for known in self.expected.get(path, ()) if known != content), content)

    def clock(self) -> float:
        """Counts, so that equal runs have equal records."""
        return float(next(self._ticks))

    def before(self) -> bool:
        """Called before each operation of a process. False for the ledger's thread when the process is gone: its
        caller waits for it, and is killed before it does anything more."""
        self.turns.wait()
        self.calls += 1
        if self._left is None:
            return True
        self._left -= 1
        if self._left >= 0:
            return True
        if threading.current_thread().name != LEDGER_THREAD:
            raise Killed
        return False

    def mark(self, kind: str, **facts: Any) -> None:
        """Something that is no operation happened; to nobody, if the process is gone."""
        if self._left is None or self._left >= 0:
            self.log.mark(kind, **facts)

    def revive(self) -> None:
        """Whoever comes now is not killed."""
        self._left = None

    def image(self, rank: int, step: int, generation: int) -> tuple[mmap.mmap, int]:
        """A rank's snapshot, in memory of whole pages, and its length."""
        state = state_of(self.plan, rank, step, generation)
        layout = image.plan(state.tensors, state.document)
        memory = mmap.mmap(-1, layout.image_bytes + mmap.PAGESIZE)
        size = layout.write(memoryview(memory), state.tensors, state.document)
        return memory, (_pack(memory, size) if self.plan.shard_bytes <= TINY_BYTES else size)


def state_of(plan: Plan, rank: int, step: int, generation: int) -> CapturedState:
    """A sharded tensor, one that all ranks have alike and rank 0 writes, and one of the rank's own."""
    generator = torch.Generator().manual_seed(plan.seed * 1009 + generation * 101 + step)
    rows = max(1, plan.shard_bytes // 16)
    weight = torch.randn(rows * plan.ranks, 4, generator=generator)
    tensors = [
        NamedTensor(
            name="model.weight",
            tensor=weight[rank * rows : (rank + 1) * rows],
            global_shape=tuple(weight.shape),
            offsets=(rank * rows, 0),
        ),
        _whole(f"rank.{rank:05d}.rng", torch.full((8,), (step + rank) % 251, dtype=torch.uint8)),
    ]
    if rank == 0:
        tensors.append(_whole("optimizer.state.weight.step", torch.tensor(float(step))))
    return CapturedState(tensors=tensors, document={"rank": rank, "progress": {"step": step}})


def record(plan: Plan, kind: type[Driver] = Driver, *, scratch: Path | None = None) -> Recording[Op]:
    """Carry out a plan in a directory of its own, below `scratch`. `kind`: with another protocol than the real one."""
    with tempfile.TemporaryDirectory(prefix="lastgood-crash-states-", dir=scratch) as folder:
        return _carry_out(Course(plan, Path(folder), Log()), kind)


def record_requests(plan: Plan, kind: type[Driver] = ObjectDriver) -> Recording[Event]:
    """Carry out a plan in a bucket of its own, in memory."""
    return _carry_out(Course(plan, Client(), RequestLog()), kind)


def _carry_out(course: Course, kind: type[Driver]) -> Recording[Any]:
    plan = course.plan
    try:
        first = kind(course)
        first.begin("start")
        _save(course, first, plan.saves[0])
    except Killed:
        pass
    calls = course.calls
    course.revive()
    second = kind(course)
    second.begin("failure", back=plan.back)
    _save(course, second, plan.saves[1])
    return Recording(plan=plan, ops=tuple(course.log.ops), calls=calls, expected=course.expected, images=course.images)


def _pack(memory: mmap.mmap, size: int) -> int:
    """Take out the room that headers have to grow: so a tiny shard is two pages. Returns the new length."""
    start = header.header_bytes(memoryview(memory)[:8])
    content = memory[header.LENGTH_FIELD.size : start].rstrip(b" ")
    data = memory[start:size]
    start = -(-(header.LENGTH_FIELD.size + len(content)) // header.PAGE_BYTES) * header.PAGE_BYTES
    field = header.LENGTH_FIELD.pack(start - header.LENGTH_FIELD.size)
    packed = (field + content).ljust(start, b" ") + data
    memory[:] = packed.ljust(len(memory), b"\0")
    return len(packed)


def _save(course: Course, driver: Driver, saves: int) -> None:
    beside: list[Callable[[], None]] = []
    for _ in range(saves):
        driver.save(driver.step + _STEPS_APART, beside=beside)
        beside = []
        if course.plan.beside:
            beside.append(partial(driver.clean_up))
        else:
            driver.clean_up()
    for last in beside:
        last()


def _picker(plan: Plan) -> Callable[[Sequence[int]], int]:
    if plan.order == "one by one":
        return min
    if plan.order == "drawn":
        return random.Random(plan.seed).choice
    turn = itertools.count()
    return lambda live: live[next(turn) % len(live)]


def _whole(name: str, tensor: torch.Tensor) -> NamedTensor:
    shape = tuple(tensor.shape)
    return NamedTensor(name=name, tensor=tensor, global_shape=shape, offsets=(0,) * len(shape))
