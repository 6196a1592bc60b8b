"""Sends copies of this node's shards to a peer, beside the training and the saving.

Invariants: a rank has one transfer in flight and one waiting at most; a newer one replaces the one that waits. Nothing
here blocks whoever asks, and nothing is held: a shard whose memory is used again meanwhile just does not arrive. Each
transfer that was asked for ends with one report, unless a newer one replaced it.

Faults survived: a peer that is dead, slow or says no (reported, after bounded time).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.errors import EnvironmentProblem
from workers.replication.copies import SetKey
from workers.replication.pace import Pace
from workers.replication.protocol import ShardKey
from workers.replication.server import FindShard
from workers.replication.transfer import Peer, put_shard

logger = logging.getLogger("lastgood")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """How sending a copy ended; `error` is None if the peer has it."""

    key: ShardKey
    seconds: float
    image_bytes: int = 0
    error: str | None = None


class Replicator:
    """One thread. `find` finds the shards; `report` is called on that thread for each transfer that ended."""

    def __init__(self, *, find: FindShard, pace: Pace, report: Callable[[Copied], None]) -> None:
        self._find = find
        self._pace = pace
        self._report = report
        self._waiting: dict[int, tuple[ShardKey, Peer, SetKey]] = {}
        self._in_flight: ShardKey | None = None
        self._cancelled = threading.Event()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="lastgood-copies", daemon=True)
        self._thread.start()

    def send(self, key: ShardKey, peer: Peer, *, keep: SetKey) -> None:
        """Send that shard when it is its turn; `keep` is what the peer is to keep beside it."""
        with self._changed:
            self._waiting[key.rank] = key, peer, keep  # in the place of an older one, so that no rank starves
            self._changed.notify_all()

    def end_generation(self, generation: int) -> None:
        """Send nothing of this generation, or an older one, any more."""
        with self._changed:
            for rank in [rank for rank, (key, _, _) in self._waiting.items() if key.generation <= generation]:
                del self._waiting[rank]
            if self._in_flight is not None and self._in_flight.generation <= generation:
                self._cancelled.set()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._cancelled.set()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if self._closed:
                    return
                key, peer, keep = self._waiting.pop(next(iter(self._waiting)))
                self._in_flight = key
                self._cancelled.clear()
            copied = self._copy(key, peer, keep)
            with self._changed:
                self._in_flight = None
            if copied.error is not None:
                logger.warning("lastgood: step %d of rank %d was not copied: %s", key.step, key.rank, copied.error)
            self._report(copied)

    def _copy(self, key: ShardKey, peer: Peer, keep: SetKey) -> Copied:
        began = time.monotonic()
        slot = self._find(key)
        if slot is None:
            return Copied(key=key, seconds=0.0, error="the snapshot is not there any more")
        error: str | None = None
        image_bytes = slot.image_bytes
        try:
            put_shard(peer, key, slot, keep=keep, pace=self._pace, cancelled=self._cancelled)
        except (OSError, EnvironmentProblem) as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            slot.close()
        return Copied(key=key, seconds=time.monotonic() - began, image_bytes=image_bytes, error=error)
