"""Stand-ins for the processes around one part: the keeper and the agent of a session, the coordinator and the ranks of
a keeper. They speak the real protocol over real sockets and real slots, and only do what a test tells them to.

Nothing here sleeps: what was sent is in the socket when the sender's call returns, and what comes later is waited for
with a deadline.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoint_samples import write_shard_of
from torch import nn

from workers.checkpoint import image
from workers.checkpoint.manifest import MANIFEST_FILE, Manifest, checkpoint_dir, checkpoint_name
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState, NamedTensor
from workers.heartbeat import HeartbeatPage
from workers.messages import Command, Event, RestoreOrder
from workers.orders import RankOrders
from workers.session import Session
from workers.wire import Channel, accept, channel_pair, connect, listen

DEADLINE_SECONDS = 20.0


class FakeKeeper:
    """Welcomes ranks on a thread; everything else that they send is read when the test asks for it.

    `settle`: finishes the copies that the ranks have in flight, so that all is sent which is going to be.
    """

    def __init__(self, address: str, settle: Callable[[], None] = lambda: None) -> None:
        self._settle = settle
        self.slots: list[Slot] = []
        self.hellos: list[dict[str, Any]] = []
        self.seen: list[str] = []
        self._channels: list[Channel] = []
        self._listener = listen(address)
        self._thread = threading.Thread(target=self._welcome, daemon=True)
        self._thread.start()

    def _welcome(self) -> None:
        while True:
            try:
                channel = accept(self._listener)
            except OSError:
                return
            assert channel is not None
            received = channel.receive(DEADLINE_SECONDS)
            assert received is not None
            self.hellos.append(received[0])
            self._channels.append(channel)
            channel.send("welcome", fds=tuple(slot.fd for slot in self.slots))

    def next_message(self, timeout_seconds: float = 0.0) -> dict[str, Any] | None:
        """What a rank has sent; None if there is nothing."""
        if not self._channels:
            return None
        try:
            received = self._channels[-1].receive(timeout_seconds)
        except TimeoutError:
            return None
        if received is None:
            return None
        message, fds = received
        self.seen.append(message["kind"])
        if message["kind"] == "slots":
            for slot in self.slots:
                slot.close()
            self.slots = [Slot.from_fd(fd) for fd in fds]
        return message

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """All that was sent and not read yet, of one kind; slots are taken over on the way."""
        self._settle()
        found = []
        while (message := self.next_message()) is not None:
            if message["kind"] == kind:
                found.append(message)
        return found

    def snapshot_steps(self) -> list[int]:
        return [message["step"] for message in self.messages("snapshot")]

    def slot_of(self, step: int) -> Slot:
        return next(slot for slot in self.slots if slot.state is SlotState.COMPLETE and slot.step == step)

    def release_all(self) -> None:
        for slot in self.slots:
            slot.release()

    def commit(self, run_dir: Path, step: int) -> RestoreOrder:
        """Make the snapshot of `step` a committed checkpoint, as keeper and coordinator do."""
        slot = self.slot_of(step)
        name = checkpoint_name(step, slot.generation, 1)
        store = LocalStore(run_dir)
        shard = write_shard_of(store, name, slot)
        manifest = Manifest(
            run="run",
            generation=slot.generation,
            step=step,
            attempt=1,
            world_size=1,
            shards=(shard,),
            identity={},
            progress={"step": step},
            created_at=0.0,
        )
        store.write_atomic(f"{checkpoint_dir(name)}/{MANIFEST_FILE}", manifest.to_bytes(), points="commit", context={})
        slot.release()
        return RestoreOrder(source="checkpoint", generation=manifest.generation, step=step, checkpoint=name)

    def die(self) -> None:
        """Nothing of it is left, as after SIGKILL; its address is free when this returns."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_SECONDS)
        for channel in self._channels:
            channel.close()
        for slot in self.slots:
            slot.close()
        self._channels, self.slots = [], []


class FakeAgent:
    """The agent's end of a session's channel."""

    def __init__(self) -> None:
        self.channel, self.of_session = channel_pair()

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """All that the session has told since the last call, of one kind."""
        found = []
        while True:
            try:
                received = self.channel.receive(0.0)
            except TimeoutError:
                return found
            if received is None:
                return found
            if received[0]["kind"] == kind:
                found.append(received[0])

    def tell_outcome(self, step: int, *, committed: bool, reason: str = "") -> None:
        self.channel.send("save_outcome", step=step, committed=committed, reason=reason)

    def close(self) -> None:
        self.channel.close()
        self.of_session.close()


class Rig:
    """A run directory with a keeper; sessions of one rank are made in it, each of a new generation."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.address = f"lastgood-test-{uuid.uuid4().hex}"
        self._sessions: list[Session] = []
        self.keeper = FakeKeeper(self.address, self.settle)
        self.agent = FakeAgent()
        self.generation = 0

    def session(self, config: Any = None, **orders: Any) -> Session:
        self.generation += 1
        self.agent.close()
        self.agent = FakeAgent()
        heartbeat = HeartbeatPage.create_fd()
        session = Session(
            make_orders(self.run_dir, **{"keeper_address": self.address, "generation": self.generation, **orders}),
            agent=self.agent.of_session,
            page=HeartbeatPage(heartbeat),
            device=torch.device("cpu"),
            config=config,
        )
        os.close(heartbeat)
        self._sessions.append(session)
        return session

    def settle(self) -> None:
        for session in self._sessions:
            session._saver.settle()

    def revive_keeper(self) -> None:
        self.keeper = FakeKeeper(self.address, self.settle)

    def wait_for_snapshot(self) -> int:
        """The step of the next snapshot, by whichever keeper it is told to."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            message = self.keeper.next_message(0.05)
            if message is not None and message["kind"] == "snapshot":
                return int(message["step"])
            if message is not None and message["kind"] == "slots" and not message["fresh"]:
                return max(slot.step for slot in self.keeper.slots if slot.state is SlotState.COMPLETE)
        raise AssertionError("no snapshot came")

    @contextmanager
    def answering(self, outcomes: Sequence[bool], *, commit: bool = False) -> Iterator[list[RestoreOrder]]:
        """Answer the next snapshots with these outcomes, one after the other; `commit`: the good ones in earnest."""
        committed: list[RestoreOrder] = []
        failed: list[BaseException] = []

        def answer() -> None:
            try:
                for outcome in outcomes:
                    step = self.wait_for_snapshot()
                    if outcome and commit:
                        committed.append(self.keeper.commit(self.run_dir, step))
                    self.keeper.release_all()
                    self.agent.tell_outcome(step, committed=outcome, reason="" if outcome else "the disk is full")
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield committed
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
        assert not failed, failed

    def close(self) -> None:
        for session in self._sessions:
            session._saver.close()
        self.agent.close()
        self.keeper.die()


def make_orders(run_dir: Path, **changes: Any) -> RankOrders:
    values: dict[str, Any] = {
        "run": "run",
        "run_dir": run_dir,
        "checkpoint_storage": None,
        "save_every_steps": None,
        "save_at_end": True,
        "snapshot_slots": 2,
        "memory_fraction_max": 1.0,
        "save_timeout_seconds": DEADLINE_SECONDS,
        "collective_timeout_seconds": DEADLINE_SECONDS,
        "record_samples": True,
        "check_replicas": True,
        "generation": 1,
        "rank": 0,
        "local_rank": 0,
        "local_world_size": 1,
        "world_size": 1,
        "threads": 1,
        "store_host": "127.0.0.1",
        "store_port": 0,
        "keeper_address": "lastgood-nobody",
    }
    return RankOrders(**{**values, **changes})


class Loop:
    """A user's loop, one step at a time: dropout draws from the generator, momentum is state of the optimizer."""

    def __init__(self, session: Session, *, samples: int = 64, batch: int = 4, endless: bool = True) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = session.data_loader(list(range(samples)), global_batch_size=batch, endless=endless)
        self._batches: Iterator[torch.Tensor] | None = None

    def track(self) -> "Loop":
        self.session.track(model=self.model, optimizer=self.optimizer, scheduler=None, data=self.data)
        return self

    def restore(self, **options: Any) -> "Loop":
        self.session.restore(**options)
        return self

    def next_batch(self) -> torch.Tensor:
        """Ask for a batch: what the loop's body did for the one before is done then."""
        if self._batches is None:
            self._batches = iter(self.data)
        return next(self._batches)

    def backward(self, batch: torch.Tensor) -> float:
        loss = self.model(batch[:, None].float() / 64).square().mean()
        loss.backward()
        return float(loss.detach())

    def step(self, batch: torch.Tensor, **options: Any) -> None:
        """One whole step, with its boundary."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.session.end_step(loss=loss, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.next_batch())

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


# ---------------------------------------------------------------- around a keeper


class FakeLink:
    """Stands in for workers.link.Link: what the keeper tells is collected, commands come from the test."""

    def __init__(
        self,
        coordinator: str,
        member: str,
        *,
        introduce: Callable[[], Event],
        on_command: Callable[[Command], None],
        on_lost: Callable[[str], None],
        lost_after_seconds: float,
    ) -> None:
        self.introduce = introduce
        self.command = on_command
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def start(self) -> None:
        return

    def close(self) -> None:
        return

    def tell(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def wait_for(self, kind: type[Any]) -> Any:
        """The next event of a kind; it is taken off the list."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(one, kind) for one in self._events), DEADLINE_SECONDS)
            event = next(one for one in self._events if isinstance(one, kind))
            self._events.remove(event)
            return event

    def told(self, kind: type[Any]) -> list[Any]:
        with self._changed:
            return [one for one in self._events if isinstance(one, kind)]


class RankEnd:
    """A rank's end of its connection to a keeper. `slots` are those that the keeper had, then those it was given."""

    def __init__(self, address: str, *, rank: int = 0, generation: int = 1, pid: int | None = None) -> None:
        self.rank, self.generation = rank, generation
        self.channel = connect(address)
        self.channel.send("hello", rank=rank, generation=generation, pid=os.getpid() if pid is None else pid)
        answer = self.channel.receive(DEADLINE_SECONDS)
        self.welcome = answer is not None
        self.slots = [Slot.from_fd(fd) for fd in answer[1]] if answer else []

    def give_slots(self, count: int = 2, image_bytes: int = 1 << 17) -> None:
        for slot in self.slots:
            slot.close()
        self.slots = [Slot.create(image_bytes) for _ in range(count)]
        self.hand_over(fresh=True)

    def hand_over(self, *, fresh: bool = False) -> None:
        self.channel.send("slots", fds=tuple(slot.fd for slot in self.slots), fresh=fresh)

    def snapshot(self, step: int, *, value: float = 1.0, durable: bool = True) -> Slot:
        """Fill a free slot and say so."""
        slot = next(slot for slot in self.slots if slot.state is SlotState.FREE)
        fill(slot, rank=self.rank, generation=self.generation, step=step, value=value)
        self.channel.send(
            "snapshot",
            step=step,
            slot=self.slots.index(slot),
            again=False,
            durable=durable,
            at=1.5,
            copy_seconds=0.25,
            stall_seconds=0.125,
        )
        return slot

    def close(self) -> None:
        self.channel.close()
        for slot in self.slots:
            slot.close()


def fill(slot: Slot, *, rank: int, generation: int, step: int, value: float = 1.0) -> None:
    """A small but real image, of a state that has one tensor."""
    tensor = torch.full((8,), value)
    named = NamedTensor(name="model.weight", tensor=tensor, global_shape=(8,), offsets=(0,))
    document = {
        "rank": rank,
        "identity": {"world_size": 1},
        "progress": {"step": step},
        "replicas": {"sets": []},
    }
    state = CapturedState(tensors=[named], document=document)
    layout = image.plan(state.tensors, state.document)
    slot.begin(rank=rank, generation=generation, step=step)
    slot.complete(layout.write(slot.image, state.tensors, state.document))
