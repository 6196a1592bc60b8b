"""Reading a part of a file into fresh memory, as fast as it comes.

Blocks that lie in the page cache are copied from there; others are read past it, straight into huge pages: fresh
memory in ordinary pages would take longer to be mapped than to be read into. Two blocks are under way at a time, so
that one is mapped while the device works on the other. What is small is read as any file is.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from workers.checkpoint import huge_pages
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import StoreFile, closing_file
from workers.checkpoint.header import PAGE_BYTES
from workers.checkpoint.store import Store

_SMALL_BYTES = 1 << 20
_READERS = 2


def read_range(
    store: Store, path: str, start: int, stop: int, *, before_block: Callable[[int, int], None]
) -> memoryview:
    """Bytes start to stop of a file, fewer if it ends before; writable, and page-aligned where `start` is.

    `before_block(index, total)` is called in this thread.
    """
    if stop - start <= _SMALL_BYTES:
        small = memoryview(bytearray(max(0, stop - start)))
        with closing_file(store.open_existing(path)) as file:
            before_block(0, 1)
            return small[: file.read_into(small, start)]
    first = start // PAGE_BYTES * PAGE_BYTES
    size = -(-(stop - first) // PAGE_BYTES) * PAGE_BYTES
    memory = memoryview(huge_pages.anonymous(size))[:size]
    total = -(-size // BLOCK_BYTES)
    done = 0
    with (
        closing_file(store.open_existing(path)) as cached,
        closing_file(store.open_existing(path, direct=True)) as direct,
        ThreadPoolExecutor(_READERS, thread_name_prefix="lastgood-read") as readers,
    ):
        pending: deque[Future[int]] = deque()
        for index in range(total):
            before_block(index, total)
            if len(pending) == _READERS:
                done += pending.popleft().result()
            at = index * BLOCK_BYTES
            pending.append(readers.submit(_read, cached, direct, memory[at : at + BLOCK_BYTES], first + at))
        done += sum(reading.result() for reading in pending)
    return memory[start - first : min(done, stop - first)]


def _read(cached: StoreFile, direct: StoreFile, block: memoryview, position: int) -> int:
    file = cached if cached.is_cached(position, len(block)) else direct
    return file.read_into(block, position)
