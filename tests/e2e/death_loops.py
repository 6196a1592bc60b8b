"""The loop of the other end-to-end tests, with something in it that kills one rank, once in the run."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import workers


def train_with(config: dict[str, Any], misdeed: Callable[[], None]) -> None:
    """Train, and do the misdeed on rank 1 in the middle of step `misdeed_step`, if nobody has done it yet."""
    session = workers.get_session()

    def after_optimizer_step(*_: object) -> None:
        if session.rank == 1 and session.step == config["misdeed_step"] and _claim(Path(config["marker"])):
            misdeed()

    register_optimizer_step_post_hook(after_optimizer_step)
    loops.train_loop(config)


def _claim(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def segfault_loop(config: dict[str, Any]) -> None:
    train_with(config, read_address_zero)


def read_address_zero() -> None:
    ctypes.string_at(0)


def hopeless_segfault_loop(config: dict[str, Any]) -> None:
    """Crashes each time, before any progress."""
    dist.barrier()
    if workers.get_session().rank == 1:
        read_address_zero()
    dist.barrier()


def greedy_loop(config: dict[str, Any]) -> None:
    """Rank 1 moves into a control group (config["cgroup"]) that has too little room for what it then allocates."""
    if workers.get_session().rank == 1:
        (Path(config["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    train_with(config, allocate_without_end)


def allocate_without_end(pause_seconds: float = 0.1) -> None:
    """Slowly enough for the agent, which looks once a second, to see it grow."""
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))
        time.sleep(pause_seconds)


def hoarding_loop(config: dict[str, Any]) -> None:
    train_with(config, lambda: allocate_without_end(pause_seconds=0.01))
