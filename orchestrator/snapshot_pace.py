"""Tells ranks how often to take snapshots that stay in memory; the wiring of decide/cadence.py."""

from collections.abc import Callable
from dataclasses import asdict

from orchestrator.config import RecoveryConfig
from orchestrator.decide.cadence import SnapshotCadence
from orchestrator.observe.ledger import Ledger, read_ledger
from workers.keeper_messages import HeldSnapshot
from workers.messages import Command, RankPulse, SnapshotEvery


class SnapshotPace:
    """`post_to_agents(command)` sends a command."""

    def __init__(self, config: RecoveryConfig, ledger: Ledger, post_to_agents: Callable[[Command], None]) -> None:
        self._ledger = ledger
        self._post_to_agents = post_to_agents
        before = [entry["steps"] for entry in read_ledger(ledger.path) if entry["kind"] == "snapshot_every"]
        self._cadence = SnapshotCadence(
            config.snapshot_every_steps, config.snapshot_overhead_max, before=before[-1] if before else None
        )

    @property
    def steps(self) -> int | None:
        """After how many steps; None for never."""
        return self._cadence.steps

    def pulse(self, event: RankPulse) -> None:
        self._cadence.steps_took(event.step_seconds)

    def snapshotted(self, held: HeldSnapshot, running: int) -> None:
        """`running`: the generation that runs. A snapshot that was handed over to another keeper has no costs."""
        if not held.copy_seconds:
            return
        change = self._cadence.copied(held.generation, held.step, held.copy_seconds)
        if change is not None:
            self._ledger.append("snapshot_every", generation=running, **asdict(change))
            self._post_to_agents(SnapshotEvery(generation=running, steps=change.steps))
