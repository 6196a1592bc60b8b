"""How a storage behaves and how fast it is, measured with files that are gone afterwards.

All happens in a new directory below the one examined. It is removed at the end, also after an error or an interrupt;
only SIGKILL leaves it, under a name that says what it is. Files are of one size, chosen so that writing one takes two
seconds at most; rounds end when the time is up. Bytes are random, so that compression shows nothing faster than it is.
"""

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from orchestrator.doctor.behaviour import check_behaviour, not_writable
from orchestrator.doctor.facts import Check, Latency, Speed, Storage, StorageSpeeds
from orchestrator.doctor.mounts import mount_of
from orchestrator.doctor.speed import speed_of
from workers.checkpoint.digests import BLOCK_BYTES, read_blocks
from workers.checkpoint.files import closing_file
from workers.checkpoint.header import PAGE_BYTES
from workers.checkpoint.store import LocalStore, is_no_space

_PREFIX = ".lastgood-doctor-"
_TRIAL_BYTES = 8 << 20
_WRITE_SECONDS_MAX = 2.0
_SPEED_SECONDS_MAX = 30.0
_SMALL_BYTES = 4096
_SYNCS = 20
_SYNC_SECONDS_MAX = 2.0


def look_at_storage(
    directory: Path,
    data: mmap.mmap,
    *,
    rounds: int,
    open_store: Callable[[Path], LocalStore] = LocalStore,
    tell: Callable[[str], None] = lambda _: None,
) -> Storage:
    """Examine `directory`, which exists, with files of up to len(data) bytes of `data`; `tell` hears what is next."""
    checks: list[Check] = []
    speeds, problem, free_bytes = None, "", 0
    try:
        free_bytes = open_store(directory).free_bytes()
        with _own_directory(directory) as own:
            store = open_store(own)
            tell("how the storage behaves")
            checks = check_behaviour(store)
            problem = _no_room(free_bytes, len(data))
            if not problem and not checks[0].problem:
                tell("how fast the storage is")
                speeds, check = _measure_speeds(store, data, rounds)
                checks.append(check)
    except OSError as error:
        if checks:
            problem = f"no room was left while measuring: {error}" if is_no_space(error) else str(error)
        else:
            checks = [not_writable(error)]
    mount = mount_of(directory)
    return Storage(
        path=str(directory.resolve()),
        kind=mount.kind if mount is not None else "unknown",
        file_system=mount.file_system if mount is not None else None,
        source=mount.source if mount is not None else None,
        options=list(mount.options) if mount is not None else [],
        free_bytes=free_bytes,
        checks=checks,
        speeds=speeds,
        problem=problem,
    )


@contextmanager
def _own_directory(directory: Path) -> Iterator[Path]:
    own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _no_room(free_bytes: int, file_bytes: int) -> str:
    needed = 2 * file_bytes  # one file at a time, and as much left for others
    if free_bytes >= needed:
        return ""
    return f"{free_bytes / 2**20:,.0f} MiB are free, and measuring the speed needs {needed / 2**20:,.0f}"


def _measure_speeds(store: LocalStore, data: mmap.mmap, rounds: int) -> tuple[StorageSpeeds, Check]:
    """(speeds, whether bytes come back as they were written). Raises OSError."""
    deadline = time.monotonic() + _SPEED_SECONDS_MAX
    sync_file, sync_dir = _sync_latencies(store)
    whole = memoryview(data)
    trial = whole[: min(_TRIAL_BYTES, len(data))]
    _write(store, "trial-cold", trial, direct=True)
    rate, is_direct = _write(store, "trial", trial, direct=True)
    affordable = int(rate * _WRITE_SECONDS_MAX) // PAGE_BYTES * PAGE_BYTES
    content = whole[: max(len(trial), min(len(data), affordable))]
    rates: dict[str, list[float]] = {
        name: [] for name in ("write_direct", "write_buffered", "read_direct", "read_cold", "read_cached")
    }
    problem = ""
    for _ in range(rounds):
        if is_direct:
            rate, wrote_directly = _write(store, "direct", content, direct=True)
            rates["write_direct"] += [rate] if wrote_directly else []
            rate, read_directly = _read(store, "direct", direct=True)
            rates["read_direct"] += [rate] if read_directly else []
            problem = problem or _compare(store, "direct", content)
            store.unlink("direct")
        rates["write_buffered"].append(_write(store, "buffered", content, direct=False)[0])
        rates["read_cold"].append(_read(store, "buffered", direct=False, forget=True)[0])
        rates["read_cached"].append(_read(store, "buffered", direct=False)[0])
        problem = problem or _compare(store, "buffered", content)
        store.unlink("buffered")
        if time.monotonic() > deadline:
            break
    speeds = StorageSpeeds(
        file_bytes=len(content),
        write_direct=_speed(rates["write_direct"]),
        write_buffered=speed_of(rates["write_buffered"]),
        read_direct=_speed(rates["read_direct"]),
        read_cold=speed_of(rates["read_cold"]),
        read_cached=speed_of(rates["read_cached"]),
        sync_file=sync_file,
        sync_dir=sync_dir,
    )
    return speeds, Check(name="read_back", what="bytes come back as they were written", problem=problem)


def _speed(rates: Sequence[float]) -> Speed | None:
    return speed_of(rates) if rates else None


def _write(store: LocalStore, path: str, content: memoryview, *, direct: bool) -> tuple[float, bool]:
    """(bytes a second of a new file with its fsync, whether it went past the page cache)."""
    began = time.perf_counter()
    with closing_file(store.open_new(path, direct=direct)) as file:
        for start in range(0, len(content), BLOCK_BYTES):
            file.write_at(content[start : start + BLOCK_BYTES], start)
        file.sync()
        return len(content) / (time.perf_counter() - began), file.direct


def _read(store: LocalStore, path: str, *, direct: bool, forget: bool = False) -> tuple[float, bool]:
    """(bytes a second, whether they came past the page cache). `forget`: the cache is dropped first."""
    with closing_file(store.open_existing(path, direct=direct)) as file:
        if forget:
            file.drop_cache()
        began = time.perf_counter()
        count = sum(len(block) for block in read_blocks(file))
        return count / (time.perf_counter() - began), file.direct


def _compare(store: LocalStore, path: str, content: memoryview) -> str:
    digest = xxhash.xxh3_128()
    with closing_file(store.open_existing(path, direct=True)) as file:
        file.drop_cache()
        for block in read_blocks(file):
            digest.update(block)
    return "" if digest.digest() == xxhash.xxh3_128(content).digest() else "a file was read back with other bytes"


def _sync_latencies(store: LocalStore) -> tuple[Latency, Latency]:
    """Of a new small file, and of the directory it was created in."""
    files: list[float] = []
    directories: list[float] = []
    content = memoryview(os.urandom(_SMALL_BYTES))
    deadline = time.monotonic() + _SYNC_SECONDS_MAX
    for number in range(_SYNCS):
        with closing_file(store.open_new(f"small-{number}")) as file:
            file.write_at(content, 0)
            files.append(_seconds(file.sync))
        directories.append(_seconds(lambda: store.sync_dir(".")))
        if time.monotonic() > deadline:
            break
    return _latency(files), _latency(directories)


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(median=statistics.median(seconds), slowest=max(seconds), rounds=len(seconds))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
