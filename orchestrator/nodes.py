"""Which of the cluster's nodes are there: Ray's own word on it, looked up once a second.

Ray Train notices a lost node only through the worker that was on it, and keepers are told of by nobody: without this, a
save that a lost keeper was to write would hold up all later ones.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

logger = logging.getLogger("lastgood")

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that had agents or a keeper of the run is gone; one that comes back is another node to Ray."""

    node: str


async def alive() -> dict[str, dict[str, float]]:
    """The nodes that Ray takes for alive: id -> resources, also those that are in use."""
    return await asyncio.to_thread(_alive)


async def watch(in_use: Callable[[], Iterable[str]], put: Callable[[NodeLost], Any]) -> None:
    """Put one event for each node that was in use and is gone; runs until it is cancelled."""
    told: set[str] = set()
    while True:
        try:
            there = await alive()
        except (RayError, RuntimeError) as error:  # Ray's head does not answer for a while
            logger.warning("lastgood: Ray does not say which nodes are alive: %s", error)
        else:
            for node in set(in_use()) - there.keys() - told:
                told.add(node)
                put(NodeLost(node))
        await asyncio.sleep(_LOOK_SECONDS)


def _alive() -> dict[str, dict[str, float]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
