"""A rank's snapshots: slots shared with the keeper, and the copy of the training state into one of them.

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

from workers import failpoint
from workers.checkpoint import image
from workers.checkpoint.held import HeldShards, fetch
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.tensors import CapturedState
from workers.errors import EnvironmentProblem
from workers.heartbeat import HeartbeatPage
from workers.memory_budget import Need, bounds, problem
from workers.orders import RankOrders
from workers.state.training import TrainingState
from workers.wire import Channel, connect

logger = logging.getLogger("lastgood")

_CONNECT_SECONDS = 30.0
_POLL_SECONDS = 0.002
_ALLOCATE_SECONDS_MAX = 300.0


class SnapshotWriter:
    """`page`: where signs of life go while a snapshot is taken."""

    def __init__(self, orders: RankOrders, page: HeartbeatPage) -> None:
        self._orders = orders
        self._page = page
        self._keeper: Channel | None = None
        self._slots: list[Slot] = []
        self._layout: image.ImageLayout | None = None

    def check_memory(self, state: TrainingState) -> None:
        """Refuse to train if the snapshots could not fit beside it; raises EnvironmentProblem with the numbers."""
        orders = self._orders
        need = Need(
            image_bytes=state.bytes_estimate(),
            slots=orders.snapshot_slots,
            local_ranks=orders.local_world_size,
            held_bytes=sum(slot.capacity for slot in self._connect_and_adopt()),
        )
        if found := problem(need, bounds(orders.memory_fraction_max)):
            raise EnvironmentProblem(found)

    def take(
        self,
        capture: Callable[[], CapturedState],
        *,
        step: int,
        durable: bool,
        wait_seconds: float,
        again: bool = False,
    ) -> bool:
        """Copy the state into a free slot and tell the keeper; False if there is none in time or the keeper is gone.

        `durable`: it is due to be written to storage.
        """
        began = time.monotonic()
        self.reconnect_if_lost()
        if self._keeper is None:
            return False
        context = {
            "rank": self._orders.rank,
            "step": step,
            "generation": self._orders.generation,
            "rank_pid": os.getpid(),
        }
        failpoint.hit("snapshot.begin", **context)
        captured = capture()
        if self._layout is None or not self._layout.fits(captured.tensors, captured.document):
            self._layout = image.plan(captured.tensors, captured.document)
        try:
            # What only stays in memory leaves a slot for the next save.
            index = self._free_slot(self._layout.image_bytes, wait_seconds, spare=0 if durable else 1)
            if index is None:
                self._send("skipped", step=step, durable=durable, reason="no snapshot slot was free")
                return False
            slot = self._slots[index]
            slot.begin(rank=self._orders.rank, generation=self._orders.generation, step=step)

            def before_tensor(index: int, total: int) -> None:
                self._page.beat()
                failpoint.hit("snapshot.copy", index=index, total=total, **context)

            image_bytes = self._layout.write(slot.image, captured.tensors, captured.document, hook=before_tensor)
            slot.complete(image_bytes)
            failpoint.hit("snapshot.complete", **context)
            seconds = time.monotonic() - began
            self._send(
                "snapshot",
                step=step,
                slot=index,
                again=again,
                durable=durable,
                at=time.time(),
                copy_seconds=seconds,
                stall_seconds=seconds,
            )
        except OSError:
            return False  # the keeper has just died; a slot that is complete is handed to its successor
        except EnvironmentProblem as problem:
            # The state has grown, and there is no memory for it: unprotected training is better than none.
            logger.error("rank %d: step %d is not saved: %s", self._orders.rank, step, problem)
            self._send("skipped", step=step, durable=durable, reason=str(problem))
            return False
        return True

    def held_shards(self, generation: int, step: int) -> HeldShards:
        """The shards of this set of snapshots that this node's keeper holds. Raises CheckpointDamaged if there is none
        of this rank, OSError if the keeper dies meanwhile."""
        slots = self._connect_and_adopt()
        assert self._keeper is not None
        return fetch(self._keeper, self._orders.rank, generation, step, mapped=slots, alive=self._page.beat)

    def _free_slot(self, image_bytes: int, wait_seconds: float, *, spare: int) -> int | None:
        if len(self._slots) < self._orders.snapshot_slots or any(slot.capacity < image_bytes for slot in self._slots):
            self._replace_slots(image_bytes)
        deadline = time.monotonic() + wait_seconds
        while True:
            free = [index for index, slot in enumerate(self._slots) if slot.state is SlotState.FREE]
            if len(free) > spare:
                return free[0]
            if time.monotonic() >= deadline:
                return None
            self._page.beat()
            time.sleep(_POLL_SECONDS)

    def _replace_slots(self, image_bytes: int) -> None:
        """Fresh slots of the right size; the keeper finishes with the old ones and drops them."""
        with self._page.declared("allocating snapshots", _ALLOCATE_SECONDS_MAX):
            old, self._slots = self._slots, [Slot.create(image_bytes) for _ in range(self._orders.snapshot_slots)]
        for slot in old:
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
        if self._slots:
            self._send("slots", fds=tuple(slot.fd for slot in self._slots), fresh=False)
        else:
            self._slots = [Slot.from_fd(fd) for fd in answer[1]]

    def _send(self, kind: str, fds: tuple[int, ...] = (), **fields: object) -> None:
        assert self._keeper is not None
        self._keeper.send(kind, fds=fds, **fields)
