"""What is simulated: a job, what its saves and restores cost, and who says how often it saves."""

import math
from dataclasses import dataclass
from typing import Protocol

from chaos.simulator.draws import NOTHING, Cost
from chaos.simulator.failures import Failure
from orchestrator.decide.budget import Limits
from orchestrator.decide.tuner import TierName


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Of one tier. A save begins at a step's end; from there training stands still for `stall`, and is slowed by
    `interference` in all; `durable` after its beginning it can be restored. `restart`: from a failure until training
    goes on from this tier."""

    stall: Cost
    interference: Cost = NOTHING
    durable: Cost = NOTHING
    restart: Cost = NOTHING

    @property
    def pause_seconds(self) -> float:
        return self.stall.mean + self.interference.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Ends after horizon_seconds of wall time, or with work_seconds of training, whichever comes first.

    memory: costs of snapshots that stay in memory; None if there are none. state_bytes: what a save writes. damaged:
    the part of checkpoints, 0 to 1, that turn out not to verify when they are to be restored. max_failures, keep_last:
    as in RecoveryConfig.
    """

    durable: SaveCosts
    memory: SaveCosts | None = None
    step_seconds: float = 1.0
    horizon_seconds: float = math.inf
    work_seconds: float = math.inf
    state_bytes: int = 0
    keep_last: int = 3
    damaged: float = 0.0
    max_failures: Limits = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Training time between saves of each tier. A durable save counts for both; memory_seconds None: no others."""

    durable_seconds: float
    memory_seconds: float | None = None


class Policy(Protocol):
    """Says how often to save. `up` is the run's clock: wall time without the time in which it was down."""

    @property
    def review_at(self) -> float:
        """On the run's clock, when it wants to be asked again if nothing happens before; infinite for never."""

    def intervals(self, up: float) -> Intervals: ...

    def saved(
        self, tier: TierName, stall_seconds: float, durable_seconds: float, interference_seconds: float
    ) -> None: ...

    def failed(self, failure: Failure, up: float) -> None: ...

    def restarted(self, tier: TierName, seconds: float) -> None: ...
