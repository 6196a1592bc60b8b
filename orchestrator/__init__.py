"""What decides: membership, commits, recovery; and the trainer that users start.

The names are looked up when they are first used: a rank that unpickles a loop from a script imports this package too,
and the decisions and the command line need no Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config import RecoveryConfig
    from orchestrator.trainer import SupervisedResult, SupervisedTrainer

__all__ = ["RecoveryConfig", "SupervisedResult", "SupervisedTrainer"]

_HOMES = {
    "RecoveryConfig": "orchestrator.config",
    "SupervisedResult": "orchestrator.trainer",
    "SupervisedTrainer": "orchestrator.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
