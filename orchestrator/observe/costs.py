"""What saves and restarts took in a run, from its ledger. Pure: entries in, samples out.

- stall: of each committed save, on the slowest rank. - durable: from a save's step boundary until it was committed,
reading back included: from then on it could be restored. - copied: until its snapshot was complete in memory.
- interference: by how much steps were slower in all while the save was written.
- step: of the training, as the ledger says, else from the time between two commits of a generation.
- restart: from a failure until the last rank had finished a step, less that step, by where the state came from.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.observe.restarts import Restarts


@dataclass(slots=True, kw_only=True)
class RunCosts:
    """Samples, in seconds. `bytes`: of the newest checkpoint, 0 if there is none. `step_seconds`: None if the ledger
    does not show it. `restart_seconds`: by "memory", "checkpoint" or "fresh"."""

    stall_seconds: list[float] = field(default_factory=list)
    durable_seconds: list[float] = field(default_factory=list)
    interference_seconds: list[float] = field(default_factory=list)
    copied_seconds: list[float] = field(default_factory=list)
    restart_seconds: dict[str, list[float]] = field(default_factory=dict)
    step_seconds: float | None = None
    bytes: int = 0
    ranks: int = 1
    nodes: int = 1

    def restarts_from(self, source: str) -> list[float]:
        """Those from there; if there were none, all others."""
        return self.restart_seconds.get(source) or [one for some in self.restart_seconds.values() for one in some]


def run_costs(entries: Iterable[Mapping[str, Any]]) -> RunCosts:
    """Kinds that say nothing of this are passed over."""
    reader = _Reader()
    for entry in entries:
        reader.add(entry)
    return reader.finish()


@dataclass(slots=True)
class _Reader:
    """Between entries: the newest generation's newest commit, and what steps took between commits."""

    costs: RunCosts = field(default_factory=RunCosts)
    _restarts: Restarts = field(default_factory=Restarts)
    _last_commit: Mapping[str, Any] | None = None
    _steps: list[float] = field(default_factory=list)

    def add(self, entry: Mapping[str, Any]) -> None:
        if restart := self._restarts.take(entry):
            self.costs.restart_seconds.setdefault(restart.source, []).append(restart.seconds)
        match entry["kind"]:
            case "generation":
                self.costs.ranks, self.costs.nodes = entry["ranks"], entry.get("nodes", 1)
                self._last_commit = None
            case "cadence":
                self.costs.step_seconds = entry["inputs"]["step_seconds"]
            case "commit":
                self._commit(entry)

    def finish(self) -> RunCosts:
        costs = self.costs
        if costs.step_seconds is None and self._steps:
            costs.step_seconds = statistics.median(self._steps)
        for source, seconds in costs.restart_seconds.items():
            costs.restart_seconds[source] = [max(0.0, one - (costs.step_seconds or 0.0)) for one in seconds]
        return costs

    def _commit(self, entry: Mapping[str, Any]) -> None:
        costs = self.costs
        costs.stall_seconds.append(entry["stall_seconds"])
        costs.copied_seconds.append(entry["copy_seconds"])
        costs.durable_seconds.append(entry["copy_seconds"] + entry["commit_seconds"])
        costs.interference_seconds.append(entry.get("interference_seconds", 0.0))
        costs.bytes = entry["bytes"]
        last, self._last_commit = self._last_commit, entry
        if last is not None and last["generation"] == entry["generation"] and entry["step"] > last["step"]:
            trained = _boundary(entry) - _boundary(last) - last["stall_seconds"]
            self._steps.append(max(0.0, trained) / (entry["step"] - last["step"]))


def _boundary(commit: Mapping[str, Any]) -> float:
    """When the step was over that a commit holds; its `snapshot_at` is when the copy was complete."""
    return float(commit["snapshot_at"] - commit["copy_seconds"])
