"""Memory that runs out, for one rank alone: the kernel kills it, and nothing else on the machine notices."""

import contextlib
import os
import random
import signal
from pathlib import Path

import psutil

from chaos.faults.fault import Fault, Injected, Target
from chaos.faults.processes import find_rank

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT_FILES = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))


def _hierarchy() -> tuple[Path, str] | str:
    """Where memory groups are made, and the file with their limit; or why none can be."""
    for folder, limit in _LIMIT_FILES:
        root = _CGROUP / folder
        controllers = root / "cgroup.subtree_control"
        usable = "memory" in controllers.read_text().split() if controllers.exists() else bool(folder) and root.is_dir()
        if usable and os.access(root, os.W_OK):
            return root, limit
    return "no memory control group can be made below /sys/fs/cgroup: it takes root, and a writable hierarchy"


def _available() -> str | None:
    found = _hierarchy()
    return found if isinstance(found, str) else None


def _out_of_memory(target: Target, rng: random.Random) -> Injected | None:
    """Moves a rank into a group whose limit is below what it uses as soon as it asks for more."""
    hierarchy, found = _hierarchy(), find_rank(target, rng)
    if isinstance(hierarchy, str) or found is None:
        return None
    root, limit = hierarchy
    pid, context = found
    group = root / f"lastgood-oom-{pid}"
    try:
        uses_bytes = psutil.Process(pid).memory_info().rss
        group.mkdir()
        (group / limit).write_text(str(max(1 << 20, uses_bytes // 64)))
        (group / "cgroup.procs").write_text(str(pid))
    except (OSError, psutil.Error):
        with contextlib.suppress(OSError):
            group.rmdir()
        return None

    def release() -> None:
        # A group goes only when its process has.
        with contextlib.suppress(ProcessLookupError):
            if str(pid) in (group / "cgroup.procs").read_text().split():
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, psutil.Error):
            psutil.Process(pid).wait(timeout=5)
        with contextlib.suppress(OSError):
            group.rmdir()

    return Injected(context={**context, "victim_pid": pid}, release=release)


MEMORY_FAULTS = (
    Fault(
        name="out_of_memory",
        description="a rank may use no more memory, and the kernel kills it when it asks for some",
        needs="a writable memory control group hierarchy",
        inject=_out_of_memory,
        available=_available,
    ),
)
