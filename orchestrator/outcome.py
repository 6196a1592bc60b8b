"""What the driver and its coordinator tell each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import RecoveryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """`run` is the same for every driver of the run directory, `driver` names this one. `needed`: the resources of all
    ranks together; `can_exclude`: whether Ray Train can be told to leave a node out."""

    run: str
    driver: str
    run_dir: Path
    recovery: RecoveryConfig
    needed: dict[str, float]
    can_exclude: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run stands. `error` is None for a run that finished; `error_type` names a class of workers.errors."""

    ended: bool
    error: str | None = None
    error_type: str = "TrainingFailed"
    step: int = 0
    generation: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
