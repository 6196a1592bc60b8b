"""The heartbeat page: one page of shared memory in which a rank says how far it is.

Writing it costs the step path a few stores and no system call; the agent reads it whenever it likes. Two threads of
the rank write, each its own part: the loop's (step, phase, moves) and the watcher's (collectives, see workers.watcher).
A reader may see a mix of two writes: every field is valid on its own, and what is decided from here (whether a rank
hangs) is decided from several reads.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LABEL_BYTES = 48
_LOOP = struct.Struct(f"<qqqddd{_LABEL_BYTES}s")
_WATCHER = struct.Struct("<qq")
_WATCHER_OFFSET = 512
_STEPS_OFFSET = 1024
_STEP = struct.Struct("<d")
STEPS_KEPT = 64
_PHASES = ("standby", "starting", "rendezvous", "building", "restoring", "training", "saving", "finishing", "declared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """`step`: steps finished. `phase`: see `HeartbeatPage`; `label` and `allowance_seconds` are those of a phase that
    the loop declared. `moves` counts signs of life, and `moved_at` is the monotonic clock at the last one. `loss`: NaN
    if the loop gave none. `sequence`: collectives begun, over all process groups, as seen at `tick`, the number of the
    watcher's last look.
    """

    step: int
    phase: str
    label: str
    allowance_seconds: float
    moves: int
    moved_at: float
    loss: float
    sequence: int
    tick: int


class HeartbeatPage:
    """Both ends of the page, over a file descriptor that agent and rank share."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._phase = 0
        self._label = b""
        self._step = -1
        self._moves = 0
        self._allowance_seconds = 0.0
        self._loss = float("nan")

    @staticmethod
    def create_fd() -> int:
        fd = os.memfd_create("lastgood-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def beat(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        loss: float | None = None,
        step_seconds: float | None = None,
    ) -> None:
        """Say that the rank is alive, and what has changed."""
        if step is not None:
            self._step = step
        if phase is not None:
            self._phase, self._label, self._allowance_seconds = _PHASES.index(phase), b"", 0.0
        if loss is not None:
            self._loss = loss
        if step_seconds is not None:
            _STEP.pack_into(self._map, _place(self._step), step_seconds)
        self._write()

    @contextmanager
    def declared(self, label: str, allowance_seconds: float) -> Iterator[None]:
        """A phase with a name of its own, in which the rank may be still for so long."""
        before = self._phase, self._label, self._allowance_seconds
        self._phase, self._label = _PHASES.index("declared"), label.encode()[:_LABEL_BYTES]
        self._allowance_seconds = allowance_seconds
        self._write()
        try:
            yield
        finally:
            self._phase, self._label, self._allowance_seconds = before
            self._write()

    def observe(self, *, sequence: int, tick: int) -> None:
        """The watcher's part."""
        _WATCHER.pack_into(self._map, _WATCHER_OFFSET, sequence, tick)

    def read(self) -> Heartbeat:
        step, phase, moves, moved_at, allowance_seconds, loss, label = _LOOP.unpack_from(self._map, 0)
        sequence, tick = _WATCHER.unpack_from(self._map, _WATCHER_OFFSET)
        return Heartbeat(
            step=step,
            phase=_PHASES[phase],
            label=label.rstrip(b"\0").decode(errors="ignore"),
            allowance_seconds=allowance_seconds,
            moves=moves,
            moved_at=moved_at,
            loss=loss,
            sequence=sequence,
            tick=tick,
        )

    def step_seconds(self, after: int, upto: int) -> tuple[float, ...]:
        """How long these steps took; of many, the last STEPS_KEPT."""
        steps = range(max(after, upto - STEPS_KEPT) + 1, upto + 1)
        return tuple(_STEP.unpack_from(self._map, _place(step))[0] for step in steps)

    def close(self) -> None:
        self._map.close()

    def _write(self) -> None:
        self._moves += 1
        _LOOP.pack_into(
            self._map,
            0,
            self._step,
            self._phase,
            self._moves,
            time.monotonic(),
            self._allowance_seconds,
            self._loss,
            self._label,
        )


def _place(step: int) -> int:
    return _STEPS_OFFSET + step % STEPS_KEPT * _STEP.size
