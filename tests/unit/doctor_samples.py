"""Facts of a machine on which everything is as it should be, to change one thing at a time."""

from orchestrator.doctor.facts import (
    Check,
    Clock,
    Facts,
    Import,
    Latency,
    Machine,
    MemorySpeeds,
    Package,
    Software,
    Speed,
    Storage,
    StorageSpeeds,
    Tracing,
)


def speed(rate: float) -> Speed:
    return Speed(median=rate, slowest=rate, fastest=rate, rounds=3)


SYNC = Latency(median=1e-3, slowest=2e-3, rounds=20)
MACHINE = Machine(
    host="node-1",
    kernel="6.1",
    cpus=16,
    cpu_limit=None,
    load=0.2,
    memory_bytes=64 << 30,
    memory_available_bytes=60 << 30,
    memory_limit_bytes=None,
    swap_bytes=0,
    swap_used_bytes=0,
    huge_pages="madvise",
    huge_pages_shared="never",
    shm_bytes=32 << 30,
    limits={"nofile": 65536, "memlock": None, "nproc": 100_000, "core": 0},
    core_pattern="core",
    gpus=[],
)
STORAGE = Storage(
    path="/mnt/ckpt",
    kind="network",
    file_system="nfs4",
    source="server:/export",
    options=["rw", "hard"],
    free_bytes=10**12,
    checks=[Check(name="create", what="files can be created", problem="")],
    speeds=StorageSpeeds(
        file_bytes=256 << 20,
        write_direct=speed(2e9),
        write_buffered=speed(1e9),
        read_direct=speed(2e9),
        read_cold=speed(2e9),
        read_cached=speed(1e10),
        sync_file=SYNC,
        sync_dir=SYNC,
    ),
    problem="",
)
FACTS = Facts(
    machine=MACHINE,
    memory=MemorySpeeds(copy=speed(1e10), copy_all=speed(4e10), threads=16, copy_fresh=speed(2e9), hash=speed(2e10)),
    memory_problem="",
    storage=STORAGE,
    clock=Clock(source="tsc", synchronized=True, wall_drift_seconds=1e-4, watched_seconds=20.0),
    tracing=Tracing(traced=True, problem="", answered=True, ptrace_scope=0),
    software=Software(
        python="3.11.7",
        packages=[Package(name="ray", version="2.60.0", wanted="<2.61,>=2.60", fits=True)],
        imports=[Import(module="torch", seconds=1.0, problem="")],
        cuda=False,
        ray_monitor={"this shell": "0"},
    ),
)
