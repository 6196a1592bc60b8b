"""What this machine is and allows: processors, memory, limits, GPUs, clock. Reads /proc and /sys, changes nothing."""

import ctypes
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

from orchestrator.doctor.facts import Clock, Gpu, Machine
from workers import memory_watch

_SYS = Path("/sys")
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
_GPU_SECONDS = 20.0
_MICROSECONDS_UNSURE_MAX = 16_000_000  # what the kernel claims at most for a clock that something keeps right


def look_at_machine() -> Machine:
    """As it is now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    group = memory_watch.find_cgroup(os.getpid())
    limit = memory_watch.limit_bytes(group) if group is not None else None
    available = memory.available
    if group is not None and limit is not None:
        available = max(0, min(available, limit - memory_watch.used_bytes(group)))
    return Machine(
        host=socket.gethostname(),
        kernel=platform.release(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_limit=_cpu_limit(),
        load=os.getloadavg()[0],
        memory_bytes=memory.total,
        memory_available_bytes=available,
        memory_limit_bytes=limit if limit is not None and limit < memory.total else None,
        swap_bytes=swap.total,
        swap_used_bytes=swap.used,
        huge_pages=_chosen(_SYS / "kernel/mm/transparent_hugepage/enabled"),
        huge_pages_shared=_chosen(_SYS / "kernel/mm/transparent_hugepage/shmem_enabled"),
        shm_bytes=_file_system_bytes(Path("/dev/shm")),
        limits={name: _soft_limit(number) for name, number in _LIMITS.items()},
        core_pattern=_text(Path("/proc/sys/kernel/core_pattern")),
        gpus=find_gpus(),
    )


def find_gpus() -> list[Gpu]:
    """As nvidia-smi lists them; none if it is not there or does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([command, *query], capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(listing: str) -> list[Gpu]:
    """nvidia-smi's lines "name, MiB, driver"; memory is "[N/A]" where it is shared with the host."""
    gpus = []
    for line in listing.splitlines():
        name, memory, driver = [part.strip() for part in line.rsplit(",", 2)] if line.count(",") >= 2 else ("", "", "")
        if name:
            memory_bytes = int(memory) << 20 if memory.isdecimal() else None
            gpus.append(Gpu(name=name, memory_bytes=memory_bytes, driver=driver))
    return gpus


class ClockWatch:
    """Compares the wall clock with the monotonic one from its creation until `look`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._offset = time.time() - self._began

    def look(self) -> Clock:
        now = time.monotonic()
        return Clock(
            source=_text(_SYS / "devices/system/clocksource/clocksource0/current_clocksource"),
            synchronized=_synchronized(),
            wall_drift_seconds=time.time() - now - self._offset,
            watched_seconds=now - self._began,
        )


class _Timex(ctypes.Structure):
    """The kernel's struct timex: only the first fields are read, the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("error_max", ctypes.c_long),
        ("rest", ctypes.c_char * 256),
    )


def _synchronized() -> bool | None:
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        return None
    return bool(state.error_max < _MICROSECONDS_UNSURE_MAX)


def _cpu_limit() -> float | None:
    """Processors that a control group allows, where this process's own is mounted at the root, as in containers."""
    words = (_text(_SYS / "fs/cgroup/cpu.max") or "").split()
    quota, period = (words[0], words[1]) if len(words) == 2 else ("", "")
    if not quota:
        quota = _text(_SYS / "fs/cgroup/cpu/cpu.cfs_quota_us") or ""
        period = _text(_SYS / "fs/cgroup/cpu/cpu.cfs_period_us") or ""
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _chosen(path: Path) -> str | None:
    """The word in brackets: "always [madvise] never"."""
    text = _text(path)
    return text.partition("[")[2].partition("]")[0] or None if text else None


def _soft_limit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _file_system_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
