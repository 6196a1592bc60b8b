"""Ray's word on workers that it lost, brought to the coordinator: nobody else knows that its memory monitor killed."""

import contextlib
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.train import UserCallback

from orchestrator.decide.losses import WorkerLoss
from workers.link import NAMESPACE

_MESSAGE_CHARS_MAX = 4000


class LossReporter(UserCallback):
    """Runs in Ray Train's controller, beside the user's own callbacks. Never raises: that would end the run."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        losses = {rank: loss_of(error) for rank, error in worker_exceptions.items()}
        # A coordinator that is gone just now misses it, and calls the loss an agent's for no known reason.
        with contextlib.suppress(RayError, ValueError):
            ray.get_actor(self._coordinator, namespace=NAMESPACE).workers_lost.remote(losses)


def loss_of(error: Exception) -> WorkerLoss:
    """What Ray's error about a lost worker says. Ray Train wraps it, and keeps the error itself beside its text."""
    error = getattr(error, "health_check_failure", error)
    return WorkerLoss(
        kind="oom" if isinstance(error, OutOfMemoryError) else "agent_lost", message=str(error)[:_MESSAGE_CHARS_MAX]
    )
