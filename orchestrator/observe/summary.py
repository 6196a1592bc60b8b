"""The ledger, folded into how a run is doing. Pure: entries in, a summary out."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.observe.accounting import Accounting
from orchestrator.observe.restarts import Restarts


@dataclass(slots=True)
class Summary:
    """`state`: "starting", "training", "recovering", "finished" or "stopped". Times are Unix seconds.

    step: the highest that the ledger names; the run may be further. accounting: where its time went.
    source: where the newest generation's state came from: "fresh", "checkpoint" or "memory".
    batches_skipped: after bad losses; saves that were skipped are in `skipped`.
    unprotected_since: only while saves fail and the newest saved state is older than the user's limit.
    recovery_seconds: of each failure that was recovered from, until the last rank's first new step.
    """

    state: str = "starting"
    step: int = 0
    generation: int = 0
    ranks: int = 0
    source: str | None = None
    drivers: set[str] = field(default_factory=set)
    committed_step: int | None = None
    committed_at: float | None = None
    checkpoint: str | None = None
    commits: int = 0
    skipped: int = 0
    failed_saves: int = 0
    durable_seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: dict[str, Any] | None = None
    batches_skipped: int = 0
    recovery_seconds: list[float] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    stop_reason: str | None = None
    unprotected_since: float | None = None
    last_at: float | None = None
    accounting: Accounting = field(default_factory=Accounting)
    _restored_step: int = 0
    _restarts: Restarts = field(default_factory=Restarts)

    @property
    def protected_to(self) -> str:
        return "nothing is saved yet" if self.committed_step is None else f"step {self.committed_step}"

    @property
    def lost_steps(self) -> int:
        """Trained again, over all failures."""
        return sum(cost.lost_steps for cost in self.accounting.costs)

    @property
    def durable_seconds_median(self) -> float | None:
        return statistics.median(self.durable_seconds) if self.durable_seconds else None

    @property
    def recovery_seconds_median(self) -> float | None:
        return statistics.median(self.recovery_seconds) if self.recovery_seconds else None

    def add(self, entry: dict[str, Any]) -> None:
        """Take in the next entry; unknown kinds change nothing. Raises KeyError, TypeError or ValueError for one that
        does not say what its kind says."""
        self.last_at = entry.get("at", self.last_at)
        if isinstance(entry.get("step"), int):
            self.step = max(self.step, entry["step"])
        self.accounting.add(entry)
        if restart := self._restarts.take(entry):
            self.recovery_seconds.append(restart.seconds)
        match entry["kind"]:
            case "coordinator":
                self.drivers.add(entry["driver"])
                if not entry.get("resumed"):
                    self.state, self.stop_reason = "starting", None
            case "generation":
                self._generation(entry)
            case "first_step":
                self.state = "training"
            case "progress" if self.state == "starting" and entry["generation"] == self.generation:
                self.state = "training"  # a driver that was refused said that it began
            case "commit" if entry["generation"] < self.generation and entry["step"] > self._restored_step:
                pass  # too late: the run had gone on without it
            case "commit":
                self.commits += 1
                if self.state == "stopped":  # it was another driver that stopped, which this one's processes kept out
                    self.state, self.stop_reason = "training", None
                self.committed_step, self.checkpoint = entry["step"], entry["checkpoint"]
                self.committed_at = entry["at"]
                self.durable_seconds.append(entry["durable_seconds"])
                self.unprotected_since = None
            case "unprotected":
                self.unprotected_since = entry["since"]
            case "save_skipped":
                self.skipped += 1
            case "save_failed":
                self.failed_saves += bool(entry["final"])
            case "failure":
                self.state = "recovering"
                self.failures[entry["cause"]] += 1
                self.last_failure = entry
            case "skip":
                self.batches_skipped += len(entry["batches"])
            case "quarantine":
                self.quarantined[entry["checkpoint"]] = entry["reason"]
            case "memory_dropped":
                self.quarantined[f"memory of step {entry['step']}"] = entry["reason"]
            case "finished":
                self.state = "finished"
            case "stopped":
                self.state, self.stop_reason = "stopped", entry["reason"]

    def _generation(self, entry: dict[str, Any]) -> None:
        self.state = "recovering" if self._restarts.under_way else "starting"
        self.generation, self.ranks, self.stop_reason = entry["generation"], entry["ranks"], None
        self._restored_step, self.source = entry["restored_step"], entry.get("source")


def summarize(entries: Iterable[dict[str, Any]]) -> Summary:
    summary = Summary()
    for entry in entries:
        summary.add(entry)
    return summary
