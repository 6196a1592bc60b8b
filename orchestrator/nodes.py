"""Which of the cluster's nodes are there: Ray's own word on it, looked up once a second.

Ray Train notices a lost node only through the worker that was on it, and keepers are told of by nobody: without this, a
save that a lost keeper was to write would hold up all later ones.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.decide.nodes import fits

logger = logging.getLogger("lastgood")

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that had agents or a keeper of the run is gone; one that comes back is another node to Ray."""

    node: str


class NodeWatch:
    """`in_use()`: the nodes that the run uses now. `there`: what was seen last, id -> all resources of a node that Ray
    takes for alive; nothing before the first look."""

    def __init__(self, in_use: Callable[[], Iterable[str]]) -> None:
        self._in_use = in_use
        self.there: dict[str, dict[str, float]] = {}

    async def look(self) -> dict[str, dict[str, float]]:
        self.there = await asyncio.to_thread(_alive)
        return self.there

    async def run(self, put: Callable[[NodeLost], Any]) -> None:
        """Put one event for each node that was in use and is gone; until it is cancelled."""
        told: set[str] = set()
        while True:
            try:
                there = await self.look()
            except (RayError, RuntimeError) as error:  # Ray's head does not answer for a while
                logger.warning("lastgood: Ray does not say which nodes are alive: %s", error)
            else:
                for node in set(self._in_use()) - there.keys() - told:
                    told.add(node)
                    put(NodeLost(node))
            await asyncio.sleep(_LOOK_SECONDS)

    def room_without(self, excluded: Iterable[str], needed: Mapping[str, float]) -> bool:
        """Whether the other nodes have the resources, in use or not."""
        out = frozenset(excluded)
        return fits(needed, [resources for node, resources in self.there.items() if node not in out])


def addresses() -> dict[str, str]:
    """The address of each node that Ray takes for alive."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}


def _alive() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in _alive_nodes()}


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
