"""Fault points: named places where a chaos test may make something go wrong.

Production code calls `hit(name, **context)` at each boundary of a protocol. Nothing is armed outside chaos tests, and
an unarmed `hit` costs one comparison. An armed point fires once in the whole run, however many processes and
generations pass
it: firing first creates a marker file exclusively, so that a step which is done again after the restore does not
fire again. The marker is also the record: it says which fault fired, where and when.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Action = Literal["kill_rank", "kill_self", "stop_rank", "enospc", "eio", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One fault: where (point, and the context that must match), and what (action).

    `when` maps context keys to the value they must have, e.g. {"rank": 1, "step": 40}. A key that ends in "_min"
    matches every value that is at least as large; "index_fraction" matches the middle of a loop: index >= fraction x
    total.
    """

    id: str
    point: str
    action: Action = "kill_rank"
    when: dict[str, float] = field(default_factory=dict)


class InjectedError(Exception):
    """Raised by the action "raise": stands in for a user's exception."""


_armed: tuple[Arm, ...] = ()
_marker_dir: Path | None = None


def arm(arms: Sequence[Arm], marker_dir: Path) -> None:
    """Arm this process (and what it forks); an empty sequence disarms."""
    global _armed, _marker_dir
    _armed = tuple(arms)
    _marker_dir = marker_dir


def hit(name: str, **context: Any) -> None:
    """Pass the fault point `name`; does nothing unless a matching fault is armed and has not fired yet."""
    if not _armed:
        return
    for candidate in _armed:
        if candidate.point == name and _matches(candidate, context) and _claim(candidate, context):
            _fire(candidate, context)


def _matches(candidate: Arm, context: dict[str, Any]) -> bool:
    for key, wanted in candidate.when.items():
        if key == "index_fraction":
            if context["index"] < int(wanted * context["total"]):  # a loop of one round is hit at its start
                return False
        elif key.endswith("_min"):
            if context.get(key.removesuffix("_min"), -1) < wanted:
                return False
        elif context.get(key) != wanted:
            return False
    return True


def _claim(candidate: Arm, context: dict[str, Any]) -> bool:
    assert _marker_dir is not None
    _marker_dir.mkdir(parents=True, exist_ok=True)
    record = {**asdict(candidate), "at": time.time(), "pid": os.getpid(), "context": context}
    try:
        with open(_marker_dir / f"{candidate.id}.json", "x", encoding="utf-8") as marker:
            json.dump(record, marker)
    except FileExistsError:
        return False
    return True


def _fire(candidate: Arm, context: dict[str, Any]) -> None:
    match candidate.action:
        case "kill_self":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill_rank":
            os.kill(context.get("rank_pid") or os.getpid(), signal.SIGKILL)
        case "stop_rank":
            os.kill(context.get("rank_pid") or os.getpid(), signal.SIGSTOP)
        case "enospc":
            raise OSError(errno.ENOSPC, f"injected at {candidate.point}")
        case "eio":
            raise OSError(errno.EIO, f"injected at {candidate.point}")
        case "raise":
            raise InjectedError(f"injected at {candidate.point}")
