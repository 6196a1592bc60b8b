"""What a driver does around a run: names, checks, taking over from an earlier driver, starting and stopping actors.

A run's actors have fixed names, so that a new driver finds those of an earlier one, whoever started it. Two drivers
at once: the later one stops the earlier one's actors; what the earlier one's processes still say is refused (they
name their driver), and what they still write cannot be restored (generations are the fence).
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util
import xxhash
from packaging.specifiers import SpecifierSet
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.archive import RunArchive
from orchestrator.coordinator import Coordinator
from orchestrator.outcome import CoordinatorConfig, Outcome
from orchestrator.rounds import Round
from workers.checkpoint.object_store import ObjectStore
from workers.checkpoint.place import open_store, prove_conditions
from workers.checkpoint.store import make_root
from workers.errors import CallerError, EnvironmentProblem
from workers.link import NAMESPACE

RAY_VERSIONS = SpecifierSet(">=2.60,<2.61")
_RAY_POLL_SECONDS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}
_OUTCOME_SECONDS = 30.0
_START_SECONDS = 300.0
_RETRY_SECONDS = 0.1
# Ray Train's own list of reported checkpoints. It refuses to start when one that it lists was deleted, or when it was
# cut short.
_RAY_INDEX_GLOB = "checkpoint_manager_snapshot*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverIdentity:
    """`run`: the same for every driver of a run directory. `driver`: of this one."""

    run: str
    driver: str

    @property
    def coordinator(self) -> str:
        return f"coordinator-{self.run}"

    def keeper(self, node: str) -> str:
        return f"keeper-{self.run}-{node}"


def run_id(run_dir: Path) -> str:
    return xxhash.xxh3_64(os.fsencode(run_dir.resolve())).hexdigest()


def check_ray_version() -> None:
    if not RAY_VERSIONS.contains(ray.__version__, prereleases=True):
        raise EnvironmentProblem(
            f"Ray {ray.__version__} is installed, but lastgood supports {RAY_VERSIONS}; install a version in that range"
        )


def prepare_run_dir(run_dir: Path) -> None:
    """Create the run directory and prove that it can be written."""
    try:
        make_root(run_dir)
        probe = run_dir / f".probe-{os.getpid()}"
        with open(probe, "wb") as file:
            file.write(b"lastgood")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        raise EnvironmentProblem(
            f"RunConfig.storage_path: {run_dir} cannot be written ({error.strerror}); "
            f"choose a directory that this user may write on every node"
        ) from error


def prepare_storage(run_dir: Path, url: str | None) -> None:
    """Make ready where checkpoints go, and prove that what they rely on holds there."""
    what = "RunConfig.storage_path" if url is None else "RecoveryConfig.checkpoint_storage"
    try:
        store = open_store(run_dir, url)
    except ValueError as error:
        raise CallerError(f"RecoveryConfig.checkpoint_storage is {url!r}; it has to be {error}") from None
    try:
        if isinstance(store, ObjectStore):
            prove_conditions(store)
        RunArchive(store).prepare()
    except OSError as error:
        raise EnvironmentProblem(
            f"{what}: {store.place('.')} cannot be written ({error.strerror}); choose a place that this user may write "
            f"from every node"
        ) from error


def forget_ray_index(run_dir: Path) -> None:
    """Remove Ray's list of an earlier round: our own scan decides what exists."""
    for index in run_dir.glob(_RAY_INDEX_GLOB):
        index.unlink(missing_ok=True)


def stop_predecessor(identity: DriverIdentity, timeout_seconds: float) -> None:
    """Stop the coordinator and keepers that an earlier driver of this run left; returns once their names are free."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE
            and (entry["name"] == identity.coordinator or entry["name"].startswith(identity.keeper("")))
        ]
        if not names:
            return
        for name in names:
            with contextlib.suppress(ValueError, RayError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"an earlier driver's actors {', '.join(sorted(names))} are still alive after {timeout_seconds:.0f} s; "
                f"stop that job, or raise RecoveryConfig.takeover_seconds"
            )
        time.sleep(_RETRY_SECONDS)


def start_coordinator(config: CoordinatorConfig) -> Any:
    """The run's coordinator, on the driver's node, restarted without limit."""
    identity = DriverIdentity(run=config.run, driver=config.driver)
    actor = ray.remote(Coordinator).options(
        name=identity.coordinator,
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False),
    )
    coordinator: Any = actor.remote(config)
    try:
        # An error in its constructor would only hang the agents.
        ray.get(coordinator.outcome.remote(), timeout=_START_SECONDS)
    except GetTimeoutError:
        raise EnvironmentProblem(
            f"Ray did not start the run's coordinator, an actor on the driver's node, within {_START_SECONDS:.0f} s; "
            f"see whether that node is overloaded, and what Ray's logs say"
        ) from None
    return coordinator


@contextlib.contextmanager
def ray_polling_often() -> Iterator[None]:
    """Have Ray Train look at its workers twice a second, and for drained nodes once, unless the user has set how often.

    By default it looks every 2 s, and 5 s: as long does a lost agent go unnoticed, and each report wait for the next
    look.
    """
    ours = {name: seconds for name, seconds in _RAY_POLL_SECONDS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def ask_outcome(coordinator: Any) -> Outcome | None:
    """How the run ended, also right after the coordinator was restarted; None if it does not answer in time."""
    deadline = time.monotonic() + _OUTCOME_SECONDS
    while time.monotonic() < deadline:
        try:
            outcome: Outcome = ray.get(coordinator.outcome.remote(), timeout=_OUTCOME_SECONDS)
            return outcome
        except ActorDiedError:
            return None  # for good: another driver has killed it
        except RayError:
            time.sleep(_RETRY_SECONDS)
    return None


def ask_round(coordinator: Any, error: str) -> Round | None:
    """Tell that Ray Train has ended; returns how to start it again, None if the run is over or nobody answers."""
    with contextlib.suppress(RayError):
        following: Round | None = ray.get(coordinator.ray_ended.remote(error), timeout=_OUTCOME_SECONDS)
        return following
    return None


def close_actor(actor: Any) -> None:
    """Let a keeper clean up, then stop it."""
    with contextlib.suppress(RayError):
        ray.get(actor.close.remote(), timeout=5)
    stop_actor(actor)


def stop_actor(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)
