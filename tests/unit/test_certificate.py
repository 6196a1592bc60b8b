"""The resume certificate notices each way in which the next step would not be the one that was saved."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from workers.errors import ResumeMismatch
from workers.state.certificate import differing_fields, require_equal
from workers.state.training import TrainingState


class Loader:
    """Hands out 0, 1, 2, ... as the session's loader does."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def next_sample_ids(self) -> list[int]:
        return [self.position, self.position + 1]


class Foreign:
    def __init__(self) -> None:
        self.state = {"position": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.ones(2)).sum().backward()
        self.optimizer.step()
        self.scheduler = LambdaLR(self.optimizer, lambda epoch: 1 / (epoch + 1))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.data, self.second = Loader(), Foreign()
        self.state = TrainingState(0, 1)
        self.state.track(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            data={"first": self.data, "second": self.second},
        )


def next_step_count(run: Run) -> None:
    run.optimizer.state[run.model.bias]["step"] += 1


def other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1 + 1e-15


def other_scale(run: Run) -> None:
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 512.0})


TAMPERINGS: dict[str, Callable[[Run], object]] = {
    "rng.python": lambda run: random.random(),
    "rng.numpy": lambda run: np.random.rand(),
    "rng.torch": lambda run: torch.rand(1),
    "lr.optimizer": other_rate,
    "steps.optimizer": next_step_count,
    "scale.scaler": other_scale,
    "data.first.next_ids": lambda run: run.data.load_state_dict({"position": 1}),
    "data.second.state": lambda run: run.second.load_state_dict({"position": 1}),
    "scheduler.state": lambda run: setattr(run.scheduler, "last_epoch", 1),
}


@pytest.mark.parametrize("field", TAMPERINGS)
def test_a_change_of_one_field_is_noticed_and_named(field: str) -> None:
    run = Run()
    saved = json.loads(json.dumps(run.state.certificate(), allow_nan=False))
    run.state.check_certificate(saved)
    TAMPERINGS[field](run)
    assert differing_fields(saved, run.state.certificate()) == [field]
    with pytest.raises(ResumeMismatch, match=field):
        run.state.check_certificate(saved)


def test_every_field_of_the_certificate_has_its_tampering() -> None:
    assert Run().state.certificate().keys() == TAMPERINGS.keys()


def test_a_scheduler_that_is_off_by_one_after_a_restore_is_noticed_by_the_rate_of_the_next_step() -> None:
    run = Run()
    saved = run.state.certificate()
    run.optimizer.step()
    run.optimizer.state[run.model.weight]["step"] -= 1
    run.optimizer.state[run.model.bias]["step"] -= 1
    run.scheduler.step()
    with pytest.raises(ResumeMismatch) as caught:
        run.state.check_certificate(saved)
    assert "lr.optimizer was [0.1], is [0.05]" in str(caught.value)


def test_a_field_that_only_one_side_has_counts_as_a_difference() -> None:
    assert differing_fields({"a": 1, "b": None}, {"a": 1}) == ["b"]
    with pytest.raises(ResumeMismatch, match=r"rng\.cuda\.0 was absent, is abc"):
        require_equal({}, {"rng.cuda.0": "abc"})
