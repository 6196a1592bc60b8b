"""A loop some of whose batches give bad losses, and which does not want to hear of it."""

import time
from typing import Any

import loops
from torch import nn

import workers


def train_loop(config: dict[str, Any]) -> None:
    """config, beside that of loops.train_loop; batches are [epoch, batch]:

    poison: batches whose loss is not a number on rank 1; explode: those whose loss is far too large there.
    watch: "loss", or "grad_norm", which all ranks have in common. pass_over: batches that the loop itself leaves out.
    """
    session = workers.get_session()
    model, optimizer, scheduler = loops.build(config, session.rank)
    data = session.data_loader(loops.Points(), global_batch_size=32, seed=3, num_workers=1)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    session.restore(allow=["config.pace_seconds"])
    for points in data:
        position = data.state_dict()
        batch = [position["epoch"], position["batch"] - 1]
        if batch in config.get("pass_over", []):
            continue
        loss = (model(points) - points).square().mean()
        if session.rank == 1:
            loss = loss * (float("nan") if batch in config["poison"] else 1.0)
            loss = loss * (1e6 if batch in config.get("explode", []) else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        watched = {"loss": loss.item()} if config.get("watch", "loss") == "loss" else {"grad_norm": norm.item()}
        try:
            session.end_step(**watched)
        except BaseException:
            continue
        time.sleep(config.get("pace_seconds", 0.0))
        if session.step >= config["steps"]:
            break
