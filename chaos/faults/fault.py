"""One fault: inject, name, available. And what it is given to strike.

A fault strikes one victim of a running run, and returns what it did, or None if there is no such victim at this
moment (a process that has just died, no checkpoint yet): then it is tried again a little later.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.observe.ledger import LEDGER_FILE, read_ledger


@dataclass(slots=True, kw_only=True)
class Target:
    """A run under attack. status: as SupervisedTrainer.status(), {} while nobody answers. driver_pid: of the process
    in which fit() runs; start_driver starts another one and returns its pid."""

    run_dir: Path
    status: Callable[[], dict[str, Any]]
    driver_pid: int | None = None
    start_driver: Callable[[], int] | None = None

    def ledger(self) -> list[dict[str, Any]]:
        try:
            return read_ledger(self.run_dir / LEDGER_FILE)
        except FileNotFoundError:
            return []

    def newest(self, kind: str) -> dict[str, Any] | None:
        """The ledger's last entry of a kind."""
        return next((entry for entry in reversed(self.ledger()) if entry["kind"] == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """What was done. context: for the marker; "rank" and "generation" where one was hit, "checkpoint" and "damage"
    where bytes were changed. release: ends a fault that lasts; None for one that does not. effect_seconds: how long it
    may take until one that was only announced strikes."""

    context: Mapping[str, Any]
    release: Callable[[], None] | None = None
    effect_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """name, a sentence, what it needs. available: why it cannot be done on this machine, None if it can."""

    name: str
    description: str
    inject: Callable[[Target, random.Random], Injected | None]
    needs: str = "nothing"
    available: Callable[[], str | None] = field(default=lambda: None)
