"""What restarts took, from the ledger: entries in, restarts out.

A restart lasts from a failure until the last rank has finished a step again. Of failures that follow each other without
such a step in between, the first one took the run down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """`source`: where the state came from, as the generation's entry says."""

    source: str
    seconds: float


class Restarts:
    """Takes entries in the order in which they were written."""

    def __init__(self) -> None:
        self._failed_at: float | None = None
        self._generation = self._ranks = 0
        self._source = "fresh"
        self._first_steps: dict[int, float] = {}

    @property
    def under_way(self) -> bool:
        """Whether there was a failure after which not all ranks have finished a step yet."""
        return self._failed_at is not None

    @property
    def stepped_at(self) -> float | None:
        """When the last rank had finished its first step of the newest generation; None if not all have."""
        return max(self._first_steps.values()) if 0 < self._ranks == len(self._first_steps) else None

    def take(self, entry: Mapping[str, Any]) -> Restart | None:
        """An entry of any kind; the restart that it completes."""
        kind = entry["kind"]
        if kind == "generation":
            self._generation, self._ranks = entry["generation"], entry["ranks"]
            self._source = entry.get("source", "fresh")
            self._first_steps.clear()
        elif kind == "failure" and self._failed_at is None:
            self._failed_at = float(entry["failed_at"])
        elif kind == "first_step" and entry["generation"] == self._generation:
            self._first_steps[entry["rank"]] = float(entry["at_step"])
            if self._failed_at is not None and self.stepped_at is not None:
                seconds, self._failed_at = self.stepped_at - self._failed_at, None
                return Restart(source=self._source, seconds=seconds)
        return None
