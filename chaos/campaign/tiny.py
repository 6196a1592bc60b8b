"""A model so small that a step takes milliseconds, for campaigns that are about the supervisor and not about training.

It has all that has to survive: sharded parameters, dropout, an optimizer with state, a schedule, augmented samples.
"""

import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import workers

_FEATURES = 16
_BATCH_PER_RANK = 8


class Points:
    """Samples with random augmentation from all three generators; not a multiple of the batch, so epochs drop some."""

    def __len__(self) -> int:
        return 2003

    def __getitem__(self, index: int) -> torch.Tensor:
        point = torch.linspace(0, 1, _FEATURES) * (index % 13)
        return point + 0.1 * torch.randn(_FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand())


def train_loop(config: dict[str, Any]) -> None:
    """config: steps, seed, loader_workers, pace_seconds (how much longer each step takes)."""
    session = workers.get_session()
    torch.manual_seed(config["seed"])
    model = nn.Sequential(nn.Linear(_FEATURES, 33), nn.Dropout(0.2), nn.ReLU(), nn.Linear(33, _FEATURES))
    fully_shard(model[0])
    fully_shard(model)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    data = session.data_loader(
        Points(),
        global_batch_size=_BATCH_PER_RANK * session.world_size,
        seed=config["seed"],
        num_workers=config["loader_workers"],
    )
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore()
    for batch in data:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(config["pace_seconds"])
        session.end_step(loss=loss.item(), grad_norm=float(norm))
        if session.step >= config["steps"]:
            break
