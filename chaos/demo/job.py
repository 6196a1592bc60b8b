"""The training that the demo attacks: what a user would write, with nothing in it about faults."""

import math
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import workers
from chaos.demo.model import VOCABULARY, ByteGPT, SourceText, standard_library_text

PEAK_LEARNING_RATE = 1e-3
GRADIENT_NORM_MAX = 1.0
LOADER_WORKERS = 2


def build(
    *, seed: int, steps: int, rank: int, world_size: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """A sharded model, its optimizer, and a schedule that warms up linearly, then follows a cosine down to a tenth."""
    _seed_all(seed)
    model = ByteGPT().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.1, foreach=True)
    warm_up_steps = max(1, steps // 10)

    def rate(step: int) -> float:
        if step < warm_up_steps:
            return (step + 1) / warm_up_steps
        done = min(1.0, (step - warm_up_steps) / max(1, steps - warm_up_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    # The weights start equal on all ranks; from here on each rank draws its own dropout.
    _seed_all(seed + 1 + rank)
    return model, optimizer, LambdaLR(optimizer, rate)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """One optimizer step on this rank's part of the batch; returns its mean loss in nats per byte."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.reshape(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def train_loop(config: dict[str, Any]) -> None:
    """Train for config["steps"] steps on global batches of config["global_batch_size"], seeded by config["seed"]."""
    session = workers.get_session()
    model, optimizer, scheduler = build(
        seed=config["seed"],
        steps=config["steps"],
        rank=session.rank,
        world_size=session.world_size,
        device=session.device,
    )
    # The first epoch ends at four fifths of the run, so that the demo crosses its end as well.
    windows = config["steps"] * config["global_batch_size"] * 4 // 5
    dataset = SourceText(standard_library_text(), windows)
    data = session.data_loader(
        dataset,
        global_batch_size=config["global_batch_size"],
        seed=config["seed"],
        num_workers=LOADER_WORKERS,
        revision=dataset.revision,
    )
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore()
    for inputs, targets in data:
        loss = train_step(model, optimizer, scheduler, (inputs.to(session.device), targets.to(session.device)))
        session.end_step(loss=loss)
        if session.step >= config["steps"]:
            break
