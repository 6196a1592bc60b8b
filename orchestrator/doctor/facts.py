"""What is measured. The fields are the machine-readable output: names stay, units are last in them.

None means: not there, or could not be found out.
"""

from dataclasses import dataclass
from typing import Literal

MONITOR_VARIABLE = "RAY_memory_monitor_refresh_ms"  # of Ray's memory monitor; "0" switches it off
StorageKind = Literal["local", "network", "object", "overlay", "memory", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Median, slowest and fastest of several rounds, in bytes a second."""

    median: float
    slowest: float
    fastest: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Median and slowest of several rounds, in seconds."""

    median: float
    slowest: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeeds:
    """copy: one thread, into a snapshot slot whose pages are there. copy_all: all `threads` at once, summed up.
    copy_fresh: one thread, into memory that was never touched. hash: xxh3_128, one thread."""

    copy: Speed
    copy_all: Speed
    threads: int
    copy_fresh: Speed
    hash: Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as nvidia-smi names it."""

    name: str
    memory_bytes: int | None
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, as this process may use it.

    cpus: that it may run on; cpu_limit: of its control group; load: processes that ran or waited for the disk in the
    last minute, before anything was measured. memory_limit_bytes: of its control group;
    memory_available_bytes is what is left below that too. huge_pages, huge_pages_shared: the kernel's choice for
    anonymous and for shared memory. limits: soft resource limits, None for unlimited.
    """

    host: str
    kernel: str
    cpus: int
    cpu_limit: float | None
    load: float
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    swap_used_bytes: int
    huge_pages: str | None
    huge_pages_shared: str | None
    shm_bytes: int | None
    limits: dict[str, int | None]
    core_pattern: str | None
    gpus: list[Gpu]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """wall_drift_seconds: by how much the wall clock moved against the monotonic one in `watched_seconds`.
    synchronized: whether the kernel says that something keeps the wall clock right."""

    source: str | None
    synchronized: bool | None
    wall_drift_seconds: float
    watched_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """traced: py-spy took the stack of a process of ours; `problem` says why not. answered: the same process wrote its
    stack when it was asked by a signal. ptrace_scope: the kernel's rule, where it has one (0: free among one's own)."""

    traced: bool
    problem: str
    answered: bool
    ptrace_scope: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed distribution; `wanted` is the range that lastgood supports, "" for any."""

    name: str
    version: str | None
    wanted: str
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A module imported in a fresh process; `problem` is the error, "" if it worked."""

    module: str
    seconds: float
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """ray_monitor: what sets Ray's memory monitor, by where it was seen ("this shell", or a raylet that runs here);
    None where it is not set. cuda: whether torch can use a GPU; None if torch could not be asked."""

    python: str
    packages: list[Package]
    imports: list[Import]
    cuda: bool | None
    ray_monitor: dict[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether the storage behaves as checkpoints need it; `problem` is what was seen, "" if it does."""

    name: str
    what: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpeeds:
    """Of one file, in 8 MiB blocks; writes include the fsync. The direct ones are None where O_DIRECT is refused.

    read_cold: through the page cache, which was asked to forget the file. read_cached: from the page cache.
    sync_file: fsync of a new file of 4 KiB; sync_dir: of the directory in which a file was created.
    """

    file_bytes: int
    write_direct: Speed | None
    write_buffered: Speed
    read_direct: Speed | None
    read_cold: Speed
    read_cached: Speed
    sync_file: Latency
    sync_dir: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """`speeds` are None where nothing could be created, as `checks` say, or for the reason in `problem`: not enough
    room, or an error while measuring."""

    path: str
    kind: StorageKind
    file_system: str | None
    source: str | None
    options: list[str]
    free_bytes: int
    checks: list[Check]
    speeds: StorageSpeeds | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it. `memory` is None, with the reason in `memory_problem`, where there was no memory to measure with."""

    machine: Machine
    memory: MemorySpeeds | None
    memory_problem: str
    storage: Storage
    clock: Clock
    tracing: Tracing
    software: Software
