"""A rank's snapshots: slots shared with the keeper, and the copy of the training state into one of them.

Invariants: while a copy is in flight, only its thread talks to the keeper; the next snapshot settles it first.

Faults survived: a rank killed while it copies (the slot stays WRITING and is never persisted); a keeper that dies and
comes back (the rank connects again and hands its slots over); a disk so slow that no slot is free (the snapshot is
skipped and recorded, training goes on). Slots belong to the keeper and outlive the rank: the next generation's rank
gets them back.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable
from typing import Any

import torch

from workers import failpoint
from workers.checkpoint import image
from workers.checkpoint.document import to_bytes
from workers.checkpoint.held import HeldShards, fetch
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.tensors import CapturedState
from workers.errors import EnvironmentProblem
from workers.heartbeat import HeartbeatPage
from workers.memory_budget import Need, bounds, problem
from workers.messages import RestoreOrder
from workers.orders import RankOrders
from workers.overlap import Copier, Copy
from workers.state.training import TrainingState
from workers.streams import stream_for
from workers.wire import Channel, connect

logger = logging.getLogger("lastgood")

_CONNECT_SECONDS = 30.0
_POLL_SECONDS = 0.002
_ALLOCATE_SECONDS_MAX = 300.0
_NO_SLOT = "no snapshot slot was free"
_MAKE_ROOM_SECONDS = 0.5
_COPIES_KEPT = 2
"""Of each rank of the node whose copies this one keeps: the newest that is whole, and the one that arrives."""


class SnapshotWriter:
    """`page`: where signs of life go while a snapshot is taken."""

    def __init__(self, orders: RankOrders, page: HeartbeatPage, device: torch.device) -> None:
        self._orders = orders
        self._page = page
        self._copier = Copier(stream_for(device), page.beat)
        self._keeper: Channel | None = None
        self._slots: list[Slot] = []
        self._layout: image.ImageLayout | None = None
        self._copies_bytes = 0  # that this node has for another one already

    def check_memory(self, state: TrainingState) -> None:
        """Refuse to train if the snapshots could not fit beside it; raises EnvironmentProblem with the numbers."""
        orders = self._orders
        held = self._connect_and_adopt()
        if len(held) >= orders.snapshot_slots:
            return  # an earlier generation's: they fit
        copies = _COPIES_KEPT if self._copied() else 0
        held_bytes = sum(slot.capacity for slot in held)
        need = Need(
            image_bytes=state.bytes_estimate(),
            slots=orders.snapshot_slots,
            local_ranks=orders.local_world_size,
            replicas=copies,
            held_bytes=held_bytes + self._copies_bytes // orders.local_world_size,
        )
        if found := problem(need, bounds(orders.memory_fraction_max)):
            raise EnvironmentProblem(found)

    def take(
        self,
        capture: Callable[[], CapturedState],
        *,
        step: int,
        durable: bool,
        wait_seconds: float | None = None,
        again: bool = False,
    ) -> bool:
        """Copy the state into a free slot and tell the keeper; False if there is none in time.

        While the keeper is gone, snapshots are taken as long as there are free slots, for its successor.

        With `wait_seconds` the copy is done when this returns; without, a part of it may go on beside the training, and
        `settle` says whether it was any good. `durable`: it is due to be written to storage.
        """
        self.settle()
        self.reconnect_if_lost()
        if self._keeper is None and not self._slots:
            return False
        context = {
            "rank": self._orders.rank,
            "step": step,
            "generation": self._orders.generation,
            "rank_pid": os.getpid(),
        }
        failpoint.hit("snapshot.begin", **context)
        began_at = time.monotonic()
        told: dict[str, Any] = {"step": step, "durable": durable}
        try:
            # What only stays in memory leaves a slot for the next save.
            spare = 0 if durable else 1
            if wait_seconds is None and not self._may_get_slot(spare) and not (durable and self._keeper_made_room()):
                return self._skip(_NO_SLOT, told)
            captured = capture()
            document = to_bytes(captured.whole_document())
            if self._layout is None or not self._layout.fits(captured.tensors, document):
                self._layout = image.plan(captured.tensors, captured.whole_document())
            index = self._free_slot(self._layout.image_bytes, wait_seconds or 0.0, durable=durable, spare=spare)
            if index is None:
                return self._skip(_NO_SLOT, told)
            slot = self._slots[index]
            slot.begin(rank=self._orders.rank, generation=self._orders.generation, step=step)

            def before_group(copied: int, total: int) -> None:
                failpoint.hit("snapshot.copy", index=copied, total=total, **context)

            def done(copy: Copy) -> None:
                with contextlib.suppress(OSError):  # a keeper that died: its successor is handed what is complete
                    if copy.changed:
                        self._skip(_changed_text(copy.changed), told)
                        return
                    failpoint.hit("snapshot.complete", **context)
                    seconds: dict[str, Any] = {
                        "copy_seconds": copy.copied_at - began_at,
                        "stall_seconds": copy.stall_seconds,
                    }
                    self._send("snapshot", slot=index, again=again, at=time.time(), **told, **seconds)
                    failpoint.hit("snapshot.told", **context)

            self._copier.begin(
                self._layout,
                captured,
                document,
                slot,
                began_at=began_at,
                beside=wait_seconds is None,
                before_group=before_group,
                done=done,
            )
        except OSError:
            return False  # the keeper has just died; a slot that is complete is handed to its successor
        except EnvironmentProblem as problem:
            # The state has grown, and there is no memory for it: unprotected training is better than none.
            logger.error("rank %d: step %d is not saved: %s", self._orders.rank, step, problem)
            return self._skip(str(problem), told)
        return True

    def settle(self) -> bool:
        """Wait for the copy that is in flight; False if its snapshot was discarded, since the state had changed."""
        copy = self._copier.settle()
        if copy is None or not copy.changed:
            return True
        logger.warning("rank %d: %s", self._orders.rank, _changed_text(copy.changed))
        return False

    def take_waited_seconds(self) -> float:
        """For how long the loop has waited for copies in flight, since the last call."""
        return self._copier.take_waited_seconds()

    def close(self) -> None:
        """Finish what is in flight; nothing is taken after that."""
        try:
            self.settle()
        except Exception:
            logger.exception("rank %d: a snapshot has failed", self._orders.rank)
        self._copier.close()

    def held_shards(self, order: RestoreOrder) -> HeldShards:
        """The shards of a set of snapshots in the keepers' memory. Raises CheckpointDamaged if one cannot be had,
        OSError if this node's keeper dies meanwhile."""
        slots = self._connect_and_adopt()
        assert self._keeper is not None
        orders = self._orders
        return fetch(self._keeper, orders.rank, order, orders.world_size, mapped=slots, alive=self._page.beat)

    def _skip(self, reason: str, told: dict[str, Any]) -> bool:
        self._send("skipped", reason=reason, **told)
        return False

    def _may_get_slot(self, spare: int) -> bool:
        """False if it is known without a look at the state that none can be had."""
        complete = len(self._slots) == self._orders.snapshot_slots
        return not complete or len(self._free()) > spare

    def _free(self) -> list[int]:
        return [index for index, slot in enumerate(self._slots) if slot.state is SlotState.FREE]

    def _free_slot(self, image_bytes: int, wait_seconds: float, *, durable: bool, spare: int) -> int | None:
        if len(self._slots) < self._orders.snapshot_slots or any(slot.capacity < image_bytes for slot in self._slots):
            if self._keeper is None:
                return None  # what lies in the slots is for its successor
            self._replace_slots(image_bytes)
        deadline = time.monotonic() + wait_seconds
        ask_at = time.monotonic()
        while True:
            free = self._free()
            if len(free) > spare:
                return free[0]
            if durable and time.monotonic() >= ask_at:
                ask_at = time.monotonic() + _MAKE_ROOM_SECONDS
                if self._keeper_made_room():
                    continue
            if time.monotonic() >= deadline:
                return None
            self._page.beat()
            time.sleep(_POLL_SECONDS)

    def _keeper_made_room(self) -> bool:
        """Whether the keeper has freed a slot that it only kept for the time in which a newer one is copied."""
        if not self._copied() or self._keeper is None:
            return False
        self._send("make_room")
        try:
            answer = self._keeper.receive(_MAKE_ROOM_SECONDS)
        except TimeoutError:
            return False  # should it come late, it is passed over
        if answer is None:
            raise OSError("the keeper closed the connection")
        return bool(answer[0].get("made"))

    def _copied(self) -> bool:
        """Whether other nodes keep copies of what is here."""
        return self._orders.replicate_snapshots and self._orders.world_size > self._orders.local_world_size

    def _replace_slots(self, image_bytes: int) -> None:
        """Fresh slots of the right size; the keeper finishes with the old ones and drops them."""
        with self._page.declared("allocating snapshots", _ALLOCATE_SECONDS_MAX):
            old, self._slots = self._slots, [Slot.create(image_bytes) for _ in range(self._orders.snapshot_slots)]
        for slot in old:
            self._copier.forget(slot)
            slot.close()
        self._send("slots", fds=tuple(slot.fd for slot in self._slots), fresh=True)

    def reconnect_if_lost(self) -> None:
        """Notice that the keeper has died, and hand the slots to its successor once that listens; never waits."""
        if self._keeper is not None and not self._slots_known_to_keeper():
            self._keeper.close()
            self._keeper = None
        if self._keeper is None and self._slots:
            with contextlib.suppress(OSError):
                self._introduce(connect(self._orders.keeper_address))

    def _slots_known_to_keeper(self) -> bool:
        assert self._keeper is not None
        poller = select.poll()
        poller.register(self._keeper, 0)  # hang-ups are reported without asking
        return not poller.poll(0)

    def _connect_and_adopt(self) -> list[Slot]:
        """Connect to the keeper if need be, and take over or hand over the slots."""
        self.reconnect_if_lost()
        deadline = time.monotonic() + _CONNECT_SECONDS
        while self._keeper is None:
            try:
                self._introduce(connect(self._orders.keeper_address))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"the keeper of this node does not answer at {self._orders.keeper_address!r}: {error}"
                    ) from error
                time.sleep(_POLL_SECONDS)
        return self._slots

    def _introduce(self, keeper: Channel) -> None:
        keeper.send("hello", rank=self._orders.rank, generation=self._orders.generation, pid=os.getpid())
        answer = keeper.receive(_CONNECT_SECONDS)
        if answer is None:
            raise OSError("the keeper closed the connection")
        self._keeper = keeper
        self._copies_bytes = answer[0].get("copies_bytes", 0)
        if self._slots:
            self._send("slots", fds=tuple(slot.fd for slot in self._slots), fresh=False)
        else:
            self._slots = [Slot.from_fd(fd) for fd in answer[1]]

    def _send(self, kind: str, fds: tuple[int, ...] = (), **fields: object) -> None:
        if self._keeper is None:
            raise OSError("the keeper is gone, and there is none in its place yet")
        self._keeper.send(kind, fds=fds, **fields)


def _changed_text(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} changed between two steps of the optimizer; from now on copied before the next step begins"
