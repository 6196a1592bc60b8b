"""A bare process that writes shared memory to files with O_DIRECT and fsync: the least that a save in the background
can cost. Without torch, and nothing else than what is needed.

    python saves_helper.py FD BYTES     (path on a line -> seconds by the monotonic clock on a line, when it is durable)
"""

import mmap
import os
import sys
import time

BLOCK_BYTES = 8 << 20


def write_direct(memory: memoryview, path: str) -> None:
    """`memory` is page-aligned, and whole pages long."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        for start in range(0, len(memory), BLOCK_BYTES):
            os.pwrite(fd, memory[start : start + BLOCK_BYTES], start)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_direct(memory: memoryview, path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for start in range(0, len(memory), BLOCK_BYTES):
            os.preadv(fd, [memory[start : start + BLOCK_BYTES]], start)
    finally:
        os.close(fd)


def main() -> None:
    memory = memoryview(mmap.mmap(int(sys.argv[1]), int(sys.argv[2]), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    for line in sys.stdin:
        write_direct(memory, line.strip())
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
