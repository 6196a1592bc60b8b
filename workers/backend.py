"""How Ray Train starts a worker that is an agent: the only hook that runs in the worker's main thread."""

from typing import Any

from ray.train.backend import Backend, BackendConfig

from workers import termination


class AgentBackendConfig(BackendConfig):
    """For Ray Train's workers that are agents."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _AgentBackend


class _AgentBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        # Ray's own handler would end the worker at once.
        worker_group.execute(termination.watch)
