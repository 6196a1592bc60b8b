"""How fast memory is copied and hashed, with the product's own slots and digest.

The buffers are larger than caches are, copies run outside the interpreter lock, rounds of the kinds alternate so that
a busy moment of the machine hits all of them.
"""

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import xxhash

from orchestrator.doctor.facts import MemorySpeeds, Speed
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.slots import Slot
from workers.errors import EnvironmentProblem

_THREADS_MAX = 16
_BUFFERS = 3  # source, slot, fresh


def speed_of(rates: Sequence[float]) -> Speed:
    """Of bytes a second, one a round."""
    return Speed(median=statistics.median(rates), slowest=min(rates), fastest=max(rates), rounds=len(rates))


def random_memory(size_bytes: int) -> mmap.mmap:
    """Anonymous memory full of bytes that no storage can compress."""
    memory = mmap.mmap(-1, size_bytes)
    with open("/dev/urandom", "rb", buffering=0) as source, memoryview(memory) as view:
        done = 0
        while done < size_bytes:
            done += source.readinto(view[done:]) or 0
    return memory


def measure_memory(source: mmap.mmap, *, available_bytes: int, rounds: int) -> MemorySpeeds:
    """Copies and hashes `source`. Raises EnvironmentProblem if there is no memory for the copies."""
    size = len(source)
    if available_bytes < _BUFFERS * size:
        raise EnvironmentProblem(
            f"{available_bytes / 2**20:,.0f} MiB of memory are available, and measuring needs "
            f"{_BUFFERS * size / 2**20:,.0f}; free some, or give a smaller --sample"
        )
    threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX)
    copies, all_copies, fresh_copies, hashes = [], [], [], []
    with closing(Slot.create(size)) as slot, memoryview(source) as view:
        here, there = _address(view), _address(slot.image)
        for _ in range(rounds):
            copies.append(_rate(size, lambda: _copy(there, here, size)))
            all_copies.append(_rate(size, lambda: _copy_together(there, here, size, threads)))
            fresh_copies.append(_rate_fresh(size, here))
            hashes.append(_rate(size, lambda: _hash(view)))
    return MemorySpeeds(
        copy=speed_of(copies),
        copy_all=speed_of(all_copies),
        threads=threads,
        copy_fresh=speed_of(fresh_copies),
        hash=speed_of(hashes),
    )


def _rate(size_bytes: int, work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return size_bytes / (time.perf_counter() - began)


def _rate_fresh(size_bytes: int, source: int) -> float:
    with mmap.mmap(-1, size_bytes) as fresh, memoryview(fresh) as target:
        address = _address(target)
        return _rate(size_bytes, lambda: _copy(address, source, size_bytes))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def _copy_together(target: int, source: int, size_bytes: int, threads: int) -> None:
    part = -(-size_bytes // threads)
    parts = [(start, min(part, size_bytes - start)) for start in range(0, size_bytes, part)]
    others = [threading.Thread(target=_copy, args=(target + start, source + start, size)) for start, size in parts[1:]]
    for other in others:
        other.start()
    _copy(target, source, parts[0][1])
    for other in others:
        other.join()


def _hash(view: memoryview) -> None:
    digest = xxhash.xxh3_128()
    for start in range(0, len(view), BLOCK_BYTES):
        digest.update(view[start : start + BLOCK_BYTES])
    digest.digest()
