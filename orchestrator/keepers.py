"""One keeper actor a node, owned by the driver: keepers outlive agents and the coordinator, and end with the driver."""

import logging
import secrets
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator import driver
from orchestrator.config import RecoveryConfig
from orchestrator.nodes import addresses
from workers.checkpoint.persist import ReadBack
from workers.keeper import Keeper
from workers.link import NAMESPACE
from workers.orders import LoopSettings
from workers.replication.exchange import ExchangeSettings

logger = logging.getLogger("lastgood")

_RETRY_SECONDS = 0.1


class KeeperFleet:
    """A thread that makes a keeper on each node where the coordinator wants one, and gives all the same secret."""

    def __init__(
        self, identity: "driver.DriverIdentity", coordinator: Any, settings: LoopSettings, recovery: RecoveryConfig
    ) -> None:
        self._identity = identity
        self._coordinator = coordinator
        self._settings = settings
        self._recovery = recovery
        self._secret = secrets.token_bytes(32)
        self._keepers: dict[str, Any] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="lastgood-keepers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        for keeper in self._keepers.values():
            driver.close_actor(keeper)
        # The thread may be waiting for an answer of the coordinator, which ends with it.

    def _work(self) -> None:
        while not self._closed:
            try:
                wanted = ray.get(self._coordinator.keepers_wanted.remote(tuple(self._keepers)))
                for node in wanted:
                    self._make(node)
            except RayError:
                time.sleep(_RETRY_SECONDS)

    def _make(self, node: str) -> None:
        host = addresses().get(node)
        if host is None:
            time.sleep(_RETRY_SECONDS)  # it is gone again, or Ray does not name it yet
            return
        actor = ray.remote(Keeper).options(
            name=self._identity.keeper(node),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        rate = self._recovery.verify_bytes_per_second_max
        keeper: Any = actor.remote(
            run=self._identity.run,
            driver=self._identity.driver,
            node=node,
            run_dir=str(self._settings.run_dir),
            checkpoint_storage=self._settings.checkpoint_storage,
            coordinator=self._identity.coordinator,
            failpoints=self._settings.failpoints,
            takeover_seconds=self._recovery.takeover_seconds,
            read_back=ReadBack(bytes_per_second_max=rate) if self._recovery.verify_saves else None,
            exchange=ExchangeSettings(
                host=host,
                secret=self._secret,
                bytes_per_second_max=self._recovery.replication_bytes_per_second_max,
                memory_fraction_max=self._recovery.memory_fraction_max,
            ),
        )
        self._keepers[node] = keeper
        try:
            ray.get(keeper.pid.remote())
        except ActorDiedError as error:
            # One that dies later is restarted; one whose constructor fails would leave the run waiting in silence.
            ray.get(self._coordinator.keeper_failed.remote(node, str(error)))
