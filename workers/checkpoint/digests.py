"""Digests of an image: one over the whole file and one for each tensor, in a single pass over its bytes.

The whole digest is what commits a file; the tensors' digests say which tensor is bad, and let a rank check the few
tensors that it takes from another rank's file. All are xxh3_128 in hexadecimal: against accidents, not adversaries.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from workers.checkpoint import header, huge_pages
from workers.checkpoint.files import StoreFile, closing_file
from workers.checkpoint.manifest import ReadFrom, TensorRecord
from workers.checkpoint.pace import Pace
from workers.checkpoint.store import Store

BLOCK_BYTES = 8 << 20
_PIECE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigests:
    """What was found in a file: its length, the digest of all bytes, and of each tensor by name."""

    bytes: int
    digest: str
    tensors: dict[str, str]
    verified_from: ReadFrom


class _Digester:
    """Takes the bytes of a file in order, in small pieces: the second digest finds each in the processor's cache."""

    def __init__(self, tensors: Iterable[TensorRecord]) -> None:
        self._whole = xxhash.xxh3_128()
        self._position = 0
        self._ahead = sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop), reverse=True)
        self._current = xxhash.xxh3_128()
        self._done: dict[str, str] = {}

    def update(self, block: memoryview) -> None:
        for start in range(0, len(block), _PIECE_BYTES):
            self._take(block[start : start + _PIECE_BYTES])

    def _take(self, block: memoryview) -> None:
        self._whole.update(block)
        end = self._position + len(block)
        while self._ahead and self._ahead[-1].start < end:
            tensor = self._ahead[-1]
            begin = max(tensor.start, self._position)
            self._current.update(block[begin - self._position : min(tensor.stop, end) - self._position])
            if tensor.stop > end:
                break
            self._finish(tensor)
        self._position = end

    def finish(self) -> tuple[str, dict[str, str]]:
        """(whole, by tensor). A tensor that the file cuts off has the digest of what is there."""
        while self._ahead:
            self._finish(self._ahead[-1])
        return self._whole.hexdigest(), self._done

    def _finish(self, tensor: TensorRecord) -> None:
        self._ahead.pop()
        self._done[tensor.name] = self._current.hexdigest()
        self._current = xxhash.xxh3_128()


def image_digests(image: memoryview, tensors: Iterable[TensorRecord]) -> tuple[str, dict[str, str]]:
    """(digest of the whole image, digest of each tensor by name); `image` ends where the file will end."""
    digester = _Digester(tensors)
    for position in range(0, len(image), BLOCK_BYTES):
        digester.update(image[position : position + BLOCK_BYTES])
    return digester.finish()


def file_digests(
    store: Store, path: str, tensors: Iterable[TensorRecord] = (), *, pace: Pace | None = None
) -> FileDigests:
    """Read every byte of a file, past the page cache where that is possible, no faster than `pace` allows."""
    digester = _Digester(tensors)
    size = 0
    with closing_file(store.open_existing(path, direct=True)) as file:
        if not file.direct:
            file.drop_cache()
        for block in read_blocks(file, pace):
            digester.update(block)
            size += len(block)
        verified_from: ReadFrom = "memory" if store.in_memory() else "device" if file.direct else "cache"
    whole, by_tensor = digester.finish()
    return FileDigests(bytes=size, digest=whole, tensors=by_tensor, verified_from=verified_from)


def file_header(store: Store, path: str) -> header.ShardHeader:
    """The header of a shard file; CheckpointDamaged if it has none."""
    with closing_file(store.open_existing(path)) as file:
        prefix = memoryview(bytearray(header.LENGTH_FIELD.size))
        prefix = prefix[: file.read_into(prefix, 0)]
        whole = memoryview(bytearray(header.header_bytes(prefix, path)))
        return header.parse_header(whole[: file.read_into(whole, 0)], path)


def read_blocks(file: StoreFile, pace: Pace | None = None) -> Iterator[memoryview]:
    """The file's content in order; each block is valid until the next one is asked for, which is read meanwhile."""
    with (
        huge_pages.anonymous(2 * BLOCK_BYTES) as memory,
        memoryview(memory) as both,
        both[:BLOCK_BYTES] as first,
        both[BLOCK_BYTES : 2 * BLOCK_BYTES] as second,
        ThreadPoolExecutor(1, thread_name_prefix="lastgood-read") as reader,
    ):

        def read(buffer: memoryview, position: int) -> "Future[int]":
            if pace is not None:
                pace.take(BLOCK_BYTES)
            return reader.submit(file.read_into, buffer, position)

        position = 0
        current, other = first, second
        reading = read(current, position)
        while count := reading.result():
            position += count
            is_last = count < BLOCK_BYTES
            if not is_last:
                reading = read(other, position)
            with current[:count] as block:
                yield block
            if is_last:
                return
            current, other = other, current
