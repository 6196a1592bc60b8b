"""Fault points: named places where a chaos test may make something go wrong.

Production code calls `hit(name, **context)` at each boundary of a protocol. Nothing is armed outside chaos tests, and
an unarmed `hit` costs one comparison. An armed point fires once in the whole run (or `times` times), however many
processes and generations pass it: firing first creates a marker file exclusively, so that a step which is done again
after the restore does not fire again. The marker is also the record: it says which fault fired, where and when.
A test ends a fault early, or one that lasts, with `release`.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Action = Literal["kill_rank", "kill_self", "torn_write", "stop_rank", "enospc", "eio", "raise", "pause"]
"""What goes wrong; "pause" blocks the thread until it is released. "torn_write": the first half of what is about to be
written gets there, and then the process is killed."""

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One fault: where (point, and the context that must match), and what (action).

    `when` maps context keys to the value they must have, e.g. {"rank": 1, "step": 40}. A key that ends in "_min"
    matches every value that is at least as large; "index_fraction" matches the middle of a loop: index >= fraction x
    total. `times`: how often it fires in the run. chaos/points.py lists the points.
    """

    id: str
    point: str
    action: Action = "kill_rank"
    times: int = 1
    when: dict[str, Any] = field(default_factory=dict)


class InjectedError(Exception):
    """Raised by the action "raise": stands in for a user's exception."""


_armed: tuple[Arm, ...] = ()
_marker_dir: Path | None = None


def arm(arms: Sequence[Arm], marker_dir: Path) -> None:
    """Arm this process (and what it forks); an empty sequence disarms."""
    global _armed, _marker_dir
    _armed = tuple(arms)
    _marker_dir = marker_dir


def release(fault: str, marker_dir: Path) -> None:
    """End the fault with this id: it fires no more, and what it paused goes on."""
    marker_dir.mkdir(parents=True, exist_ok=True)
    _release_file(fault, marker_dir).touch()


def hit(name: str, tear: Callable[[], Any] | None = None, /, **context: Any) -> None:
    """Pass the fault point `name`; does nothing unless a matching fault is armed and has not fired yet.

    `tear` writes the first half of what is written next, for "torn_write".
    """
    if not _armed:
        return
    for candidate in _armed:
        if candidate.point == name and _matches(candidate, context) and _claim(candidate, context):
            _fire(candidate, context, tear)


def _matches(candidate: Arm, context: dict[str, Any]) -> bool:
    for key, wanted in candidate.when.items():
        if key == "index_fraction":
            if context["index"] < int(float(wanted) * context["total"]):  # a loop of one round is hit at its start
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
    if _release_file(candidate.id, _marker_dir).exists():
        return False
    record = {**asdict(candidate), "at": time.time(), "pid": os.getpid(), "context": context}
    for number in range(1, candidate.times + 1):
        name = candidate.id if number == 1 else f"{candidate.id}-{number}"
        try:
            with open(_marker_dir / f"{name}.json", "x", encoding="utf-8") as marker:
                json.dump(record, marker)
        except FileExistsError:
            continue
        return True
    return False


def _release_file(fault: str, marker_dir: Path) -> Path:
    return marker_dir / f"{fault}.released"


def _fire(candidate: Arm, context: dict[str, Any], tear: Callable[[], Any] | None) -> None:
    match candidate.action:
        case "torn_write":
            assert tear is not None, f"nothing is written at {candidate.point}"
            tear()
            os.kill(os.getpid(), signal.SIGKILL)
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
        case "pause":
            assert _marker_dir is not None
            while not _release_file(candidate.id, _marker_dir).exists():
                time.sleep(_POLL_SECONDS)
        case "raise":
            raise InjectedError(f"injected at {candidate.point}")
