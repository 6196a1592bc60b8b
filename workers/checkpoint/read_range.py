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


class CachedBlock:
    """Bytes of a file that lie in the page cache: to be copied from there straight to where they belong."""

    def __init__(self, file: StoreFile, position: int, size_bytes: int) -> None:
        self.file = file
        self.position = position
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def read_into(self, buffer: memoryview, start: int) -> int:
        """The block's bytes from `start` on; returns how many there were, less only at the file's end."""
        return self.file.read_into(buffer, self.position + start)


Block = memoryview | CachedBlock


def read_range(store: Store, path: str, start: int, stop: int, *, before_block: BeforeBlock) -> memoryview:
    """Bytes start to stop of a file, fewer if it ends before; writable, and page-aligned where `start` is."""
    if stop - start <= _SMALL_BYTES:
        small = memoryview(bytearray(max(0, stop - start)))
        with closing_file(store.open_existing(path)) as file:
            before_block(0, 1)
            return small[: file.read_into(small, start)]
    first = start // PAGE_BYTES * PAGE_BYTES
    memory = memoryview(huge_pages.anonymous(stop - first))
    at = done = 0
    for block in _blocks(store, path, first, stop, memory, before_block):
        if isinstance(block, CachedBlock):
            done += block.read_into(memory[at : at + len(block)], 0)
        else:
            done += len(block)
        at += BLOCK_BYTES
    return memory[start - first : min(done, stop - first)]


def stream_range(store: Store, path: str, start: int, stop: int, *, before_block: BeforeBlock) -> Iterator[Block]:
    """The same in order, in blocks; each is valid until the next one is asked for. Needs memory for three blocks."""
    if stop - start <= _SMALL_BYTES:
        yield read_range(store, path, start, stop, before_block=before_block)
        return
    first = start // PAGE_BYTES * PAGE_BYTES
    memory = memoryview(huge_pages.anonymous((_READERS + 1) * BLOCK_BYTES))
    position = first
    for block in _blocks(store, path, first, stop, memory, before_block):
        skipped, wanted = max(0, start - position), min(len(block), stop - position)
        position += len(block)
        if isinstance(block, CachedBlock):
            yield CachedBlock(block.file, block.position + skipped, wanted - skipped)
        else:
            yield block[skipped:wanted]


def _blocks(
    store: Store, path: str, first: int, stop: int, memory: memoryview, before_block: BeforeBlock
) -> Iterator[Block]:
    """Whole pages, in order. What is not cached is read into `memory`, each block into the next part of it, and into
    the first again at its end; when one is given out, those after it are being read."""
    size = -(-(stop - first) // PAGE_BYTES) * PAGE_BYTES
    total = -(-size // BLOCK_BYTES)
    places = -(-len(memory) // BLOCK_BYTES)
    with (
        closing_file(store.open_existing(path)) as cached,
        closing_file(store.open_existing(path, direct=True)) as direct,
        ThreadPoolExecutor(_READERS, thread_name_prefix="lastgood-read") as readers,
    ):
        pending: deque[CachedBlock | tuple[memoryview, Future[int]]] = deque()
        for index in range(total + _READERS):
            if index < total:
                before_block(index, total)
                at = index * BLOCK_BYTES
                length = min(BLOCK_BYTES, size - at)
                if cached.is_cached(first + at, length):
                    pending.append(CachedBlock(cached, first + at, length))
                else:
                    place = index % places * BLOCK_BYTES
                    block = memory[place : place + length]
                    pending.append((block, readers.submit(direct.read_into, block, first + at)))
            if index >= _READERS and pending:
                ready = pending.popleft()
                yield ready if isinstance(ready, CachedBlock) else ready[0][: ready[1].result()]
