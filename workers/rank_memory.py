"""What a keeper holds for one rank: its slots, and what is known of the snapshots in them. Not thread-safe: the keeper
calls all but `work` and `wait` with its lock held.

Invariants:
- A snapshot is held, and told of, once it is digested; each image is digested once, on a thread of its own, in the
  order in which the rank made them. Until then, and while it is written to storage, its slot is not released.
- The digest in a slot's header is of what was read after the rank had said that the snapshot is complete.
- A later snapshot of the same step replaces the earlier one.

Faults survived: a rank that hands over other slots than before, because its state has grown or the keeper was
restarted: what is complete in the old ones stays until it is released.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.checkpoint.digests import image_digests
from workers.checkpoint.header import parse_header
from workers.checkpoint.slots import Slot, SlotState
from workers.errors import CheckpointDamaged
from workers.keeper_messages import HeldSnapshot, PersistOrder, ReleaseOrder

Key = tuple[int, int]  # generation and step


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One snapshot. `digest` is of the whole image; `document` has what is needed of the rank's document. `is_copy`: it
    lies in the memory for another node's shards, through a mapping of its own."""

    rank: int
    key: Key
    slot: Slot
    at: float
    durable: bool
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    attempt: int = 0
    digest: str = ""
    is_copy: bool = False
    document: dict[str, Any] = field(default_factory=dict)
    _by_tensor: dict[str, str] | None = None

    @property
    def content(self) -> memoryview:
        return self.slot.image[: self.slot.image_bytes]

    def read(self) -> None:
        """Find out digest and document; CheckpointDamaged if the image is none."""
        parsed = parse_header(self.content, self._what)
        self.document = {name: parsed.document.get(name, {}) for name in ("identity", "progress", "replicas")}
        self.digest = self.slot.digest
        if not self.digest:  # an earlier keeper had got so far
            self.digest, self._by_tensor = image_digests(self.content, parsed.tensors.values())

    def digests(self) -> tuple[str, dict[str, str]]:
        """Of the whole, and of each tensor; CheckpointDamaged if the bytes are no longer those that were digested."""
        if self._by_tensor is None:
            whole, by_tensor = image_digests(self.content, parse_header(self.content, self._what).tensors.values())
            if whole != self.digest:
                raise CheckpointDamaged(f"{self._what} has changed in memory")
            self._by_tensor = by_tensor
        return self.digest, self._by_tensor

    def told(self) -> HeldSnapshot:
        return HeldSnapshot(
            rank=self.rank,
            generation=self.key[0],
            step=self.key[1],
            digest=self.digest,
            attempt=self.attempt,
            durable=self.durable,
            replicas=self.document["replicas"],
            copy_seconds=self.copy_seconds,
            stall_seconds=self.stall_seconds,
            finished=bool(self.document["progress"].get("finished")),
        )

    @property
    def _what(self) -> str:
        return f"the snapshot of step {self.key[1]} of rank {self.rank}"


class RankMemory:
    """`pid`, `generation`: of the process that fills the slots now. `is_writing`: whether one of its snapshots is being
    written to storage; `waiting`: what to write next."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slots: list[Slot] = []
        self.held: dict[Key, Held] = {}
        self.pid = 0
        self.generation = 0
        self.is_writing = False
        self.waiting: PersistOrder | None = None
        self._retired: list[Slot] = []
        self._pending: list[Held] = []
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def snapshot(self, message: dict[str, Any], generation: int) -> Held | None:
        """What the rank says that it has made; None if no slot has it. If it is not known yet, it is to be read."""
        key = (generation, int(message["step"]))
        slot = self.slots[message["slot"]] if message["slot"] < len(self.slots) else None
        if slot is None or slot.state is not SlotState.COMPLETE or (slot.generation, slot.step) != key:
            return None
        # It may have been complete already when the slot was handed over.
        known = next(
            (one for one in (*self._pending, *self.held.values()) if one.slot is slot and one.key == key), None
        )
        held = known or self._await(Held(rank=self.rank, key=key, slot=slot, at=0.0, durable=True))
        held.at, held.durable = float(message["at"]), message["durable"]
        held.copy_seconds, held.stall_seconds = float(message["copy_seconds"]), float(message["stall_seconds"])
        return held

    def adopt(self, slots: list[Slot], *, fresh: bool) -> list[Held]:
        """Take over the slots that a rank has made (`fresh`), or had from a keeper that died; what lies complete in
        these, to be read. What a rank puts into fresh ones meanwhile it tells of itself."""
        if slots and {slot.memory_id for slot in slots} == {slot.memory_id for slot in self.slots}:
            for slot in slots:
                slot.close()
            return []
        replaced, self._retired = self._retired + self.slots, []
        self.slots = slots
        for slot in replaced:
            self._retire(slot)
        for slot in slots:
            slot.resume()  # HELD by a keeper that is dead: nobody is writing it now
        # Whether these were due to be written is not known; one too many does no harm. In the order of time, as a rank
        # tells of its snapshots: an older one that came later would count as not taken.
        return [
            self._await(Held(rank=self.rank, key=(slot.generation, slot.step), slot=slot, at=time.time(), durable=True))
            for slot in sorted(slots, key=lambda slot: (slot.generation, slot.step))
            if slot.state is SlotState.COMPLETE and not fresh
        ]

    def digested(self, held: Held) -> None:
        """It was read: from here on it counts, in place of an earlier one of the same step."""
        self._pending.remove(held)
        held.slot.set_digest(held.digest)
        before = self.held.get(held.key)
        self.held[held.key] = held
        if before is not None and before is not held:
            held.attempt = before.attempt
            if before.slot.state is SlotState.COMPLETE:
                self._free(before.slot)

    def is_known(self, held: Held) -> bool:
        """Whether it was read."""
        return held not in self._pending

    def unreadable(self, held: Held) -> None:
        """What was said to be a snapshot is none."""
        self._pending.remove(held)
        self._free(held.slot)

    def release(self, order: ReleaseOrder) -> None:
        """Free the slots that this covers, except those that are being read or written."""
        for slot in self.slots + self._retired:
            if slot.state is SlotState.COMPLETE and covers(order, slot) and not self._is_pending(slot):
                self.held.pop((slot.generation, slot.step), None)
                self._free(slot)

    def close_free(self) -> None:
        """The rank is on another node now: what is free here is not used any more."""
        for slot in [slot for slot in self.slots if slot.state is SlotState.FREE]:
            self.slots.remove(slot)
            slot.close()

    def make_room(self, releases: Mapping[int, ReleaseOrder]) -> bool:
        """Free the oldest slot that is spare: a snapshot that is due to be written has no other. False if none is."""
        spare = [
            slot
            for slot in self.slots
            if slot.state is SlotState.COMPLETE and not self._is_pending(slot) and is_spare(releases, slot)
        ]
        if not spare:
            return False
        oldest = min(spare, key=lambda slot: (slot.generation, slot.step))
        self.held.pop((oldest.generation, oldest.step), None)
        self._free(oldest)
        return True

    def written(self, held: Held, order: ReleaseOrder | None) -> None:
        """The slot is no longer being written to storage; `order`: what was released of its generation meanwhile."""
        held.slot.resume()
        if held.is_copy:
            held.slot.close()
        elif self.held.get(held.key) is not held:
            self._free(held.slot)
        elif order is not None and covers(order, held.slot):
            del self.held[held.key]
            self._free(held.slot)

    def free_torn(self) -> None:
        """The rank that filled the slots is dead: what it had not completed is worth nothing."""
        for slot in self.slots:
            if slot.state in (SlotState.WRITING, SlotState.TORN):
                slot.release()

    def work(self, job: Callable[[], None]) -> None:
        """Do this on the rank's thread, after what was given to it before."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name="lastgood-digest", daemon=True)
            self._worker.start()
        self._work.put(job)

    def wait(self, timeout_seconds: float) -> bool:
        """Until all that was given to the thread so far is done; whether that was in time."""
        if self._worker is None:
            return True
        done = threading.Event()
        self._work.put(done.set)
        return done.wait(max(0.0, timeout_seconds))

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _await(self, held: Held) -> Held:
        self._pending.append(held)
        return held

    def _is_pending(self, slot: Slot) -> bool:
        return any(held.slot is slot for held in self._pending)

    def _retire(self, slot: Slot) -> None:
        if slot.state in (SlotState.COMPLETE, SlotState.HELD):
            self._retired.append(slot)
        else:
            slot.close()

    def _free(self, slot: Slot) -> None:
        slot.release()
        if slot in self._retired:
            self._retired.remove(slot)
            slot.close()


def covers(order: ReleaseOrder, slot: Slot) -> bool:
    """Whether the snapshot in this slot is not needed any more."""
    kept = order.keep + order.spare
    return slot.generation == order.generation and slot.step <= order.upto_step and slot.step not in kept


def is_spare(releases: Mapping[int, ReleaseOrder], slot: Slot) -> bool:
    """Whether this slot may be used again, if that cannot be helped."""
    order = releases.get(slot.generation)
    return order is not None and slot.step <= order.upto_step and slot.step in order.spare
