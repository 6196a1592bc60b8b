"""The training of a cell: tiny, and every bit of its state depends on the random generators, the data and all ranks.

It saves when it says so and waits for the commit, so that each fault point is passed at a known step.
"""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import workers

STEPS = 8
SAVE_EVERY = 2
_BATCH_PER_RANK = 2


def train_loop(config: dict[str, Any]) -> None:
    """Train for STEPS steps, seeded by config["seed"]."""
    session = workers.get_session()
    torch.manual_seed(config["seed"])
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # Each rank draws its own dropout. A fork seeds Python's generator anew, and all of them are a part of the state.
    random.seed(config["seed"] + session.rank)
    np.random.seed(config["seed"] + session.rank)
    torch.manual_seed(config["seed"] + 1 + session.rank)
    data = session.data_loader(
        list(range(64)), global_batch_size=_BATCH_PER_RANK * session.world_size, seed=config["seed"], endless=True
    )
    session.track(model=model, optimizer=optimizer, scheduler=None, data=data)
    session.restore()
    batches = iter(data)
    # Looked at first: after a restore of the last step there is none to be done.
    while session.step < STEPS and (batch := next(batches, None)) is not None:
        loss = model(batch[:, None].float() / 64).square().mean()
        loss.backward()
        parameters = list(model.parameters())
        gradients = torch.cat([one.grad.view(-1) for one in parameters if one.grad is not None])
        dist.all_reduce(gradients)
        for one, summed in zip(parameters, torch.split(gradients, [one.numel() for one in parameters]), strict=True):
            one.grad = (summed / session.world_size).view_as(one)
        optimizer.step()
        optimizer.zero_grad()
        session.end_step(loss=float(loss.detach()))
        if session.step % SAVE_EVERY == 0:
            session.save_now(wait=True)
