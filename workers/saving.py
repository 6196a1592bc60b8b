"""When a rank's saves are taken, waited for and taken again; workers.snapshots does the copying.

A snapshot that is not durable stays in memory, for the next generation to restore.

Invariants: a save that nobody waits for costs the loop no more than the copy, and is skipped if no slot is free; one
that is waited for ends with the coordinator's word on it or at its deadline; a step whose save was committed is not
saved again unless it is forgotten, and one whose save was given up is, which all ranks do alike.
"""

import logging
import time
from collections.abc import Callable

import torch

from workers.checkpoint.held import HeldShards
from workers.checkpoint.tensors import CapturedState
from workers.heartbeat import HeartbeatPage
from workers.messages import RestoreOrder
from workers.orders import RankOrders
from workers.snapshots import SnapshotWriter
from workers.state.training import TrainingState
from workers.wire import Channel

logger = logging.getLogger("lastgood")

_NOTICE_SECONDS = 0.05
_ATTEMPTS = 4

Capture = Callable[[], CapturedState]


class Saver:
    """One rank's saves of one generation. `capture` gives the state at the boundary of `step`."""

    def __init__(self, orders: RankOrders, *, agent: Channel, page: HeartbeatPage, device: torch.device) -> None:
        self._rank = orders.rank
        self._timeout_seconds = orders.save_timeout_seconds
        self._agent = agent
        self._page = page
        self._snapshots = SnapshotWriter(orders, page, device)
        self._snapshot_step = -1
        self._again_step = -1
        self._outcomes: dict[int, tuple[bool, str]] = {}
        self._ordered: set[int] = set()
        self.save_every_steps = orders.save_every_steps or orders.tuned_save_every_steps
        self.snapshot_every_steps = orders.snapshot_every_steps

    def check_memory(self, state: TrainingState) -> None:
        """Raises EnvironmentProblem, with the numbers, if the snapshots could not fit beside the training."""
        self._snapshots.check_memory(state)

    def save(self, capture: Capture, *, step: int, durable: bool = True) -> None:
        """Take a snapshot if a slot is free; the rest happens beside the training, a part of the copy too."""
        self._snapshot(capture, step, None, durable=durable)

    def settle(self) -> float:
        """Wait until the copy that is in flight is done; returns for how long the loop has waited for copies since the
        last call."""
        if not self._snapshots.settle():
            self._snapshot_step = -1
        return self._snapshots.take_waited_seconds()

    def close(self) -> None:
        """Finish the copy that is in flight; nothing is saved after that."""
        self._snapshots.close()

    def held_shards(self, order: RestoreOrder) -> HeldShards:
        """The shards in memory of a set of snapshots, see SnapshotWriter."""
        return self._snapshots.held_shards(order)

    def save_and_wait(self, capture: Capture, *, step: int) -> bool:
        """Save and wait for the commit; False if it was given up for good, or did not come in time."""
        deadline = time.monotonic() + self._timeout_seconds
        self.settle()
        if self._snapshot_step != step:
            self._snapshot(capture, step, deadline)
        for attempts_left in reversed(range(_ATTEMPTS)):
            while step not in self._outcomes:
                self._page.beat()
                self.take_notices(step, _NOTICE_SECONDS)
                if time.monotonic() > deadline:
                    logger.error("rank %d: no word on the save of step %d in time", self._rank, step)
                    return False
            committed, reason = self._outcomes[step]
            if committed:
                return True  # kept: the loop may ask again at the same step
            del self._outcomes[step]
            logger.warning("rank %d: the save of step %d was given up: %s", self._rank, step, reason)
            if attempts_left:
                self._snapshot(capture, step, deadline)
        self._snapshot_step = -1
        return False

    def forget(self, step: int) -> None:
        """Have this step saved once more, though it was saved already: more is known of it now."""
        if self._outcomes.get(step, (False, ""))[0]:
            del self._outcomes[step]
            self._snapshot_step = -1
            self._again_step = step

    def ordered(self, step: int) -> bool:
        """Whether the coordinator wants this step saved, which just ended."""
        wanted = step in self._ordered
        self._ordered = {later for later in self._ordered if later > step}
        return wanted

    def take_notices(self, step: int, wait_seconds: float = 0.0) -> None:
        """Read what the agent has sent, and give the slots to a keeper that has come back."""
        self._snapshots.reconnect_if_lost()
        while True:
            try:
                message = self._agent.receive(wait_seconds)
            except TimeoutError:
                return
            if message is None:
                return
            wait_seconds = 0.0
            notice = message[0]
            if notice["kind"] == "save_at":
                self._take_order(notice["step"], step)
            elif notice["kind"] == "save_every" and notice["tier"] == "memory":
                self.snapshot_every_steps = notice["steps"]
            elif notice["kind"] == "save_every":
                self.save_every_steps = notice["steps"]
            elif notice["kind"] == "save_outcome":
                self._outcomes[notice["step"]] = (notice["committed"], notice["reason"])
                for known in [known for known in self._outcomes if known < step]:
                    del self._outcomes[known]

    def _take_order(self, ordered: int, step: int) -> None:
        if ordered >= step:
            self._ordered.add(ordered)
        else:
            self._agent.send("save_refused", step=ordered, newest_step=step)

    def _snapshot(self, capture: Capture, step: int, deadline: float | None, *, durable: bool = True) -> None:
        """Take a snapshot if a slot is free; with a deadline, wait for one, and for a keeper that is restarted."""
        self._page.beat(phase="saving")
        while True:
            taken = self._snapshots.take(
                capture,
                step=step,
                durable=durable,
                again=step == self._again_step,
                wait_seconds=None if deadline is None else max(0.0, deadline - time.monotonic()),
            )
            if taken or deadline is None or time.monotonic() >= deadline:
                break
            self._page.beat()
            time.sleep(_NOTICE_SECONDS)
        if taken and durable:
            self._snapshot_step = step
        self._page.beat(phase="training")
