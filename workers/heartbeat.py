"""The heartbeat page: one page of shared memory in which a rank says how far it is.

Writing it costs the step path a few stores and no system call; the agent reads it whenever it likes. A reader may see a
mix of two writes: every field is valid on its own, and nothing that decides correctness is read from here.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass

_FORMAT = struct.Struct("<qqdd")
_PHASES = ("standby", "starting", "rendezvous", "building", "restoring", "training", "saving", "finishing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """`step`: steps finished; `at_seconds`: monotonic clock of the last write; `loss`: NaN if the loop gave none."""

    step: int
    phase: str
    at_seconds: float
    loss: float


class HeartbeatPage:
    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._phase = 0
        self._step = -1
        self._loss = float("nan")

    @staticmethod
    def create_fd() -> int:
        fd = os.memfd_create("lastgood-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def beat(self, *, step: int | None = None, phase: str | None = None, loss: float | None = None) -> None:
        if step is not None:
            self._step = step
        if phase is not None:
            self._phase = _PHASES.index(phase)
        if loss is not None:
            self._loss = loss
        _FORMAT.pack_into(self._map, 0, self._step, self._phase, time.monotonic(), self._loss)

    def read(self) -> Heartbeat:
        step, phase, at, loss = _FORMAT.unpack_from(self._map, 0)
        return Heartbeat(step=step, phase=_PHASES[phase], at_seconds=at, loss=loss)

    def close(self) -> None:
        self._map.close()
