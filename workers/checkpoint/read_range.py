"""Reading a part of a file as fast as it comes, into memory of its own or block by block.

Blocks that lie in the page cache are copied from there; others are read past it, straight into huge pages: fresh
memory in ordinary pages would take longer to be mapped than to be read into. Two blocks are under way at a time, so
that one is mapped while the device works on the other. What is small is read as any file is.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from workers.checkpoint import huge_pages
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import StoreFile, closing_file
from workers.checkpoint.header import PAGE_BYTES
from workers.checkpoint.store import Store

_SMALL_BYTES = 1 << 20
_READERS = 2


BeforeBlock = Callable[[int, int], None]
"""Called with (index, total) in the caller's thread before each block is read."""


def read_range(store: Store, path: str, start: int, stop: int, *, before_block: BeforeBlock) -> memoryview:
    """Bytes start to stop of a file, fewer if it ends before; writable, and page-aligned where `start` is."""
    if stop - start <= _SMALL_BYTES:
        small = memoryview(bytearray(max(0, stop - start)))
        with closing_file(store.open_existing(path)) as file:
            before_block(0, 1)
            return small[: file.read_into(small, start)]
    first = start // PAGE_BYTES * PAGE_BYTES
    memory = memoryview(huge_pages.anonymous(stop - first))

    def own_place(index: int) -> memoryview:
        return memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    done = sum(len(block) for block in _blocks(store, path, first, stop, own_place, before_block))
    return memory[start - first : min(done, stop - first)]


def stream_range(store: Store, path: str, start: int, stop: int, *, before_block: BeforeBlock) -> Iterator[memoryview]:
    """The same in order, in blocks; each is valid until the next one is asked for. Needs memory for three blocks."""
    if stop - start <= _SMALL_BYTES:
        yield read_range(store, path, start, stop, before_block=before_block)
        return
    first = start // PAGE_BYTES * PAGE_BYTES
    memory = memoryview(huge_pages.anonymous((_READERS + 1) * BLOCK_BYTES))

    def place(index: int) -> memoryview:
        at = index % (_READERS + 1) * BLOCK_BYTES
        return memory[at : at + BLOCK_BYTES]

    position = first
    for block in _blocks(store, path, first, stop, place, before_block):
        yield block[max(0, start - position) : stop - position]
        position += len(block)


def _blocks(
    store: Store,
    path: str,
    first: int,
    stop: int,
    place: Callable[[int], memoryview],
    before_block: BeforeBlock,
) -> Iterator[memoryview]:
    """What is read into the places, whole pages, in order; when one is given out, those after it are being filled."""
    size = -(-(stop - first) // PAGE_BYTES) * PAGE_BYTES
    total = -(-size // BLOCK_BYTES)
    with (
        closing_file(store.open_existing(path)) as cached,
        closing_file(store.open_existing(path, direct=True)) as direct,
        ThreadPoolExecutor(_READERS, thread_name_prefix="lastgood-read") as readers,
    ):
        pending: deque[tuple[memoryview, Future[int]]] = deque()
        for index in range(total + _READERS):
            if index < total:
                before_block(index, total)
                at = index * BLOCK_BYTES
                block = place(index)[: size - at]
                pending.append((block, readers.submit(_read, cached, direct, block, first + at)))
            if index >= _READERS and pending:
                block, reading = pending.popleft()
                yield block[: reading.result()]


def _read(cached: StoreFile, direct: StoreFile, block: memoryview, position: int) -> int:
    file = cached if cached.is_cached(position, len(block)) else direct
    return file.read_into(block, position)
