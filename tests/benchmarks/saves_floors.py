"""Floors: the same bytes as a save, moved with nothing around it. What no save on this machine can beat."""

import mmap
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import saves_helper
import torch
import torch.distributed as dist
from saves_training import Arm, Training, as_bytes

PAGE_BYTES = 4096


class Copy:
    """Shared memory for one copy of a rank's state, faulted in when it is used first."""

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.fd = -1
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cover(self, training: Training) -> None:
        sources = [as_bytes(tensor) for tensor in training.local_tensors().values()]
        if self.memory is None:
            needed = sum(source.nbytes for source in sources)
            size = -(-needed // PAGE_BYTES) * PAGE_BYTES
            self.fd = os.memfd_create("bench-saves")
            os.ftruncate(self.fd, size)
            self.memory = memoryview(mmap.mmap(self.fd, size))
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._pairs, start = [], 0
        for source in sources:
            self._pairs.append((whole[start : start + source.nbytes], source))
            start += source.nbytes

    def fill(self) -> None:
        assert self._pairs, "nothing to copy"
        for target, source in self._pairs:
            target.copy_(source)

    def give_back(self) -> None:
        for target, source in self._pairs:
            source.copy_(target)


class _Floor(Arm):
    fsyncs = True
    restores = ()
    gives_back = False

    def __init__(self, name: str, copy: Copy) -> None:
        self.name = name
        self._copy = copy
        self._ended: float | None = None

    def prepare(self, training: Training) -> None:
        self._copy.cover(training)

    def done(self) -> float | None:
        return self._ended

    @property
    def memory(self) -> memoryview:
        assert self._copy.memory is not None
        return self._copy.memory


class CopyFloor(_Floor):
    fsyncs = False
    restores = ("warm",)

    def begin(self, directory: Path) -> None:
        self._copy.fill()
        self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        self._copy.give_back()


class DirectFloor(_Floor):
    """Writes what the copy holds, and reads it back: no copy, no training beside it."""

    restores = ("cold",)

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self._copy.fill()

    def begin(self, directory: Path) -> None:
        saves_helper.write_direct(self.memory, file_of(directory))
        self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        saves_helper.read_direct(self.memory, file_of(directory))


class HelperFloor(_Floor):
    """A copy, which a helper process writes while training goes on; made in the loop, or beside it in a thread."""

    def __init__(self, name: str, copy: Copy, *, overlapped: bool) -> None:
        super().__init__(name, copy)
        self._overlapped = overlapped
        self._helper: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path) -> None:
        self._ended = None
        if self._helper is None:
            self._helper = subprocess.Popen(
                [sys.executable, saves_helper.__file__, str(self._copy.fd), str(len(self.memory))],
                pass_fds=[self._copy.fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        if self._overlapped:
            self._thread = threading.Thread(target=self._fill_and_tell, args=(file_of(directory),))
            self._thread.start()
        else:
            self._fill_and_tell(file_of(directory))

    def _fill_and_tell(self, path: str) -> None:
        assert self._helper is not None and self._helper.stdin is not None
        self._copy.fill()
        self._helper.stdin.write(f"{path}\n")
        self._helper.stdin.flush()

    def before_optimizer(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def done(self) -> float | None:
        assert self._helper is not None and self._helper.stdout is not None
        if self._ended is None and select.select([self._helper.stdout], [], [], 0)[0]:
            line = self._helper.stdout.readline()
            if not line:
                raise OSError("the helper ended")
            self._ended = float(line)
        return self._ended


def file_of(directory: Path) -> str:
    return str(directory / f"rank-{dist.get_rank()}.bytes")


def floors() -> list[Arm]:
    copy = Copy()
    return [
        CopyFloor("floor-copy", copy),
        DirectFloor("floor-direct", copy),
        HelperFloor("floor-helper", copy, overlapped=False),
        HelperFloor("floor-helper-overlapped", copy, overlapped=True),
    ]


def floors_again() -> list[Arm]:
    """For what is measured in another sitting."""
    copy = Copy()
    return [CopyFloor("floor-copy-again", copy), HelperFloor("floor-helper-again", copy, overlapped=False)]
