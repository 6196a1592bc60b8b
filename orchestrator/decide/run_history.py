"""The run's own clock, and the failures on it, as the ledger tells them. Ledger entries in, failures out.

Invariants:
- The clock runs while a generation does: from its start until its failure struck. It stands still in between, so
  neither downtime nor a night without a driver counts as time without failures.
- A generation that ends without a word (its driver was killed) ran until the last entry before the next driver's.
- A failure in whose course a node was lost, before or after the entry, is one of the node.
- The same entries, taken one by one as they are written or all at once after a restart, give the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from orchestrator.decide.failure_rate import Domain


class Learner(Protocol):
    """Who is told: a FailureRate or a Tuner."""

    def failed(self, at: float, *, cause: str, domain: Domain) -> None: ...

    def resized(self, at: float, ranks: int) -> None: ...


class RunHistory:
    """Tells `learner` what happened, on the run's clock."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._ran_seconds = 0.0
        self._since: float | None = None
        self._last_at = 0.0
        self._cause: str | None = None
        self._node_lost = False

    def take_all(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            self.take(entry)

    def take(self, entry: Mapping[str, Any]) -> None:
        """An entry of the ledger; of kinds that do not matter here too."""
        kind = entry["kind"]
        if kind == "generation":
            self._stop(self._last_at)
            self._since, self._cause, self._node_lost = float(entry["at"]), None, False
            self._learner.resized(self._ran_seconds, int(entry["ranks"]))
        elif kind == "failure":
            self._stop(float(entry["failed_at"]))
            self._cause = str(entry["cause"])
            self._tell(self._cause)
        elif kind == "node_lost":
            self._node_lost = True
            if self._cause is not None:
                self._tell(self._cause)
        elif kind in ("finished", "stopped"):
            self._stop(float(entry["at"]))
        elif kind == "coordinator" and not entry["resumed"]:
            self._stop(self._last_at)
        self._last_at = max(self._last_at, float(entry["at"]))

    def at(self, unix_seconds: float) -> float:
        """What the run's clock says at that time, which is no earlier than the last entry's."""
        return self._ran_seconds + (max(0.0, unix_seconds - self._since) if self._since is not None else 0.0)

    def _tell(self, cause: str) -> None:
        self._learner.failed(self._ran_seconds, cause=cause, domain="node" if self._node_lost else "process")

    def _stop(self, unix_seconds: float) -> None:
        self._ran_seconds = self.at(unix_seconds)
        self._since = None
