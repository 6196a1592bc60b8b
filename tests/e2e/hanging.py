"""Loops that hang, in each generation in another way, and loops that only look as if they did."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from loops import Points, build
from torch import nn

import workers
from workers.session import Session

AT = 27


class StuckPoints(Points):
    """With `stuck`, from the 200th sample on: the loader's worker waits for a lock that nobody gives back."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck
        self.served = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.served += 1
        if self.stuck and self.served > 200:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(index)


def sleep(model: nn.Module) -> None:
    time.sleep(3600)


def spin(model: nn.Module) -> None:
    while True:
        pass


def stop(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lone_collective(model: nn.Module) -> None:
    """One that the other rank never joins."""
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], timeout=None, use_local_synchronization=True))


WAYS = {"sleep": sleep, "spin": spin, "stop": stop, "lone_collective": lone_collective}


def train(
    config: dict[str, Any],
    points: Points,
    *,
    before: Callable[[Session, nn.Module], None] = lambda session, model: None,
    after: Callable[[Session], bool] = lambda session: False,
) -> None:
    """As loops.train_loop, with something done before and after each step; `after` says whether it was the last."""
    session = workers.get_session()
    model, optimizer, scheduler = build(config, session.rank)
    data = session.data_loader(points, global_batch_size=32, seed=3, num_workers=2)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore(allow=["config"])
    for batch in data:
        before(session, model)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.end_step(loss=loss.item())
        time.sleep(config.get("pace_seconds", 0.0))
        if after(session) or session.step >= config["steps"]:
            break


def hanging_loop(config: dict[str, Any]) -> None:
    """config["ways"]: for each generation, from the first on, (way, rank, step), the way being one of WAYS or "loader",
    for which the step does not matter."""
    session = workers.get_session()
    way, rank, step = [*config["ways"], *100 * [("none", -1, -1)]][session.generation - 1]

    def hang(session: Session, model: nn.Module) -> None:
        if way in WAYS and (session.rank, session.step) == (rank, step):
            WAYS[way](model)

    train(config, StuckPoints(way == "loader" and rank == session.rank), before=hang)


def validating_loop(config: dict[str, Any]) -> None:
    """Rank 0 alone validates, for longer than a step may take; the other waits for it in the next step."""

    def validate(session: Session) -> bool:
        if session.step == AT and session.rank == 0:
            with session.phase("validation", timeout=60):
                time.sleep(config["validation_seconds"])
        return False

    train(config, Points(), after=validate)


def slow_rank_loop(config: dict[str, Any]) -> None:
    """Rank 1 takes longer for its own part of each step."""
    train(config, Points(), before=lambda session, model: time.sleep(0.3 if session.rank == 1 else 0.1))


def until_loop(config: dict[str, Any]) -> None:
    """Trains for so many seconds; rank 0's clock decides for all."""
    began, over = time.monotonic(), torch.zeros(1)

    def is_over(session: Session) -> bool:
        over[0] = time.monotonic() - began > config["seconds"]
        dist.broadcast(over, 0)
        return bool(over.item())

    train({**config, "steps": 10**9}, Points(), after=is_over)
