"""Memory in huge pages, where the kernel gives them; in ordinary ones elsewhere, without a word.

A device takes a request as a list of pages, and its lists are short: from pages of 4 KiB a block of 8 MiB is many
requests, from pages of 2 MiB it is few. Written with O_DIRECT from huge pages, the same bytes were durable in less than
half the time. A process is forked, and ends, the faster the fewer pages it has.
"""

import ctypes
import errno
import mmap
import os

HUGE_PAGE_BYTES = 2 << 20

_MADV_COLLAPSE = 25  # Linux 6.1; older ones answer EINVAL
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def anonymous(size_bytes: int) -> mmap.mmap:
    """Private memory of at least this size, rounded up to whole huge pages; nothing of it is there until it is used."""
    memory = mmap.mmap(-1, -(-max(size_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise
    return memory


def back(descriptor: int, size_bytes: int) -> bool:
    """Give a memfd, still empty and not sealed, its first `size_bytes`, in huge pages as far as they go; False if the
    kernel gives none.

    What is not backed here is left as a hole: allocate it as usual afterwards. Raises OSError if memory runs out.
    """
    os.ftruncate(descriptor, size_bytes)
    whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole_bytes:
        return False
    for start in range(0, whole_bytes, HUGE_PAGE_BYTES):
        os.posix_fallocate(descriptor, start, mmap.PAGESIZE)  # a range without any page is not collapsed
    # The address must be aligned as the offset in the file is, which only a mapping over a larger one ensures.
    outer_bytes = whole_bytes + HUGE_PAGE_BYTES
    outer = _map(None, outer_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        aligned = outer + -outer % HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _map(aligned, whole_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        return bool(_libc.madvise(aligned, whole_bytes, _MADV_COLLAPSE) == 0)
    finally:
        _libc.munmap(outer, outer_bytes)


def gather_private() -> None:
    """Put what this process has in private memory into huge pages, once: what is used afterwards stays as it is.

    Takes half a millisecond a MiB. Where the kernel gives none, nothing happens.
    """
    for start, end in _private_ranges():
        first, last = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < last:
            _libc.madvise(first, last - first, mmap.MADV_HUGEPAGE)
            _libc.madvise(first, last - first, _MADV_COLLAPSE)


def _private_ranges() -> list[tuple[int, int]]:
    """Start and end of the memory that is writable, private and of no file, but for the stack."""
    ranges = []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, permissions, _offset, _device, inode, *name = line.split()
            if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, end = addresses.split("-")
                ranges.append((int(start, 16), int(end, 16)))
    return ranges


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
