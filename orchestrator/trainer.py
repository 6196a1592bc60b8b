"""SupervisedTrainer: the user's loop on Ray Train, under supervision.

One `fit()` is one driver of the run. It makes sure that no earlier driver's processes are left, starts the
coordinator and one keeper a node, has Ray Train start the agents, and turns what the coordinator says at the end into
a result or an error.
"""

import inspect
import logging
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
import ray.train
import xxhash
from pyarrow.fs import LocalFileSystem
from ray.exceptions import RayError
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from orchestrator import driver, ray_fit
from orchestrator.config import RecoveryConfig
from orchestrator.keepers import KeeperFleet
from orchestrator.observe import discovery
from orchestrator.outcome import CoordinatorConfig, Outcome
from orchestrator.payload import pickle_loop
from workers import errors
from workers.agent import AgentConfig
from workers.checkpoint.manifest import checkpoint_dir
from workers.checkpoint.place import open_store
from workers.errors import CallerError, EnvironmentProblem, LastgoodError, TrainingFailed
from workers.orders import LoopSettings

logger = logging.getLogger("lastgood")


@dataclass(kw_only=True)
class SupervisedResult(ray.train.Result):
    """Ray's result, and what the supervisor knows beside it.

    step: steps finished. generation: how often ranks were started. committed_checkpoint: the newest committed one,
    None if the loop saved nothing. ledger: the run's event log.
    """

    step: int
    generation: int
    committed_checkpoint: Path | str | None
    ledger: Path
    run_dir: Path


class SupervisedTrainer:
    """Runs `train_loop_per_worker` on Ray Train's workers and keeps it alive.

    Takes Ray's own ScalingConfig and RunConfig; `recovery` says how to protect the run. The run directory is
    `run_config.storage_path / run_config.name`: a second `fit()` of the same directory continues that run. Raises
    CallerError for settings that conflict, naming the RecoveryConfig field to use instead.
    """

    def __init__(
        self,
        train_loop_per_worker: Any,
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        recovery: RecoveryConfig | None = None,
    ) -> None:
        self._loop = train_loop_per_worker
        self._loop_config = train_loop_config
        self._scaling = scaling_config or ScalingConfig()
        self._run_config = run_config or RunConfig()
        self._recovery = recovery or RecoveryConfig()
        self._coordinator: Any = None
        _refuse_conflicts(self._scaling, self._run_config)

    @property
    def run_dir(self) -> Path:
        return Path(str(self._run_config.storage_path)).absolute() / str(self._run_config.name)

    def status(self) -> dict[str, Any]:
        """What the run is doing now; {} before it has started or while the coordinator is being restarted."""
        if self._coordinator is None:
            return {}
        try:
            status: dict[str, Any] = ray.get(self._coordinator.status.remote(), timeout=5)
            return status
        except RayError:
            return {}

    def fit(self) -> SupervisedResult:
        """Train to the end. Raises TrainingFailed, ending with the loop's own traceback, when the failure budget is
        spent."""
        driver.check_ray_version()
        payload = pickle_loop(self._loop, self._loop_config)
        driver.prepare_run_dir(self.run_dir)
        driver.prepare_storage(self.run_dir, self._recovery.checkpoint_storage)
        if not ray.is_initialized():
            ray.init()
        identity = driver.DriverIdentity(run=driver.run_id(self.run_dir), driver=uuid.uuid4().hex[:8])
        driver.stop_predecessor(identity, self._recovery.takeover_seconds)
        settings = self._loop_settings(identity.run)
        self._coordinator = driver.start_coordinator(
            CoordinatorConfig(
                run=identity.run,
                driver=identity.driver,
                run_dir=self.run_dir,
                recovery=self._recovery,
                needed=ray_fit.needed_resources(self._scaling),
                can_exclude=ray_fit.can_exclude(self._scaling),
            )
        )
        fleet = KeeperFleet(identity, self._coordinator, settings, self._recovery)
        fleet.start()
        try:
            agent = AgentConfig(
                run=identity.run,
                driver=identity.driver,
                coordinator=identity.coordinator,
                settings=settings,
                preload=self._recovery.preload,
                payload=payload,
            )
            result, outcome, ray_error = ray_fit.until_verdict(
                self._coordinator, agent, self._scaling, self._run_config
            )
        finally:
            fleet.close()
            driver.stop_actor(self._coordinator)
            self._coordinator = None
            discovery.withdraw(self.run_dir, identity.driver)
        if outcome is None or not outcome.ended:
            raise ray_error or EnvironmentProblem(
                f"the run in {self.run_dir} ended without a verdict: another driver took it over, or Ray stopped it"
            )
        if outcome.error is not None:
            raise _error_of(outcome)
        return self._result(result, outcome)

    def _loop_settings(self, run: str) -> LoopSettings:
        recovery = self._recovery
        return LoopSettings(
            run=run,
            run_dir=self.run_dir,
            checkpoint_storage=recovery.checkpoint_storage,
            save_every_steps=None if recovery.cadence == "auto" else recovery.cadence,
            save_at_end=recovery.save_at_end,
            snapshot_slots=recovery.snapshot_slots,
            memory_fraction_max=recovery.memory_fraction_max,
            save_timeout_seconds=recovery.save_timeout_seconds,
            collective_timeout_seconds=recovery.collective_timeout_seconds,
            record_samples=recovery.record_samples,
            skips_bad_batches=recovery.on_bad_loss == "rollback",
            loss_spike_factor=recovery.loss_spike_factor,
            check_replicas=recovery.check_replicas,
            replicate_snapshots=recovery.replicate_snapshots,
            code=_code_digest(self._loop),
            volatile=recovery.volatile,
            failpoints=recovery.failpoints,
        )

    def _place_of(self, checkpoint: str) -> Path | str:
        place = open_store(self.run_dir, self._recovery.checkpoint_storage).place(checkpoint_dir(checkpoint))
        return place if self._recovery.checkpoint_storage else Path(place)

    def _result(self, result: ray.train.Result | None, outcome: Outcome) -> SupervisedResult:
        values = {item.name: getattr(result, item.name) for item in fields(ray.train.Result)} if result else {}
        values |= {
            "metrics": {**(values.get("metrics") or {}), **outcome.metrics},
            "error": None,
            "_storage_filesystem": LocalFileSystem(),
            "path": values.get("path") or str(self.run_dir),
        }
        # To the caller they are plain directories.
        if checkpoint := values.get("checkpoint"):
            values["checkpoint"] = Checkpoint(checkpoint.path)
        values["best_checkpoints"] = [
            (Checkpoint(best.path), metrics) for best, metrics in values.get("best_checkpoints") or []
        ]
        values.setdefault("checkpoint", None)
        return SupervisedResult(
            **values,
            step=outcome.step,
            generation=outcome.generation,
            committed_checkpoint=self._place_of(outcome.checkpoint) if outcome.checkpoint else None,
            ledger=self.run_dir / "ledger.jsonl",
            run_dir=self.run_dir,
        )


def _refuse_conflicts(scaling: ScalingConfig, run: RunConfig) -> None:
    if scaling.num_workers == 0:
        raise CallerError("ScalingConfig.num_workers is 0 (Ray's local mode); a supervised run needs at least 1 worker")
    if run.storage_filesystem is not None:
        raise CallerError(
            "RunConfig.storage_filesystem is set; lastgood needs a path that every node can open as a directory"
        )
    if "://" in str(run.storage_path):
        raise CallerError(
            f"RunConfig.storage_path is {run.storage_path!r}; it has to be a directory that all nodes share"
        )
    if not str(run.name).isascii():
        raise CallerError(f"RunConfig.name is {run.name!r}; Ray takes ASCII characters only, choose another name")
    failure = run.failure_config
    if failure is not None and failure != FailureConfig():
        raise CallerError(
            f"RunConfig.failure_config is {failure!r}; Ray's retries would count the failures that lastgood repairs; "
            f"use RecoveryConfig(max_failures=...) instead"
        )
    checkpoint = run.checkpoint_config
    if checkpoint is not None and checkpoint != CheckpointConfig():
        raise CallerError(
            f"RunConfig.checkpoint_config is {checkpoint!r}; Ray would delete checkpoints that lastgood needs; "
            f"use RecoveryConfig(keep_last=...) instead"
        )


def _code_digest(loop: Any) -> str | None:
    """A digest of the file that the loop is written in; None for one that was typed in, or is built in."""
    try:
        source = inspect.getsourcefile(loop)
        return xxhash.xxh3_64(Path(source).read_bytes()).hexdigest() if source else None
    except (TypeError, OSError):
        return None


def _error_of(outcome: Outcome) -> LastgoodError:
    kind = getattr(errors, outcome.error_type, TrainingFailed)
    return kind(outcome.error)
