"""Looks at the run's lasting processes now and then, for the judge: memory, open files, how many there are."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from chaos.judge.leaks import OBSERVATIONS_FILE
from orchestrator.driver import run_id
from workers.processes import node_dir_path

_SHM = Path("/dev/shm")
_END_SECONDS = 20.0
_POLL_SECONDS = 0.2


class LeakWatch:
    """`look` while the run is on, `end` once after it. Every process that was ever seen has to be gone then."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._node_dir = node_dir_path(run_id(run_dir))
        self._shm_before = shm_bytes()
        self._known: dict[int, float] = {}

    def look(self, status: dict[str, Any], coordinator_pid: int | None) -> None:
        """`status`: as SupervisedTrainer.status() gives it."""
        roles = {rank["agent_pid"]: "agent" for rank in status.get("ranks", ())}
        roles |= {keeper["pid"]: "keeper" for keeper in status.get("keepers", ())}
        roles |= {coordinator_pid: "coordinator"} if coordinator_pid else {}
        processes, descendants = [], 0
        for pid, role in roles.items():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                descendants += len(family)
                for member in family:
                    self._known[member.pid] = member.create_time()
                files = _open_files(pid)
                memory = process.memory_info()
                processes.append(
                    {
                        "role": role,
                        "pid": pid,
                        "rss_bytes": memory.rss - memory.shared,
                        "descriptors": len(files),
                        "memfds": sum(file.startswith("/memfd:") for file in files),
                    }
                )
        self._write({"at": time.time(), "processes": processes, "descendants": descendants})

    def end(self, *, wait: Callable[[float], None] = time.sleep) -> None:
        """After the run's end: what is still there once it has had time to go."""
        deadline = time.monotonic() + _END_SECONDS
        while True:
            left, grown = self._left(), max(0, shm_bytes() - self._shm_before)
            files = sorted(str(path) for path in self._node_dir.rglob("*"))
            # Others on this machine use /dev/shm as well, and what they put there mostly goes again.
            if not (left or grown or files) or time.monotonic() > deadline:
                break
            wait(_POLL_SECONDS)
        self._write({"at": time.time(), "after": True, "left": left, "shm_left_bytes": grown, "files_left": files})

    def _left(self) -> list[int]:
        found = []
        for pid, created in self._known.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # Ray keeps the workers of actors that have ended, to use them again: they are Ray's then.
                idle = process.cmdline()[:1] == ["ray::IDLE"]
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE and not idle:
                    found.append(pid)
        return found

    def _write(self, content: dict[str, Any]) -> None:
        with open(self._run_dir / OBSERVATIONS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


def shm_bytes() -> int:
    """What lies in /dev/shm beside Ray's own object stores."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHM):
            if not entry.name.startswith("plasma"):
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
    return total


def _open_files(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
