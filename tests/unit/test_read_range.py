"""A part of a file comes whole, from the page cache or past it, and no faster path returns other bytes."""

import os
from pathlib import Path

import pytest

from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import LocalFile, closing_file
from workers.checkpoint.read_range import Block, CachedBlock, read_range, stream_range
from workers.checkpoint.store import LocalStore

SIZE = 2 * BLOCK_BYTES + 5000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    return store


def drop(store: LocalStore) -> None:
    with closing_file(store.open_existing("file")) as file:
        file.sync()
        file.drop_cache()


def read(store: LocalStore, start: int, stop: int) -> memoryview:
    return read_range(store, "file", start, stop, before_block=lambda _index, _total: None)


def content_of(block: Block) -> bytes:
    if isinstance(block, CachedBlock):
        buffer = bytearray(len(block))
        return bytes(buffer[: block.read_into(memoryview(buffer), 0)])
    return bytes(block)


@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, SIZE),
        (0, SIZE + 100_000),
        (1, SIZE - 1),
        (4096, BLOCK_BYTES + 4096),
        (BLOCK_BYTES - 3, SIZE - 4097),
        (SIZE - 10, SIZE),
        (7, 7),
        (SIZE + 5, SIZE + 9),
    ],
)
def test_a_range_has_exactly_the_files_bytes(store: LocalStore, start: int, stop: int, is_cold: bool) -> None:
    if is_cold:
        drop(store)
    content = read(store, start, stop)
    assert bytes(content) == (store.root / "file").read_bytes()[start:stop]
    content[:] = bytes(len(content))  # it may be written to
    blocks = stream_range(store, "file", start, stop, before_block=lambda _index, _total: None)
    assert b"".join(map(content_of, blocks)) == (store.root / "file").read_bytes()[start:stop]


def test_what_is_in_the_page_cache_is_read_from_there_and_the_rest_past_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = LocalFile.read_into
    seen: list[tuple[int, bool]] = []

    def noting(self: LocalFile, buffer: memoryview, position: int) -> int:
        seen.append((position, self.direct))
        return read_into(self, buffer, position)

    monkeypatch.setattr(LocalFile, "read_into", noting)
    drop(store)
    with closing_file(store.open_existing("file", direct=True)) as file:
        if not file.direct or file.is_cached(0, SIZE):
            pytest.skip("this file system has no O_DIRECT, or keeps its files in memory")
    with open(store.root / "file", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        file.read(BLOCK_BYTES)
    read(store, 0, SIZE)
    assert sorted(seen) == [(0, False), (BLOCK_BYTES, True), (2 * BLOCK_BYTES, True)]


def test_a_file_that_is_cut_short_gives_what_is_there(store: LocalStore) -> None:
    os.truncate(store.root / "file", BLOCK_BYTES + 10)
    assert len(read(store, 0, SIZE)) == BLOCK_BYTES + 10


def test_an_error_in_the_middle_is_raised(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_self: LocalFile, _buffer: memoryview, position: int) -> int:
        if position:
            raise OSError("the device fails")
        return BLOCK_BYTES

    monkeypatch.setattr(LocalFile, "read_into", failing)
    with pytest.raises(OSError, match="the device fails"):
        read(store, 0, SIZE)
