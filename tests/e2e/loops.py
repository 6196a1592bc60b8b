"""Training loops of the end-to-end tests: tiny, but with everything that has to survive."""

import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import workers
from workers.session import Session

FEATURES = 16
SAMPLES = 500  # not a multiple of the batch: each epoch drops some


class Points:
    """Samples that loader workers make, with random augmentation from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        point = torch.linspace(0, 1, FEATURES) * (index % 13)
        return point + 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand())


def build(config: dict[str, Any], rank: int) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    torch.manual_seed(config.get("seed", 0))
    model = nn.Sequential(nn.Linear(FEATURES, 33), nn.Dropout(0.2), nn.ReLU(), nn.Linear(33, FEATURES))
    fully_shard(model[0])
    fully_shard(model)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def train_step(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    batch: torch.Tensor,
) -> None:
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    session.end_step(loss=loss.item())


def train_loop(config: dict[str, Any]) -> None:
    """config: steps, seed; pace_seconds slows the steps down, so that a test can hit one from outside."""
    session = workers.get_session()
    model, optimizer, scheduler = build(config, session.rank)
    data = session.data_loader(Points(), global_batch_size=32, seed=3, num_workers=2)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore(allow=["config.steps", "config.pace_seconds"])
    for batch in data:
        train_step(session, model, optimizer, scheduler, batch)
        time.sleep(config.get("pace_seconds", 0.0))
        if session.step >= config["steps"]:
            break


def failing_loop(config: dict[str, Any]) -> None:
    raise ValueError(f"this loop cannot work with {config['seed']}")


def failing_later_loop(config: dict[str, Any]) -> None:
    session = workers.get_session()
    model, optimizer, scheduler = build(config, session.rank)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=None)
    session.restore()
    while session.step < config["steps"]:
        if session.step == config["fails_after"] and session.rank == 1:
            raise ZeroDivisionError("the user's mistake")
        model(torch.ones(4, FEATURES)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.end_step()
