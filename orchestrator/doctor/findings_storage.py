"""What the facts mean for storage, and for a run of a given size. Pure; see orchestrator.doctor.findings."""

from collections.abc import Iterator

from orchestrator.doctor.expect import Expectation, Scale
from orchestrator.doctor.facts import Check, Facts, Machine, Storage, StorageKind
from orchestrator.doctor.findings import Finding, finding_if
from orchestrator.doctor.sizes import show_bytes, show_seconds

_SYNC_SLOW_SECONDS = 0.1
_SYNC_IGNORED_SECONDS = 5e-6
_UNSAFE_OPTIONS = ("nobarrier", "barrier=0", "sync=disabled", "volatile")

_NEEDED_FOR = {
    "create": "checkpoints are files",
    "exclusive": "a file that is written twice can mix two saves",
    "link": "it is how exactly one of two drivers starts a generation",
    "race": "two drivers could both take the run to be theirs",
    "rename": "a shard or manifest that was written in part would look whole",
    "rename_dir": "old checkpoints are deleted by moving them away first",
    "sync_file": "a checkpoint that is not on the device is lost with the power",
    "sync_dir": "a file whose name is not on the device is lost with the power",
    "listing": "the newest checkpoint is found by listing",
    "append": "the ledger is appended to",
    "read_back": "what comes back changed cannot be restored",
}
_KINDS: dict[StorageKind, tuple[str, str]] = {
    "memory": ("what is called durable here is lost when the machine stops", "give a --storage on a disk"),
    "overlay": (
        "it is the container's own layer, lost with the container, and slower than a mounted volume",
        "mount a volume and store there",
    ),
    "object": (
        "a bucket shown as a file system copies where others rename, and has no hard links",
        "use a file system: local, NFS, Lustre or the like",
    ),
    "unknown": ("what it guarantees after a power loss cannot be told from here", "ask who runs it about fsync"),
}


def judge_storage(storage: Storage) -> list[Finding]:
    """The directory that was examined."""
    return [*_kind(storage), *_checks(storage), *_speeds(storage)]


def judge_scale(
    scale: Scale, expected: Expectation, facts: Facts, *, memory_fraction_max: float, keep_last: int
) -> list[Finding]:
    """Whether a run of that size fits here. The last two are those of RecoveryConfig."""
    return [
        _memory(scale, expected, facts.machine, memory_fraction_max),
        *_room(scale, facts.storage, keep_last),
        *_shared(expected, facts.storage),
    ]


def _memory(scale: Scale, expected: Expectation, machine: Machine, fraction_max: float) -> Finding:
    # As ranks count before they train (workers.snapshots): a part of the memory stays free.
    total = machine.memory_limit_bytes or machine.memory_bytes
    usable = max(0, machine.memory_available_bytes - int((1 - fraction_max) * total))
    return finding_if(
        expected.memory_bytes > usable,
        "problem",
        id="scale.memory",
        what="memory for snapshots on a node",
        seen=f"{show_bytes(expected.memory_bytes)} needed ({scale.slots} x {show_bytes(expected.node_bytes)}), "
        f"{show_bytes(usable)} available below {fraction_max:.0%} of {show_bytes(total)}",
        why="a run whose snapshots do not fit is refused before it trains",
        do="use more nodes, fewer ranks on each, or nodes with more memory",
    )


def _kind(storage: Storage) -> Iterator[Finding]:
    why, do = _KINDS.get(storage.kind, ("", ""))
    yield finding_if(
        bool(why),
        id="storage.kind",
        what="file system",
        seen=f"{storage.file_system or 'unknown'} on {storage.source or 'unknown'} ({storage.kind})",
        why=why,
        do=do,
    )
    unsafe = [option for option in storage.options if option in _UNSAFE_OPTIONS]
    yield finding_if(
        bool(unsafe),
        id="storage.options",
        what="mount options",
        seen=", ".join(unsafe or storage.options),
        why="fsync does not reach the device: a power loss may take checkpoints that were called durable",
        do=f"mount without {', '.join(unsafe)}",
    )
    if storage.kind == "network" and "soft" in storage.options:
        yield Finding(
            id="storage.soft",
            level="advice",
            what="mount options",
            seen="soft",
            why="a server that does not answer for a while fails saves instead of delaying them",
            do="mount with hard; a save that waits does not hold up training",
        )


def _checks(storage: Storage) -> Iterator[Finding]:
    for check in storage.checks:
        if check.problem:
            yield _failed(check, storage.path)
    good = [check.name for check in storage.checks if not check.problem]
    if good:
        yield Finding(id="storage.checks", level="ok", what="behaves as needed", seen=", ".join(good))


def _failed(check: Check, path: str) -> Finding:
    return Finding(
        id=f"storage.{check.name}",
        level="problem",
        what=check.what,
        seen=check.problem,
        why=_NEEDED_FOR[check.name],
        do=f"give another --storage: {path} cannot be used"
        + (", or make it writable and free room there" if check.name == "create" else ""),
    )


def _speeds(storage: Storage) -> Iterator[Finding]:
    if storage.problem:
        yield Finding(
            id="storage.speed",
            level="problem",
            what="speed of the storage",
            seen=storage.problem,
            why="a save writes the whole state",
            do=f"free room in {storage.path}, or give another --storage; a smaller --sample needs less to measure",
        )
    speeds = storage.speeds
    if speeds is None:
        return
    direct = speeds.write_direct is not None
    yield finding_if(
        not direct and storage.kind != "memory",
        id="storage.direct",
        what="O_DIRECT",
        seen="works" if direct else "refused",
        why="saves go through the page cache, which costs CPU time and memory bandwidth beside training, and reading "
        "back may not reach the device",
        do="nothing, or use a file system that allows it",
    )
    file, directory = speeds.sync_file.median, speeds.sync_dir.median
    seen = f"{show_seconds(file)} a small file, {show_seconds(directory)} a directory (medians)"
    if max(file, directory) < _SYNC_IGNORED_SECONDS and storage.kind != "memory":
        yield Finding(
            id="storage.sync",
            level="advice",
            what="fsync",
            seen=seen,
            why="no device confirms that fast: fsync seems to be switched off, and a power loss may take checkpoints",
            do="find out what switches it off (libeatmydata, mount or server options)",
        )
        return
    yield finding_if(
        max(file, directory) > _SYNC_SLOW_SECONDS,
        id="storage.sync",
        what="fsync",
        seen=seen,
        why="a commit waits for several of them, one after the other",
        do="use a device that confirms writes faster (one with a protected cache), or save less often",
    )


def _room(scale: Scale, storage: Storage, keep_last: int) -> Iterator[Finding]:
    kept = keep_last + 1  # the one that is being written
    barely = 2 * scale.state_bytes <= storage.free_bytes
    yield finding_if(
        kept * scale.state_bytes > storage.free_bytes,
        "advice" if barely else "problem",
        id="scale.room",
        what="room for checkpoints",
        seen=f"{show_bytes(kept * scale.state_bytes)} for {keep_last} and the one being written, "
        f"{show_bytes(storage.free_bytes)} free",
        why="older checkpoints are deleted early to make room for the next"
        if barely
        else "a checkpoint is kept until the next is complete, so two have to fit",
        do="free room, lower RecoveryConfig.keep_last, or give another --storage",
    )


def _shared(expected: Expectation, storage: Storage) -> Iterator[Finding]:
    if expected.nodes > 1 and storage.kind in ("local", "overlay", "memory"):
        yield Finding(
            id="scale.shared",
            level="advice",
            what=f"storage that all {expected.nodes} nodes see",
            seen=f"{storage.path} is on this machine's own {storage.file_system or 'storage'}",
            why="ranks on other nodes write to the same directory, and restore from it",
            do="examine the shared file system that the run will use: --storage DIR",
        )
