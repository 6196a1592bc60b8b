"""The memory in which a keeper has copies of the shards of another node.

Invariants: of each rank there are at most two: of the set that is to be kept (the newest one that is copied for all
ranks), and another one, complete or arriving. A shard counts only once its digest was compared. What a generation that
has ended still sends replaces nothing: a rank may be restoring from what is here.

Memory is used again where it fits, since fresh memory is slow to fill; what has no room is refused.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.checkpoint.slots import Slot, SlotState
from workers.replication.protocol import PeerRefused, ShardKey

SetKey = tuple[int, int]
"""Generation and step: ordered as the states of one lineage are."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A shard on its way into `slot`; whoever receives it stops when it is cancelled."""

    key: ShardKey
    image_bytes: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    slot: Slot = field(init=False)


class Copies:
    """`available()`: how many bytes of this node's memory may still be used. For use by any thread."""

    def __init__(self, available: Callable[[], int]) -> None:
        self._available = available
        self._lock = threading.Lock()
        self._complete: dict[ShardKey, Slot] = {}
        self._arriving: dict[ShardKey, Arriving] = {}
        self._keep: SetKey = (0, 0)
        self._over_upto = 0

    def begin(self, key: ShardKey, image_bytes: int, digest: str) -> Arriving | None:
        """Memory for a shard that comes now, to be ended by `complete` or `discard`; None if it is there already.

        Another one of the same step replaces the one before: its rank took it once more.

        PeerRefused if there is no room, or it is not wanted any more.
        """
        with self._lock:
            if key in self._complete and self._complete[key].digest == digest:
                return None
            if key.generation <= self._over_upto or key.set < self._keep:
                raise PeerRefused(f"step {key.step} of generation {key.generation} is not wanted any more")
            for other in self._arriving.values():
                if other.key.rank == key.rank and other.key >= key:
                    raise PeerRefused(f"step {other.key.step} of rank {key.rank} is on its way already")
            for other in self._arriving.values():
                if other.key.rank == key.rank:
                    other.cancelled.set()
            spare = self._make_way(key, image_bytes)
            arriving = self._arriving[key] = Arriving(key, image_bytes)
        try:
            if spare is None and image_bytes > self._available():
                raise PeerRefused(f"there is no memory for the {image_bytes / 2**20:,.0f} MiB of rank {key.rank}")
            arriving.slot = spare or Slot.create(image_bytes)
            arriving.slot.begin(rank=key.rank, generation=key.generation, step=key.step)
        except BaseException:
            with self._lock:
                del self._arriving[key]
            raise
        return arriving

    def complete(self, arriving: Arriving, digest: str) -> None:
        """All its bytes are there and have this digest, which is the right one."""
        key = arriving.key
        arriving.slot.complete(arriving.image_bytes)
        arriving.slot.set_digest(digest)
        with self._lock:
            del self._arriving[key]
            if arriving.cancelled.is_set():
                arriving.slot.close()
                raise PeerRefused("cancelled")
            self._complete[key] = arriving.slot

    def discard(self, arriving: Arriving) -> None:
        """It does not come any more; nothing if it is complete."""
        with self._lock:
            if self._arriving.get(arriving.key) is arriving:
                del self._arriving[arriving.key]
                arriving.slot.close()

    def open(self, key: ShardKey) -> Slot | None:
        """The shard, through a descriptor and a mapping of its own, which the caller closes; None if it is not here."""
        with self._lock:
            if key not in self._complete:
                return None
            fd = os.dup(self._complete[key].fd)
        return Slot.from_fd(fd, populate=False)

    def held(self) -> list[ShardKey]:
        with self._lock:
            return sorted(self._complete)

    def bytes(self) -> int:
        """How much memory they take."""
        with self._lock:
            return sum(slot.capacity for slot in self._complete.values())

    def keep(self, kept: SetKey) -> None:
        """This set is now the newest one that is copied for all ranks: older shards are not needed any more."""
        with self._lock:
            self._keep = max(self._keep, kept)
            for key in [key for key in self._complete if key.set < self._keep]:
                self._complete.pop(key).close()

    def end_generation(self, generation: int) -> None:
        """Nothing of this generation, or an older one, is to come any more."""
        with self._lock:
            self._over_upto = max(self._over_upto, generation)
            for arriving in self._arriving.values():
                if arriving.key.generation <= generation:
                    arriving.cancelled.set()

    def close(self) -> None:
        with self._lock:
            for arriving in self._arriving.values():
                arriving.cancelled.set()
            for slot in self._complete.values():
                slot.close()
            self._complete.clear()

    def _make_way(self, key: ShardKey, image_bytes: int) -> Slot | None:
        """Drop what the rank's new shard replaces; its memory, if that is large enough."""
        spare: Slot | None = None
        replaced = [old for old in self._complete if old.rank == key.rank and (old.set != self._keep or old == key)]
        for old in replaced:
            slot = self._complete.pop(old)
            # Not where it is being written to storage.
            if spare is None and slot.capacity >= image_bytes and slot.state is SlotState.COMPLETE:
                slot.release()
                spare = slot
            else:
                slot.close()
        return spare
