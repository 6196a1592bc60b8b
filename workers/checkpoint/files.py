"""Open files of a store: positioned reads and writes, past the page cache where the file system allows.

Faults survived: a file system, a device or a memory address that does not take O_DIRECT (the page cache is used
instead, and `direct` says so); short reads and writes.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Protocol, TypeVar

_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_SECTOR_BYTES = 512
_File = TypeVar("_File", "StoreFile", "WritableFile", "NewFile")
_libc = ctypes.CDLL(None, use_errno=True)


class StoreFile(Protocol):
    """A file that is open for reading. `direct` is true while that goes past this machine's page cache."""

    direct: bool

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Read as much as fits from this byte position; returns the number of bytes, less only at the file's end."""

    def is_cached(self, position: int, size_bytes: int) -> bool:
        """Whether all of this range, from a page boundary to one or to the file's end, is in the page cache."""

    def drop_cache(self) -> None:
        """Ask the kernel to forget its cached pages of this file."""

    def close(self) -> None:
        """Close it; nothing is flushed."""


class WritableFile(StoreFile, Protocol):
    """A file with a name that is open for writing too."""

    def write_at(self, data: memoryview, position: int) -> None:
        """Write all of `data` at this byte position."""

    def truncate(self, size_bytes: int) -> None:
        """Set the file's length."""

    def sync(self) -> None:
        """Make contents and length durable."""


class NewFile(Protocol):
    """A file that is being written, and has no name yet. Nothing of it counts until it is published."""

    def write_at(self, data: memoryview, position: int) -> None:
        """Write all of `data` at this byte position, which is where the last write ended."""

    def truncate(self, size_bytes: int) -> None:
        """Set the file's length, which may cut off a part of the last write."""

    def sync(self) -> None:
        """Make contents and length durable, as far as that is possible before the file has a name."""

    def publish(self) -> None:
        """Give it its name; FileExistsError if that is taken. The name is durable after Store.sync_dir."""

    def discard(self) -> None:
        """It is not going to be published: delete it, as far as that is possible."""

    def close(self) -> None:
        """Close it; what was neither published nor discarded may stay, without a name."""


class AppendFile(Protocol):
    """A file that is open for appending."""

    def append(self, data: bytes) -> None:
        """Write all of `data` at the file's end."""

    def sync(self) -> None:
        """Make contents and length durable."""

    def close(self) -> None:
        """Close it; nothing is flushed."""


class LocalFile:
    """A WritableFile on a POSIX file system. Falls back to the page cache where O_DIRECT is refused."""

    def __init__(self, descriptor: int, *, direct: bool) -> None:
        self._descriptor = descriptor
        self.direct = False
        if direct:
            self._set_direct(True)

    def write_at(self, data: memoryview, position: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:], position + done)
            except OSError as error:
                self._fall_back(error)

    def read_into(self, buffer: memoryview, position: int) -> int:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], position + done)
            except OSError as error:
                self._fall_back(error)
                continue
            done += count
            if count == 0 or (self.direct and count % _SECTOR_BYTES):
                break  # the end; asking again from an unaligned position would look like a refusal of O_DIRECT
        return done

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def is_cached(self, position: int, size_bytes: int) -> bool:
        size_bytes = min(size_bytes, os.fstat(self._descriptor).st_size - position)
        if size_bytes <= 0:
            return True
        with mmap.mmap(self._descriptor, size_bytes, offset=position, access=mmap.ACCESS_COPY) as memory:
            pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
            address = ctypes.c_ubyte.from_buffer(memory)
            try:
                failed = _libc.mincore(ctypes.byref(address), ctypes.c_size_t(size_bytes), pages)
            finally:
                del address  # the mapping cannot be closed before
            return failed == 0 and 0 not in bytes(pages)

    def drop_cache(self) -> None:
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)

    def _set_direct(self, wanted: bool) -> None:
        # Set on the open file rather than at open: some file systems create the file and then refuse the flag.
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            self.direct = wanted
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise

    def _fall_back(self, error: OSError) -> None:
        """Go through the page cache from here on, if the error may mean that O_DIRECT does not work; else raise it.

        Also met at unaligned memory and after a short write, which leave the rest unaligned.
        """
        if not self.direct or error.errno not in _DIRECT_REFUSED:
            raise error
        self._set_direct(False)


class LocalAppendFile:
    """An AppendFile on a POSIX file system."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.write(self._descriptor, data[done:])

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def closing_file(file: _File) -> Iterator[_File]:
    """Close the file at the end of the block, also after an error."""
    try:
        yield file
    finally:
        file.close()
