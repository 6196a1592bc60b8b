"""Memory in huge pages is memory like any other, and all of it is there."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.checkpoint import huge_pages
from workers.checkpoint.huge_pages import HUGE_PAGE_BYTES
from workers.checkpoint.slots import Slot


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * HUGE_PAGE_BYTES - 4096])
def test_a_memfd_is_as_long_as_asked_and_empty_whether_the_kernel_gives_huge_pages_or_not(
    descriptor: int, size: int
) -> None:
    given = huge_pages.back(descriptor, size)
    found = os.fstat(descriptor)
    assert found.st_size == size
    assert os.pread(descriptor, size, 0) == bytes(size)
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    assert not given or whole > 0
    if given:
        assert found.st_blocks * 512 >= whole, "all of it has memory"


def test_a_kernel_that_gives_no_huge_pages_gives_ordinary_ones(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 99)
    assert not huge_pages.back(descriptor, 2 * HUGE_PAGE_BYTES)
    slot = Slot.create(2 * HUGE_PAGE_BYTES)
    slot.image[:] = b"x" * len(slot.image)
    assert os.fstat(slot.fd).st_blocks * 512 >= 2 * HUGE_PAGE_BYTES
    slot.close()


def test_nothing_stays_mapped(descriptor: int) -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii") as maps:
            return sum("memfd:test" in line for line in maps)

    huge_pages.back(descriptor, 4 * HUGE_PAGE_BYTES)
    assert mapped() == 0


def test_what_a_process_has_is_as_it_was_after_it_was_put_into_huge_pages() -> None:
    code = (
        "import os\n"
        "from workers.checkpoint.huge_pages import gather_private\n"
        "blocks = [os.urandom(1000) for _ in range(20_000)]\n"
        "expected = hash(b''.join(blocks))\n"
        "def huge():\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('AnonHugePages'))\n"
        "before = huge()\n"
        "gather_private()\n"
        "assert hash(b''.join(blocks)) == expected\n"
        "print(before, huge())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    chosen = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    assert after > before or "[never]" in chosen


def test_anonymous_memory_is_whole_huge_pages_and_writable() -> None:
    with huge_pages.anonymous(HUGE_PAGE_BYTES + 1) as memory:
        assert len(memory) == 2 * HUGE_PAGE_BYTES
        assert memory[: mmap.PAGESIZE] == bytes(mmap.PAGESIZE)
        memory[-1] = 1
