"""How much memory the snapshots take on a node, and whether they fit. Arithmetic, and the files it starts from.

The bounds are the machine, each control group that the process is in (a container has the memory of its group, not of
the machine), and the threshold above which Ray kills workers. The one that leaves the least room counts.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.control_groups import field, memory_group, read_text

_RAY_THRESHOLD_DEFAULT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A limit of memory, of which `available_bytes` are not in use, and the part `fraction_max` may be."""

    what: str
    limit_bytes: int
    available_bytes: int
    fraction_max: float
    remedy: str

    @property
    def room_bytes(self) -> int:
        """What may still be taken."""
        return max(0, int(self.available_bytes - (1 - self.fraction_max) * self.limit_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a node's snapshots take, if all its ranks hold as much as this one.

    image_bytes: of one snapshot. replicas: copies of other nodes' snapshots, for each local rank. held_bytes: what a
    rank has of it already.
    """

    image_bytes: int
    slots: int
    local_ranks: int
    replicas: int = 0
    held_bytes: int = 0

    @property
    def missing_bytes(self) -> int:
        """What is still to be taken."""
        return max(0, self.image_bytes * (self.slots + self.replicas) - self.held_bytes) * self.local_ranks


def bounds(
    fraction_max: float,
    *,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    environment: Mapping[str, str] = os.environ,
) -> list[Bound]:
    """All that holds for this process; `fraction_max` is the part of each that the user allows to be in use."""
    meminfo = read_text(proc / "meminfo")
    total, available = ((field(meminfo, name) or 0) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    found = [("this node's memory", total, available)]
    group = memory_group("self", proc=proc, cgroup=cgroup)
    while group is not None:
        if (limit := group.limit_bytes) is not None:
            found.append((f"the limit of control group {group.name}", limit, limit - group.used_bytes))
        group = group.above
    threshold = _ray_threshold(environment)
    if threshold < fraction_max:
        fraction_max, remedy = threshold, "raise RAY_memory_usage_threshold, where Ray is started"
    else:
        remedy = "raise RecoveryConfig.memory_fraction_max"
    return [
        Bound(what=what, limit_bytes=limit, available_bytes=left, fraction_max=fraction_max, remedy=remedy)
        for what, limit, left in found
    ]


def problem(need: Need, limits: Sequence[Bound]) -> str | None:
    """Why the snapshots do not fit, with the numbers and what can be done; None if they do."""
    tightest = min(limits, key=lambda bound: bound.room_bytes)
    if need.missing_bytes <= tightest.room_bytes:
        return None
    copies = f"{need.slots} slots" if not need.replicas else f"({need.slots} slots + {need.replicas} replicas)"
    held = f", less the {_mib(need.held_bytes)} that each has already" if need.held_bytes else ""
    without_copies = "set RecoveryConfig.replicate_snapshots to False, " if need.replicas else ""
    return (
        f"the snapshots need {_mib(need.missing_bytes)} more on this node ({copies} x {_mib(need.image_bytes)} x "
        f"{need.local_ranks} ranks{held}), but of {tightest.what}, {_mib(tightest.limit_bytes)}, "
        f"{tightest.fraction_max:.0%} may be in use, which leaves {_mib(tightest.room_bytes)}; lower "
        f"RecoveryConfig.snapshot_slots, {without_copies}{tightest.remedy}, or use more nodes"
    )


def _ray_threshold(environment: Mapping[str, str]) -> float:
    """The part of memory in use from which on Ray kills workers; 1 if it does not look."""
    if environment.get("RAY_memory_monitor_refresh_ms") == "0":
        return 1.0
    try:
        threshold = float(environment.get("RAY_memory_usage_threshold", _RAY_THRESHOLD_DEFAULT))
    except ValueError:
        return _RAY_THRESHOLD_DEFAULT
    return threshold if 0 <= threshold <= 1 else _RAY_THRESHOLD_DEFAULT


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
