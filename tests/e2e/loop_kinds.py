"""Loops that differ from `loops.train_loop` in how they parallelise, accumulate and load. Each has random numbers of
its own on every rank, for those are what a restore loses first."""

import random
import time
from typing import Any

import numpy as np
import torch
from loops import FEATURES, Points
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchdata.stateful_dataloader import StatefulDataLoader

import workers

ACCUMULATED = 3
BATCHES_PER_EPOCH = 20
WIDTH = 700


class Autoencoder(nn.Module):
    """With running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm, self.decode = nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.Linear(24, FEATURES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.norm(self.encode(points))), 0.2, self.training)
        return self.decode(hidden)


def build(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = Autoencoder()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)
    return model


def ddp_loop(config: dict[str, Any]) -> None:
    """Each rank's BatchNorm sees other samples, and nothing makes the statistics equal.

    config: steps; batch, over all ranks; flip: see `flip_a_bit`; wait_every_steps: wait for a save so often.
    """
    session = workers.get_session()
    model = DistributedDataParallel(build(session.rank), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=config["steps"])
    data = session.data_loader(Points(), global_batch_size=config.get("batch", 32), seed=5, num_workers=1)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore()
    for batch in data:
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.end_step()
        flip_a_bit(model.module.encode.weight, config.get("flip"), session)
        if session.step % config.get("wait_every_steps", config["steps"] + 1) == 0:
            session.save_now(wait=True)
        if session.step >= config["steps"]:
            break


def flip_a_bit(weight: torch.Tensor, flip: dict[str, Any] | None, session: Any) -> None:
    """Do to `weight` what faulty memory does, on flip["rank"] after flip["step"] in flip["generations"]."""
    if (
        flip
        and session.generation in flip["generations"]
        and (session.rank, session.step) == (flip["rank"], flip["step"])
    ):
        weight.detach().view(torch.int32)[0, 0] ^= 1 << 20


def accumulating_loop(config: dict[str, Any]) -> None:
    """One rank without any wrapper, no loader workers, three batches a step, an average of the weights beside."""
    session = workers.get_session()
    model = build(session.rank)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = session.data_loader(Points(), global_batch_size=16, seed=7, num_workers=0)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=data, average=average)
    session.restore()
    micro_steps = 0
    for batch in data:
        noise = torch.randn_like(batch) * random.random() * float(np.random.rand())
        ((model(batch + noise) - batch).square().mean() / ACCUMULATED).backward()
        micro_steps += 1
        if micro_steps % ACCUMULATED:
            session.end_micro_step()
            continue
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        session.end_step()
        if session.step >= config["steps"]:
            break


def torchdata_loop(config: dict[str, Any]) -> None:
    """Each rank loads its own half, shuffled, with torchdata's loader; saves fall on the ends of epochs too."""
    session = workers.get_session()
    model = DistributedDataParallel(build(session.rank), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = Points()
    mine = [points[index] for index in range(session.rank, 8 * BATCHES_PER_EPOCH * 2, 2)]
    data: Any = StatefulDataLoader(mine, batch_size=8, shuffle=True, num_workers=1)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=data)
    session.restore()
    while session.step < config["steps"]:
        for batch in data:
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            if session.step >= config["steps"]:
                break


def wide_loop(config: dict[str, Any]) -> None:
    """A state of several megabytes, so that memory which is not given back shows.

    config: steps; pace_seconds: how long a step takes at least; without it every step waits for its save.
    """
    session = workers.get_session()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    session.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    session.restore()
    while session.step < config["steps"]:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        if "pace_seconds" in config:
            time.sleep(config["pace_seconds"])
        else:
            session.save_now(wait=True)


def big_loop(config: dict[str, Any]) -> None:
    """As many parameters as asked, of so many numbers each, and a momentum for each; a gradient takes no memory.

    config: tensors, numel; steps. After n steps with the momentum 0.5, what a parameter has lost is known.
    """
    session = workers.get_session()
    model = nn.ParameterList([nn.Parameter(torch.zeros(config["numel"])) for _ in range(config["tensors"])])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, foreach=False)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    session.restore()
    gradient = torch.ones(1)
    while session.step < config["steps"]:
        for parameter in model:
            parameter.grad = gradient.expand(config["numel"])
        optimizer.step()
        session.end_step()
        session.save_now(wait=True)
