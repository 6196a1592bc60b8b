"""Ray Train's `fit()`, started as often as it takes until the coordinator has a verdict. The driver's side.

Faults survived: Ray Train's controller dies (its workers die with it, coordinator and keepers do not); a node is to be
left out; Ray cannot place the ranks without a node that was left out (it is told to give up after one try, and the
node is taken back). The coordinator decides each time (orchestrator/rounds.py).
"""

import contextlib
import dataclasses
import time
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train import RunConfig
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from orchestrator import driver
from orchestrator.outcome import Outcome
from orchestrator.ray_losses import LossReporter
from orchestrator.rounds import Round
from workers.agent import AgentConfig, agent_main
from workers.backend import AgentBackendConfig
from workers.ray_storage import ray_storage

_NODE_LABEL = "ray.io/node-id"
# To a type checker `ray.train.ScalingConfig` is an older class than the one that it is at run time.
ScalingConfig = Any


def until_verdict(
    coordinator: Any, agent: AgentConfig, scaling: ScalingConfig, run_config: RunConfig
) -> tuple[ray.train.Result | None, Outcome | None, Exception | None]:
    """Ray's last result or error, and the outcome; None if the coordinator is gone for good."""
    excluded: tuple[str, ...] = ()
    while True:
        result, error = _fit(agent, without_nodes(scaling, excluded), run_config, giving_up=bool(excluded))
        outcome = driver.ask_outcome(coordinator)
        if outcome is None or outcome.ended or not _may_pass(error):
            return result, outcome, error
        described = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" if error else "its workers returned"
        following = driver.ask_round(coordinator, described)
        if following is None:
            return result, driver.ask_outcome(coordinator), error
        excluded = following.excluded
        _release(following)
        time.sleep(following.delay_seconds)


def without_nodes(scaling: ScalingConfig, excluded: tuple[str, ...]) -> ScalingConfig:
    """The same, with a label selector that keeps these nodes out."""
    if not excluded:
        return scaling
    wanted = {_NODE_LABEL: f"!in({', '.join(excluded)})"}
    given = scaling.label_selector
    selector = [{**one, **wanted} for one in given] if isinstance(given, list) else {**(given or {}), **wanted}
    return dataclasses.replace(scaling, label_selector=selector)


def can_exclude(scaling: ScalingConfig) -> bool:
    """Whether the user's settings leave room for that selector."""
    given = scaling.label_selector or {}
    return not scaling.use_tpu and not any(
        _NODE_LABEL in one for one in (given if isinstance(given, list) else [given])
    )


def needed_resources(scaling: ScalingConfig) -> dict[str, float]:
    """What the ranks need together at the least."""
    workers = scaling.num_workers
    number = workers[0] if isinstance(workers, tuple) else workers
    one: dict[str, float] = scaling.resources_per_worker or ({"GPU": 1.0} if scaling.use_gpu else {"CPU": 1.0})
    return {name: amount * number for name, amount in one.items()}


def _may_pass(error: Exception | None) -> bool:
    """What is neither Ray's death nor its giving up is about the settings, and would come again."""
    return error is None or isinstance(error, RayError | ray.train.TrainingFailedError)


def _release(following: Round) -> None:
    """Give back what a controller that died still holds: Ray does so only where its dashboard runs."""
    if following.group not in (None, "none"):
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(str(following.group)))))


def _fit(
    agent: AgentConfig, scaling: ScalingConfig, given: RunConfig, *, giving_up: bool
) -> tuple[ray.train.Result | None, Exception | None]:
    """One round. `giving_up`: whether it ends if Ray cannot place the ranks."""
    driver.forget_ray_index(agent.settings.run_dir)
    callbacks: list[Any] = [*(given.callbacks or []), LossReporter(agent.coordinator)]
    run_config = RunConfig(
        **{
            item.name: getattr(given, item.name)
            for item in dataclasses.fields(given)
            if item.name in ("name", "worker_runtime_env", "logging_config")
            and getattr(given, item.name, None) is not None
        },
        storage_path=str(agent.settings.run_dir.parent),  # absolute: Ray takes a relative one for a URI
        storage_filesystem=ray_storage(),
        callbacks=callbacks,
        # For lost workers and nodes alone: what must end the run is returned by the agents, never raised.
        failure_config=FailureConfig(max_failures=-1, controller_failure_limit=0 if giving_up else -1),
    )
    trainer = DataParallelTrainer(
        agent_main,
        train_loop_config={"agent": agent},
        backend_config=AgentBackendConfig(),
        scaling_config=scaling,
        run_config=run_config,
    )
    try:
        with driver.ray_polling_often():
            return trainer.fit(), None
    except Exception as error:
        return None, error
