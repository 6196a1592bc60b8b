"""What the facts mean: one finding for each thing that was looked at. Pure.

"problem": a run cannot start, or cannot keep what it promises. "advice": it runs, and something is worse than it could
be, or cannot be told from here. "ok": nothing to do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from orchestrator.doctor.facts import MONITOR_VARIABLE, Clock, Facts, Machine, Software, Tracing
from orchestrator.doctor.sizes import show_bytes

Level = Literal["ok", "advice", "problem"]

_BUSY = 0.5  # processes that run, for each CPU
_DRIFT_SECONDS_MAX = 0.05
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_FILES_MIN = 4096
_PROCESSES_MIN = 4096
_SHM_BYTES_MIN = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """id: stable, for programs. what: was looked at. seen: the value. why it matters and what to do: "" for "ok"."""

    id: str
    level: Level
    what: str
    seen: str
    why: str = ""
    do: str = ""


def finding_if(bad: bool, level: Level = "advice", *, id: str, what: str, seen: str, why: str, do: str) -> Finding:
    """A finding of this level if `bad`, else one that is ok, without `why` and `do`."""
    if not bad:
        return Finding(id=id, level="ok", what=what, seen=seen)
    return Finding(id=id, level=level, what=what, seen=seen, why=why, do=do)


def judge_machine(facts: Facts) -> list[Finding]:
    """All but the storage."""
    return [
        *_software(facts.software),
        *_memory(facts),
        _tracing(facts.tracing),
        *_clock(facts.clock),
        *_limits(facts.machine),
        _gpus(facts.machine, facts.software),
        _ray_monitor(facts.software),
    ]


def _software(software: Software) -> Iterator[Finding]:
    for package in software.packages:
        if not package.fits:
            yield Finding(
                id=f"package.{package.name}",
                level="problem",
                what=f"version of {package.name}",
                seen=package.version or "not installed",
                why=f"lastgood was made for and tested with {package.wanted or 'it'}",
                do=f"pip install '{package.name}{package.wanted}'",
            )
    good = [package for package in software.packages if package.fits]
    shown = ", ".join(f"{package.name} {package.version}" for package in good if package.wanted)
    yield Finding(id="packages", level="ok", what="packages", seen=f"Python {software.python}, {shown}")
    for attempt in software.imports:
        if attempt.problem:
            yield Finding(
                id=f"import.{attempt.module}",
                level="problem",
                what=f"import {attempt.module}",
                seen=attempt.problem,
                why="every rank and agent imports it",
                do=f'repair the installation until `python -c "import {attempt.module}"` works',
            )
    if not any(attempt.problem for attempt in software.imports):
        seconds = sum(attempt.seconds for attempt in software.imports)
        yield Finding(id="imports", level="ok", what="torch, Ray and lastgood import", seen=f"in {seconds:.1f} s")


def _memory(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    yield finding_if(
        facts.memory is None,
        "problem",
        id="memory.speed",
        what="memory to measure with",
        seen=facts.memory_problem or "enough",
        why="without memory for a copy no snapshot can be taken",
        do="free memory, or examine with a smaller --sample",
    )
    yield finding_if(
        machine.load > _BUSY * machine.cpus,
        id="load",
        what="load before measuring",
        seen=f"{machine.load:.1f} on {machine.cpus} CPUs",
        why="the speeds are those of a busy machine, and so is what is expected from them",
        do="examine again when nothing else runs",
    )
    swap = f"{show_bytes(machine.swap_bytes)}, {show_bytes(machine.swap_used_bytes)} used"
    yield finding_if(
        machine.swap_bytes > 0,
        id="memory.swap",
        what="swap",
        seen=swap if machine.swap_bytes else "none",
        why="a snapshot that the kernel moved to disk is copied at the speed of that disk",
        do="swapoff -a, or vm.swappiness=1",
    )
    limit = machine.memory_limit_bytes
    limited = show_bytes(limit) if limit is not None else "none below the machine's"
    yield Finding(id="memory.limit", level="ok", what="memory limit of the control group", seen=limited)
    pages = f"{machine.huge_pages or 'unknown'}, for shared memory {machine.huge_pages_shared or 'unknown'}"
    yield Finding(id="memory.huge_pages", level="ok", what="transparent huge pages", seen=pages)


def _tracing(tracing: Tracing) -> Finding:
    what = "stacks of a process that hangs"
    if tracing.traced:
        return Finding(id="tracing", level="ok", what=what, seen="py-spy takes them, native frames included")
    asked = "it answered a signal" if tracing.answered else "nor did it answer a signal"
    if tracing.ptrace_scope:
        do = f"sysctl kernel.yama.ptrace_scope=0 (now {tracing.ptrace_scope})"
    else:
        do = "in a container, add the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
    return Finding(
        id="tracing",
        level="advice",
        what=what,
        seen=f"py-spy could not: {tracing.problem}; {asked}",
        why="ranks that hang are found and replaced all the same"
        + (
            ", but only a rank whose interpreter still runs says where it stands, by faulthandler, and without native "
            "frames: who is to blame stays open more often"
            if tracing.answered
            else ", but nobody can tell where they stood or who is to blame"
        ),
        do=do,
    )


def _clock(clock: Clock) -> Iterator[Finding]:
    yield finding_if(
        abs(clock.wall_drift_seconds) > _DRIFT_SECONDS_MAX,
        id="clock.drift",
        what="wall clock against the monotonic one",
        seen=f"{clock.wall_drift_seconds * 1e3:+.1f} ms in {clock.watched_seconds:.0f} s",
        why="times in the ledger, and which of several nodes failed first, go by the wall clock",
        do="see what sets the clock: it should be corrected slowly, not in steps",
    )
    known = {True: "the kernel's clock is kept right", False: "not that the kernel knows", None: "unknown"}
    yield finding_if(
        clock.synchronized is False,
        id="clock.synchronized",
        what="time synchronisation",
        seen=known[clock.synchronized],
        why="with several nodes, the first cause of a failure is the one with the earliest wall clock time",
        do="run chrony or systemd-timesyncd on every node; a single node needs nothing, nor do "
        "virtual machines that take the time of one host",
    )
    yield finding_if(
        clock.source in _SLOW_CLOCKS,
        id="clock.source",
        what="clock source",
        seen=clock.source or "unknown",
        why="reading it is a slow system call, and ranks read the clock at every step",
        do="find out why the kernel distrusts the TSC (dmesg | grep -i clocksource)",
    )


def _limits(machine: Machine) -> Iterator[Finding]:
    limits = machine.limits
    yield _at_least(
        "nofile",
        limits["nofile"],
        _FILES_MIN,
        what="open files (ulimit -n)",
        why="ranks, loader workers, snapshot slots and Ray each hold many",
        do="ulimit -n 65536, before Ray is started",
    )
    yield _at_least(
        "nproc",
        limits["nproc"],
        _PROCESSES_MIN,
        what="processes and threads (ulimit -u)",
        why="Ray, ranks and loader workers start hundreds of threads",
        do="raise nproc in /etc/security/limits.conf, or the pids limit of the container",
    )
    locked = limits["memlock"]
    yield finding_if(
        locked is not None and bool(machine.gpus),
        id="limit.memlock",
        what="locked memory (ulimit -l)",
        seen=show_bytes(locked) if locked is not None else "unlimited",
        why="NCCL over InfiniBand needs locked memory",
        do="ulimit -l unlimited, before Ray is started; docker run --ulimit memlock=-1",
    )
    core = limits["core"]
    yield finding_if(
        core != 0 and not (machine.core_pattern or "").startswith("|"),
        id="limit.core",
        what="core dumps (ulimit -c)",
        seen={None: "unlimited", 0: "none"}.get(core, show_bytes(core or 0)),
        why="a rank that crashes is replaced only after its memory was written to disk; its stacks are kept anyway",
        do="ulimit -c 0, before Ray is started",
    )
    yield finding_if(
        machine.shm_bytes is None or machine.shm_bytes < _SHM_BYTES_MIN,
        id="shm",
        what="size of /dev/shm",
        seen=show_bytes(machine.shm_bytes) if machine.shm_bytes is not None else "none",
        why="loader workers hand over batches through it and Ray keeps its objects there; snapshots do not use it",
        do="docker run --shm-size 8g, or mount a larger tmpfs there",
    )


def _at_least(name: str, value: int | None, least: int, *, what: str, why: str, do: str) -> Finding:
    seen = "unlimited" if value is None else f"{value:,}"
    return finding_if(value is not None and value < least, id=f"limit.{name}", what=what, seen=seen, why=why, do=do)


def _gpus(machine: Machine, software: Software) -> Finding:
    unusable = bool(machine.gpus) and software.cuda is False
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    seen = f"{len(machine.gpus)} ({names}, driver {machine.gpus[0].driver})" if machine.gpus else "none"
    return finding_if(
        unusable,
        id="gpus",
        what="GPUs",
        seen=f"{seen}; torch cannot use them" if unusable else seen,
        why="ranks would train on the CPU",
        do="install a build of torch with CUDA that this driver supports",
    )


def _ray_monitor(software: Software) -> Finding:
    on = ", ".join(where for where, value in software.ray_monitor.items() if value != "0")
    return finding_if(
        bool(on),
        id="ray.memory_monitor",
        what="Ray's memory monitor",
        seen=f"not switched off ({on})" if on else "off",
        why="it does not see the ranks below Ray's workers, so it kills all of a node's actors where the kernel would "
        "kill the one rank that is too large",
        do=f"export {MONITOR_VARIABLE}=0 where Ray is started",
    )
