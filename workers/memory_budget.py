"""How much memory the snapshots may take on a node, and whether they fit. Arithmetic, and the files it starts from.

The bounds are the machine, each control group that the process is in (a container's memory is that of its group, not of
the machine), and the threshold at which Ray starts to kill its workers. The smallest room counts.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RAY_THRESHOLD_DEFAULT = 0.95
_UNLIMITED_BYTES = 1 << 60  # cgroup version 1 says "no limit" with the largest number of whole pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One limit of memory: `what` names it, `limit_bytes` is all there is, `available_bytes` what is not in use of it.
    `fraction_max`: the part of it that may be in use, and why not more.
    """

    what: str
    limit_bytes: int
    available_bytes: int
    fraction_max: float
    reason: str

    @property
    def room_bytes(self) -> int:
        """What may still be taken."""
        return max(0, int(self.available_bytes - (1 - self.fraction_max) * self.limit_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a node's snapshots will take: `slots` a rank, each of `image_bytes`, and `replicas`, copies of other nodes'
    snapshots, a rank; `held_bytes` of all that is there already, over all ranks."""

    image_bytes: int
    slots: int
    local_ranks: int
    replicas: int = 0
    held_bytes: int = 0

    @property
    def missing_bytes(self) -> int:
        """What is still to be taken."""
        return max(0, self.image_bytes * (self.slots + self.replicas) * self.local_ranks - self.held_bytes)


def bounds(
    fraction_max: float,
    *,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    environment: Mapping[str, str] = os.environ,
) -> list[Bound]:
    """All limits that hold for this process. `fraction_max`: of any of them, what the user allows to be in use."""
    machine = _fields(_read(proc / "meminfo"))
    threshold = ray_threshold(environment)
    of_user = "RecoveryConfig.memory_fraction_max"
    found = [
        (
            "this node's memory",
            machine.get("MemTotal:", 0) * 1024,
            machine.get("MemAvailable:", 0) * 1024,
        ),
        *(
            (f"the control group {group}", limit_bytes, limit_bytes - used_bytes)
            for group, limit_bytes, used_bytes in _group_limits(proc, cgroup)
        ),
    ]
    result = []
    for what, limit_bytes, available_bytes in found:
        if threshold is not None and threshold < fraction_max:
            fraction, reason = threshold, "Ray's RAY_memory_usage_threshold, above which it kills workers"
        else:
            fraction, reason = fraction_max, of_user
        result.append(
            Bound(
                what=what,
                limit_bytes=limit_bytes,
                available_bytes=available_bytes,
                fraction_max=fraction,
                reason=reason,
            )
        )
    return result


def ray_threshold(environment: Mapping[str, str]) -> float | None:
    """The part of memory in use from which on Ray kills workers; None if its monitor is switched off."""
    if environment.get("RAY_memory_monitor_refresh_ms") == "0":
        return None
    try:
        threshold = float(environment.get("RAY_memory_usage_threshold", RAY_THRESHOLD_DEFAULT))
    except ValueError:
        return RAY_THRESHOLD_DEFAULT
    return threshold if 0 <= threshold <= 1 else RAY_THRESHOLD_DEFAULT


def problem(need: Need, limits: list[Bound]) -> str | None:
    """Why these snapshots do not fit, with the numbers and what can be done; None if they do."""
    tightest = min(limits, key=lambda bound: bound.room_bytes)
    if need.missing_bytes <= tightest.room_bytes:
        return None
    replicas = f" + {need.replicas} replicas" if need.replicas else ""
    held = f" - {_mib(need.held_bytes)} that are there already" if need.held_bytes else ""
    return (
        f"the snapshots need {_mib(need.missing_bytes)} on this node (({need.slots} slots{replicas}) x "
        f"{_mib(need.image_bytes)} x {need.local_ranks} ranks{held}), but only {_mib(tightest.room_bytes)} are left of "
        f"{tightest.what}: {_mib(tightest.available_bytes)} of {_mib(tightest.limit_bytes)} are not in use, and "
        f"{tightest.fraction_max:.0%} may be ({tightest.reason}); lower RecoveryConfig.snapshot_slots, raise the limit, "
        f"or use more nodes"
    )


def _group_limits(proc: Path, cgroup: Path) -> Iterator[tuple[str, int, int]]:
    """(group, limit, used) of the process's memory control group and of those above it, where they have a limit.

    Used is what cannot be given up: the page cache of files that nobody writes is not counted.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            root, files = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif hierarchy == "0" and (cgroup / "cgroup.controllers").exists():
            root, files = cgroup, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        # In a container the path may be the host's, and what is mounted the container's own.
        group = root / path.lstrip("/")
        group = group if group.is_dir() else root
        while True:
            limit, used = _read(group / files[0]).strip(), _read(group / files[1]).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED_BYTES:
                cache_bytes = _fields(_read(group / "memory.stat")).get(files[2], 0)
                yield f"/{group.relative_to(root)}".replace("/.", "/"), int(limit), max(0, int(used) - cache_bytes)
            if group == root:
                break
            group = group.parent


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, int]:
    """The number after the name at the start of each line."""
    words = (line.split() for line in text.splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) >= 2 and word[1].isdecimal()}


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
