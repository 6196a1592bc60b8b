"""The training that all arms of the benchmark of saves share, and how one save of it is measured.

The loop's own clock is read around each iteration, the same way for every arm. A save is in flight from `begin` until
all ranks have seen its end, for at least two steps. While it is, the loop stands still in `begin`, in `work`, and in
each step where the copy has to be complete: before the optimizer's step, and at the end of the loop's. That is the
stall. What the steps take beyond it and beyond the baseline, the medians of the steps right before the save, is the
slow-down.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANKS = 2
WIDTH = 768
BATCH = 8
BLOCK_MIB = 27  # of each rank's parameters and two moments
BLOCKS_MIN = 4
# Each step trains one block in four, as stochastic depth does: through gloo, whole models take seconds a step. The
# optimizer updates all of them.
TURNS = 4
BASELINE_STEPS = 4
FLIGHT_STEPS_MIN = 2
FLIGHT_SECONDS_MAX = 120.0


class Arm:
    """One way to save. The methods are called on all ranks alike, in this order; times are `time.monotonic`."""

    name: str
    fsyncs: bool
    restores: tuple[str, ...] = ("cold", "warm")
    gives_back = True  # whether what was restored can be compared with what was saved

    def prepare(self, training: "Training") -> None:
        """What a program does once: imports, process groups. Not measured."""

    def begin(self, directory: Path) -> None:
        """Save into this directory, or start to; the loop stands still meanwhile."""
        raise NotImplementedError

    def before_optimizer(self) -> None:
        """Wait until the optimizer may change what is being saved."""

    def work(self) -> None:
        """What the loop has to call after each step in flight."""

    def done(self) -> float | None:
        """When this rank's save ended, None if it has not. Raises if it failed."""
        raise NotImplementedError

    def restore(self, directory: Path) -> None:
        """Load into the model and optimizer that are there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Flight:
    """One rank's measurements of one save. `began_at`: by the clock on the wall."""

    began_at: float
    stall: float
    ended: float
    slowdown: float
    total: float
    steps: int
    baseline: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = nn.functional.gelu(self.widen(self.norm(values)))
        narrowed: torch.Tensor = self.narrow(widened)
        return values + narrowed


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, values: torch.Tensor, turn: int | None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if turn is None or index % TURNS == turn:
                values = block(values)
        return values


class UnannouncedAdamW(torch.optim.AdamW):
    """AdamW as an optimizer of another kind, before whose steps torch calls no hooks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


UNANNOUNCED_STEP = UnannouncedAdamW.step  # the first instance would have it wrapped


class Training:
    """An FSDP2 model with AdamW, one thread a rank, in the process group that is there.

    `announced`: whether torch's hooks tell of the optimizer's steps.
    """

    def __init__(self, state_mib: int, *, announced: bool = True) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = Model(max(BLOCKS_MIN, round(state_mib / BLOCK_MIB)))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        kind = torch.optim.AdamW if announced else UnannouncedAdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4, foreach=True)
        UnannouncedAdamW.step = UNANNOUNCED_STEP
        self.end_step: Callable[[], None] = lambda: None
        self._batch = torch.randn(BATCH, WIDTH)
        self._steps = 0
        self._may_step = 0.0
        for turn in (None, 0):  # all blocks first, so that each has gradients and moments from now on
            self._train(turn, lambda: None)
        # Hooks of the optimizer come after those of all optimizers, in which a save may be waited for.
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "_may_step", time.monotonic()))

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Seconds that one iteration took, and those of them that were spent where it may have to wait for a save:
        before the optimizer's step, and after it."""
        began = time.monotonic()
        waited = self._train(self._steps % TURNS, before_optimizer)
        stepped = time.monotonic()
        self.end_step()
        self._steps += 1
        ended = time.monotonic()
        return ended - began, waited + ended - stepped

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, as torch.distributed.checkpoint takes them."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of each live tensor."""
        found: dict[str, torch.Tensor] = {}

        def walk(path: str, value: Any) -> None:
            if isinstance(value, dict):
                for key, item in value.items():
                    walk(f"{path}.{key}" if path else str(key), item)
            elif isinstance(value, torch.Tensor):
                found[path] = value.to_local() if isinstance(value, DTensor) else value

        walk("", self.state_dict())
        return found

    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.local_tensors().items()):
            digest.update(name.encode())
            digest.update(as_bytes(tensor).numpy())
        return digest.hexdigest()

    def _train(self, turn: int | None, before_optimizer: Callable[[], None]) -> float:
        self.model(self._batch, turn).square().mean().backward()
        computed = time.monotonic()
        before_optimizer()
        self._may_step = time.monotonic()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return self._may_step - computed


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def all_say(yes: bool) -> bool:
    answer = torch.tensor([int(yes)])
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def measure_save(training: Training, arm: Arm, directory: Path) -> tuple[Flight, str]:
    """The measurements, and the digest of what was to be saved."""
    before = [training.step() for _ in range(BASELINE_STEPS)]
    baseline, waited_always = (statistics.median(seconds) for seconds in zip(*before, strict=True))
    digest = training.digest()
    dist.barrier()
    began_at, began = time.time(), time.monotonic()
    arm.begin(directory)
    stall = time.monotonic() - began
    total = stall
    steps = 0
    while True:
        step_seconds, waited = training.step(arm.before_optimizer)
        worked = time.monotonic()
        arm.work()
        working = time.monotonic() - worked
        steps += 1
        stall += waited - waited_always + working
        total += step_seconds - baseline + working
        ended = arm.done()
        if all_say(ended is not None) and steps >= FLIGHT_STEPS_MIN:
            break
        if time.monotonic() - began > FLIGHT_SECONDS_MAX:
            raise TimeoutError(f"the save had not ended after {FLIGHT_SECONDS_MAX:.0f} s")
    assert ended is not None
    return Flight(began_at, stall, ended - began, total - stall, total, steps, baseline), digest


def measure_restore(training: Training, arm: Arm, directory: Path, digest: str) -> float:
    dist.barrier()
    began = time.monotonic()
    arm.restore(directory)
    seconds = time.monotonic() - began
    if arm.gives_back and training.digest() != digest:
        raise ValueError("what was restored is not what was saved")
    return seconds


def serve(
    address: str, hello: dict[str, Any], training: Training, arms: dict[str, Arm], idle: Callable[[], Any]
) -> None:
    """One rank's side: does what the driver asks, until it asks for the end. `idle` is a context for waiting."""
    digests: dict[str, str] = {}
    with Client(address) as driver:
        driver.send({**hello, "pid": os.getpid(), "state_bytes": state_bytes(training)})
        while True:
            with idle():
                command = driver.recv()
            if command["do"] == "end":
                return
            if command["do"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                arm = arms[command["arm"]]
                answer: Any = None
                if command["do"] == "prepare":
                    arm.prepare(training)
                elif command["do"] == "train":
                    for _ in range(command["steps"]):
                        training.step()
                elif command["do"] == "save":
                    flight, digests[arm.name] = measure_save(training, arm, Path(command["directory"]))
                    answer = asdict(flight)
                elif command["do"] == "restore":
                    directory = Path(command["directory"])
                    answer = measure_restore(training, arm, directory, digests[arm.name])
                driver.send({"answer": answer})
            except Exception as error:
                driver.send({"error": f"{type(error).__name__}: {error}"})


def state_bytes(training: Training) -> int:
    return sum(tensor.nbytes for tensor in training.local_tensors().values())


def join(rendezvous: str, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=FLIGHT_SECONDS_MAX + 30),
    )
