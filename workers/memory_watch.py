"""How much memory a rank uses, and whether the kernel has killed for lack of it.

The kernel tells nobody why it sends SIGKILL, but it counts: in the control group of the process that it kills, and,
where that cannot be read, for the whole machine. So a rank that died by a SIGKILL which nobody ordered, while that
counter rose, was killed for lack of memory. A dead process can't be asked how large it was: it is looked at once a
second.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers import processes
from workers.processes import ProcessId

_LOOK_SECONDS = 1.0
# Finding the members of a group means reading all of /proc: often at first, when loader workers start, then rarely.
_GROUP_SECONDS_MAX = 10.0
_VERDICT_SECONDS = 10.0  # a large process takes a while to give its memory back
# cgroup version 1 says "no limit" with the largest number of whole pages
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """Resident memory, in bytes, when it was last looked at; pages that processes share count in each.

    rss_bytes, peak_bytes: of the rank's own process; the peak is the kernel's, the highest since it began.
    group_rss_bytes, group_peak_bytes: of the rank with its loader workers; the peak is the highest that was seen.
    available_bytes: what the node had left. limit_bytes: of the rank's control group; None if it has none.
    """

    at: float
    rss_bytes: int
    peak_bytes: int
    group_rss_bytes: int
    group_peak_bytes: int
    available_bytes: int
    limit_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Kills:
    """The kernel's counter, with the file that it was read from: another file's number cannot be compared."""

    source: str
    count: int


class MemoryWatch:
    """Watches one rank at a time, from its agent. `clock` is monotonic, in seconds; `members` lists a process group."""

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
        members: Callable[[int], list[ProcessId]] = processes.group_members,
    ) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._clock, self._members = clock, members
        self._rank: ProcessId | None = None  # none was followed yet
        self._seen: MemorySeen | None = None

    @property
    def seen(self) -> MemorySeen | None:
        """The last look at the rank that is followed now, or was last."""
        return self._seen

    def follow(self, rank: ProcessId) -> None:
        """From now on this process is the one to watch; what the kernel killed before has nothing to do with it."""
        self._rank, self._seen = rank, None
        self._group: list[ProcessId] = [rank]
        self._looked_at = -float("inf")
        self._group_at = self._followed_at = self._clock()
        self._memory_cgroup: Path | None = None
        self._group_peak_bytes = 0
        self._rose_at: float | None = None
        self._find_cgroup()
        self._kills = self._count_kills()

    def look(self) -> MemorySeen | None:
        """What the rank uses now; None if there is nothing to look at, or the last look was a moment ago."""
        now = self._clock()
        if self._rank is None or now - self._looked_at < _LOOK_SECONDS:
            return None
        self._looked_at = now
        if now - self._group_at >= min(_GROUP_SECONDS_MAX, self._group_at - self._followed_at):
            self._group_at, self._group = now, self._members(self._rank.pid)
        own = self._read_status(self._rank)
        if own is None:
            return None
        others = [self._read_status(member) for member in self._group if member != self._rank]
        group_bytes = own[0] + sum(other[0] for other in others if other is not None)
        self._group_peak_bytes = max(self._group_peak_bytes, group_bytes)
        self._find_cgroup()
        self._note_kills()
        self._seen = MemorySeen(
            at=time.time(),
            rss_bytes=own[0],
            peak_bytes=own[1],
            group_rss_bytes=group_bytes,
            group_peak_bytes=self._group_peak_bytes,
            available_bytes=self._available_bytes(),
            limit_bytes=limit_bytes(self._memory_cgroup) if self._memory_cgroup is not None else None,
        )
        return self._seen

    def killed_by_kernel(self, exit_code: int) -> bool:
        """Whether the rank that was followed, which ended so and on nobody's order, was killed for lack of memory."""
        if self._rank is None or exit_code != -signal.SIGKILL:
            return False
        self._note_kills()
        return self._rose_at is not None and self._clock() - self._rose_at <= _VERDICT_SECONDS

    # ------------------------------------------------------------ files

    def _note_kills(self) -> None:
        now = self._count_kills()
        if now.source == self._kills.source and now.count > self._kills.count:
            self._rose_at = self._clock()
        self._kills = now

    def _count_kills(self) -> _Kills:
        if self._memory_cgroup is not None:
            for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
                path = self._memory_cgroup / name
                count = _field(_read(path), "oom_kill")
                if count is not None:
                    return _Kills(str(path), count)
        path = self._proc / "vmstat"
        return _Kills(str(path), _field(_read(path), "oom_kill") or 0)

    def _find_cgroup(self) -> None:
        """The rank's memory control group; the one that was found before, once the rank is gone."""
        assert self._rank is not None
        self._memory_cgroup = find_cgroup(self._rank.pid, self._proc, self._cgroup) or self._memory_cgroup

    def _read_status(self, process: ProcessId) -> tuple[int, int] | None:
        """Resident bytes and their peak; None if the process is gone."""
        text = _read(self._proc / str(process.pid) / "status")
        rss, peak = _field(text, "VmRSS:"), _field(text, "VmHWM:")
        return None if rss is None or peak is None else (rss * 1024, peak * 1024)

    def _available_bytes(self) -> int:
        return (_field(_read(self._proc / "meminfo"), "MemAvailable:") or 0) * 1024


def find_cgroup(pid: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The directory of a process's memory control group; None if it has none, or the process is gone."""
    found = None
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            root = cgroup / "memory"
        elif hierarchy == "0" and (cgroup / "cgroup.controllers").exists():
            root = cgroup
        else:
            continue
        # In a container the path may be the host's, and what is mounted the container's own.
        candidates = (root / path.lstrip("/"), root)
        found = next((one for one in candidates if one.is_dir()), None)
    return found


def limit_bytes(group: Path) -> int | None:
    """What the processes of a memory control group may use together; None for no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group / name).strip()
        if text.isdecimal():
            return int(text) if int(text) < _UNLIMITED_BYTES else None
    return None


def used_bytes(group: Path) -> int:
    """What they use now, without the page cache that the kernel would drop first."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        text = _read(group / name).strip()
        if text.isdecimal():
            statistics = _read(group / "memory.stat")
            cached = _field(statistics, "total_inactive_file") or _field(statistics, "inactive_file") or 0
            return max(0, int(text) - cached)
    return 0


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> int | None:
    """The number after `name` at the start of a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
