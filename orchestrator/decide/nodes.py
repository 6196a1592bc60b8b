"""Which node the run does better without. Failures in, a node out; no clock, no Ray, no disk.

Invariants: a node is blamed only for causes that may lie in a machine, and only where another node had ranks too and
none of these failures: where all ranks are on one node, nothing tells the node from the training. What the loop did
wrong, what was announced and what nobody knows neither blames nor clears a node.
"""

from collections.abc import Collection, Mapping

from orchestrator.decide.causes import MACHINE_CAUSES

FAILURES_MAX = 3
WINDOW_SECONDS = 3600.0


class NodeBlame:
    """Remembers the last failures. `at` is a clock in seconds."""

    def __init__(self) -> None:
        self._failures: list[tuple[str, float]] = []

    def failed(self, cause: str, node: str | None, nodes: Collection[str], *, at: float) -> str | None:
        """A generation on `nodes` failed, first on `node`; returns the node to exclude, if there is one now."""
        if cause not in MACHINE_CAUSES or node is None or len(set(nodes)) < 2:
            return None
        self._failures = [*self._failures, (node, at)][-FAILURES_MAX:]
        blamed = [when for where, when in self._failures if where == node]
        if len(blamed) < FAILURES_MAX or at - blamed[0] > WINDOW_SECONDS:
            return None
        self._failures = []
        return node


def fits(needed: Mapping[str, float], nodes: Collection[Mapping[str, float]]) -> bool:
    """Whether these nodes have the resources, as far as their sums tell."""
    return bool(nodes) and all(sum(node.get(name, 0.0) for node in nodes) >= n for name, n in needed.items())
