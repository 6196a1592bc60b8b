"""Which memory control group a process is in, and what it is allowed; versions 1 and 2."""

from dataclasses import dataclass
from pathlib import Path

# Version 1 says "no limit" with the largest number of whole pages.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A control group's directory, and that of the topmost one which can be seen from here."""

    path: Path
    root: Path

    @property
    def name(self) -> str:
        """Its path below the topmost one."""
        return "/" if self.path == self.root else f"/{self.path.relative_to(self.root)}"

    @property
    def above(self) -> "MemoryGroup | None":
        """The group that this one is in; None for the topmost."""
        return None if self.path == self.root else MemoryGroup(path=self.path.parent, root=self.root)

    @property
    def limit_bytes(self) -> int | None:
        """What all its processes together may use; None if there is no limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(self.path / name).strip()
            if text.isdecimal():
                return int(text) if int(text) < _UNLIMITED_BYTES else None
        return None

    @property
    def used_bytes(self) -> int:
        """What they use and could not give back: without file contents that were not looked at lately."""
        stat = read_text(self.path / "memory.stat")
        for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
            text = read_text(self.path / name).strip()
            if text.isdecimal():
                return max(0, int(text) - (field(stat, cache) or 0))
        return 0


def memory_group(process: str, *, proc: Path, cgroup: Path) -> MemoryGroup | None:
    """The group of a process, a pid or "self"; None if the process is gone, or its group cannot be seen."""
    for line in read_text(proc / process / "cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            root = cgroup / "memory"
        elif hierarchy == "0" and (cgroup / "cgroup.controllers").exists():
            root = cgroup
        else:
            continue
        # In a container the path may be the host's, and what is mounted the container's own.
        for candidate in (root / path.lstrip("/"), root):
            if candidate.is_dir():
                return MemoryGroup(path=candidate, root=root)
    return None


def read_text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def field(text: str, name: str) -> int | None:
    """The number after `name` at the start of a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
