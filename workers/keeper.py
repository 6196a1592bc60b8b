"""The keeper: one actor a node that owns the snapshot memory and turns snapshots into durable, verified shards.

Invariants: a snapshot is written only from a COMPLETE slot, which is HELD meanwhile so that no rank reuses it; each
attempt writes a new file, never an old one; one write a rank is under way, and of those ordered meanwhile the newest is
next; a receipt is sent only for bytes that were read back, unless that is switched off. Faults survived: a rank dies at
any moment (its snapshots stay, its torn slot is reset); the keeper dies (ranks hand the slots over again, receipts that
were not taken are found again by writing the next attempt); the coordinator dies (the keeper introduces itself again
with what it holds).
"""

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from workers import failpoint, processes
from workers.checkpoint.digests import image_digests
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import CHECKPOINTS_DIR
from workers.checkpoint.persist import ReadBack, write_shard
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.store import LocalStore, is_no_space
from workers.groups import GroupRecord
from workers.keeper_messages import (
    EndGeneration,
    GenerationDrained,
    HeldSnapshot,
    KeeperJoined,
    KillAgent,
    PersistFailed,
    PersistOrder,
    ReleaseOrder,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)
from workers.link import Link
from workers.messages import Command
from workers.processes import ProcessId
from workers.wire import Channel, accept, listen

logger = logging.getLogger("lastgood")

_LOST_AFTER_SECONDS = 60.0
_OUTCOMES_KEPT = 64
_DRAIN_SECONDS = 0.5
# What more tries cannot mend: a read-only file system stays so for longer than a save waits.
_LASTING_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def keeper_address(run: str, driver: str, node: str) -> str:
    """The abstract socket at which the keeper of a node listens; at most 107 bytes."""
    return f"lastgood-{run}-{driver}-{node[:16]}"


@dataclass(slots=True)
class _RankMemory:
    """One local rank's slots and the process that fills them now."""

    slots: list[Slot] = field(default_factory=list)
    retired: list[Slot] = field(default_factory=list)
    snapshot_at: dict[tuple[int, int], float] = field(default_factory=dict)
    attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    is_writing: bool = False
    waiting: PersistOrder | None = None
    pid: int = 0
    generation: int = 0


class Keeper:
    """The actor's class; made one by the coordinator's side (`ray.remote`), usable without Ray in tests through
    `serve`."""

    def __init__(
        self,
        *,
        run: str,
        driver: str,
        node: str,
        run_dir: str,
        coordinator: str,
        takeover_seconds: float,
        read_back: ReadBack | None,
        failpoints: tuple[failpoint.Arm, ...] = (),
    ) -> None:
        self._node = node
        self._read_back = read_back
        self._name = f"{driver}/keeper-{node}"
        self._store = LocalStore(Path(run_dir))
        self._ranks: dict[int, _RankMemory] = {}
        self._outcomes: dict[PersistOrder, ShardPersisted | PersistFailed | None] = {}
        self._releases: dict[int, ReleaseOrder] = {}
        self._readers: dict[threading.Thread, int] = {}
        self._lock = threading.RLock()
        self._groups = GroupRecord(run, driver, node)
        self._predecessors = self._groups.end_predecessors(takeover_seconds)
        # Once there is none the storage is not looked at again: it may stall or vanish, which must not end the run.
        self._problem = self._find_problem()
        failpoint.arm(failpoints, Path(run_dir) / "faults")
        self._listener = listen(keeper_address(run, driver, node))
        self._link = Link(
            coordinator,
            self._name,
            introduce=self._introduce,
            on_command=self._obey,
            on_lost=self._coordinator_lost,
            lost_after_seconds=_LOST_AFTER_SECONDS,
        )
        threading.Thread(target=self._accept, name="lastgood-accept", daemon=True).start()
        self._link.start()

    # ------------------------------------------------------------ called by the driver

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """The run is over: forget the node's records, so that nothing is left behind."""
        self._link.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
        self._listener.close()
        self._groups.kill_up_to(None)
        self._groups.remove()

    # ------------------------------------------------------------ ranks

    def _accept(self) -> None:
        while True:
            try:
                channel = accept(self._listener)
            except OSError:
                return  # closed
            if channel is not None:
                threading.Thread(target=self._serve_rank, args=(channel,), name="lastgood-rank", daemon=True).start()

    def _serve_rank(self, channel: Channel) -> None:
        received = channel.receive()
        if received is None:
            return
        hello = received[0]
        rank, generation = hello["rank"], hello["generation"]
        with self._lock:
            memory = self._ranks.setdefault(rank, _RankMemory())
            if generation < memory.generation:
                channel.close()
                return
            memory.pid, memory.generation = hello["pid"], generation
            self._readers[threading.current_thread()] = generation
            self._groups.record(hello["pid"], generation)
            for slot in memory.slots:
                if slot.state in (SlotState.WRITING, SlotState.TORN):
                    slot.release()  # its writer is dead
            channel.send("welcome", fds=tuple(slot.fd for slot in memory.slots))
        try:
            while (message := channel.receive()) is not None:
                self._from_rank(rank, generation, memory, message[0], message[1])
        except OSError as error:
            logger.warning("lastgood: rank %d's connection broke: %s", rank, error)
        finally:
            channel.close()
            with self._lock:
                self._readers.pop(threading.current_thread(), None)

    def _from_rank(
        self, rank: int, generation: int, memory: _RankMemory, message: dict[str, object], fds: list[int]
    ) -> None:
        match message["kind"]:
            case "slots":
                self._adopt(rank, memory, [Slot.from_fd(fd) for fd in fds])
            case "snapshot":
                step, at = int(str(message["step"])), float(str(message["at"]))
                with self._lock:
                    held = {(slot.generation, slot.step) for slot in memory.slots + memory.retired}
                    memory.snapshot_at = {key: memory.snapshot_at[key] for key in held & memory.snapshot_at.keys()}
                    memory.attempts = {key: memory.attempts[key] for key in held & memory.attempts.keys()}
                    memory.snapshot_at[generation, step] = at
                self._link.tell(
                    Snapshotted(
                        keeper=self._name,
                        snapshot=HeldSnapshot(rank=rank, generation=generation, step=step),
                        again=bool(message.get("again")),
                    )
                )
            case "skipped":
                self._link.tell(
                    SnapshotSkipped(
                        keeper=self._name,
                        rank=rank,
                        generation=generation,
                        step=int(str(message["step"])),
                        reason=str(message["reason"]),
                    )
                )

    def _adopt(self, rank: int, memory: _RankMemory, slots: list[Slot]) -> None:
        """Take over the slots that a rank made, or that it had from a keeper that died; tell of what they hold."""
        with self._lock:
            # A slot that is being written to disk is dropped when that is done.
            replaced = memory.retired + memory.slots
            memory.retired = [slot for slot in replaced if slot.state is SlotState.HELD]
            memory.slots = slots
            for slot in replaced:
                if slot not in memory.retired:
                    slot.close()
            for slot in slots:
                slot.resume()  # HELD by a keeper that is dead: nobody is writing it now
            held = [slot for slot in slots if slot.state is SlotState.COMPLETE]
        for slot in held:
            snapshot = HeldSnapshot(rank=rank, generation=slot.generation, step=slot.step)
            self._link.tell(Snapshotted(keeper=self._name, snapshot=snapshot))

    # ------------------------------------------------------------ the coordinator

    def _introduce(self) -> KeeperJoined:
        if self._problem is not None:
            self._problem = self._find_problem()
        with self._lock:
            snapshots = tuple(
                HeldSnapshot(
                    rank=rank,
                    generation=slot.generation,
                    step=slot.step,
                    attempt=memory.attempts.get((slot.generation, slot.step), 0),
                )
                for rank, memory in self._ranks.items()
                for slot in memory.slots
                if slot.state in (SlotState.COMPLETE, SlotState.HELD)
            )
            return KeeperJoined(
                keeper=self._name,
                node=self._node,
                pid=os.getpid(),
                snapshots=snapshots,
                receipts=tuple(one for one in self._outcomes.values() if isinstance(one, ShardPersisted)),
                problem=self._problem,
            )

    def _find_problem(self) -> str | None:
        """Why no generation may start on this node; None if one may."""
        if self._predecessors:
            return (
                f"processes of an earlier driver of this run are still alive on node {self._node}: pids "
                f"{', '.join(map(str, self._predecessors))}; end them, or raise RecoveryConfig.takeover_seconds"
            )
        if self._store.exists("generations"):
            return None
        return (
            f"RunConfig.storage_path: {self._store.root}, which the driver made, is not there on node {self._node}; "
            f"use a directory that all nodes share"
        )

    def _obey(self, command: Command) -> None:
        match command:
            case PersistOrder():
                self._begin_persist(command)
            case ReleaseOrder():
                self._release(command)
            case EndGeneration():
                self._end_generation(command.generation)
            case KillAgent():
                processes.kill(ProcessId(pid=command.pid, start_ticks=command.start_ticks))

    def _end_generation(self, generation: int) -> None:
        """Kill what is left of its ranks, then read their connections to the end: their last snapshots count."""
        self._groups.kill_up_to(generation)
        with self._lock:
            readers = [reader for reader, owner in self._readers.items() if owner <= generation]
        for reader in readers:
            reader.join(_DRAIN_SECONDS)
        self._link.tell(GenerationDrained(keeper=self._name, generation=generation))

    def _coordinator_lost(self, reason: str) -> None:
        logger.error("lastgood: keeper of node %s ends: %s", self._node, reason)
        self._groups.kill_up_to(None)
        os._exit(1)

    def _release(self, order: ReleaseOrder) -> None:
        with self._lock:
            self._releases[order.generation] = order
            for memory in self._ranks.values():
                for slot in memory.slots:
                    self._release_if_covered(slot)

    def _release_if_covered(self, slot: Slot) -> None:
        order = self._releases.get(slot.generation)
        covered = order is not None and slot.step <= order.upto_step and slot.step not in order.keep
        if covered and slot.state is SlotState.COMPLETE:
            slot.release()

    # ------------------------------------------------------------ writing

    def _begin_persist(self, order: PersistOrder) -> None:
        """Start to write; an order that was carried out before is answered as it was then."""
        with self._lock:
            if order in self._outcomes:
                outcome = self._outcomes[order]
                if outcome is not None:
                    self._link.tell(outcome)
                return
            self._outcomes[order] = None
            memory = self._ranks.setdefault(order.rank, _RankMemory())
            if not memory.is_writing:
                self._start_writing(order, memory)
                return
            replaced, memory.waiting = memory.waiting, order
            if replaced is not None:
                reason = "a newer one was ordered while the one before was still being written"
                self._end_persist(replaced, _failed(self._name, replaced, reason, False))

    def _start_writing(self, order: PersistOrder, memory: _RankMemory) -> None:
        key = (order.generation, order.step)
        held = (slot for slot in memory.slots if (slot.generation, slot.step) == key)
        slot = next((slot for slot in held if slot.state is SlotState.COMPLETE), None)
        if slot is None:
            self._end_persist(order, _failed(self._name, order, "the keeper does not hold that snapshot", False))
            return
        slot.hold()
        memory.attempts[key] = order.attempt
        memory.is_writing = True
        threading.Thread(target=self._persist, args=(order, memory, slot), name="lastgood-persist", daemon=True).start()

    def _persist(self, order: PersistOrder, memory: _RankMemory, slot: Slot) -> None:
        outcome: ShardPersisted | PersistFailed
        try:
            outcome = self._write(order, memory, slot)
        except OSError as error:
            transient = error.errno not in _LASTING_ERRORS
            outcome = _failed(self._name, order, str(error), transient, no_space=is_no_space(error))
        except Exception as error:
            logger.exception("lastgood: the shard of rank %d could not be saved", order.rank)
            outcome = _failed(self._name, order, f"{type(error).__name__}: {error}", True)
        with self._lock:
            slot.resume()
            if slot in memory.retired:
                memory.retired.remove(slot)
                slot.close()
            else:
                self._release_if_covered(slot)
            self._end_persist(order, outcome)
            memory.is_writing = False
            following, memory.waiting = memory.waiting, None
            if following is not None:
                self._start_writing(following, memory)

    def _end_persist(self, order: PersistOrder, outcome: ShardPersisted | PersistFailed) -> None:
        self._outcomes[order] = outcome
        for old in list(self._outcomes)[:-_OUTCOMES_KEPT]:
            del self._outcomes[old]
        self._link.tell(outcome)

    def _write(self, order: PersistOrder, memory: _RankMemory, slot: Slot) -> ShardPersisted:
        context = {
            "rank": order.rank,
            "step": order.step,
            "generation": order.generation,
            "rank_pid": memory.pid,
        }
        if not self._store.exists(CHECKPOINTS_DIR):
            # Not made anew: if it is an unmounted file system, the save would land beside the run.
            raise FileNotFoundError(errno.ENOENT, "the run directory has vanished", str(self._store.root))
        content = slot.image[: slot.image_bytes]
        parsed = parse_header(content)
        written = write_shard(
            self._store,
            order.checkpoint,
            order.rank,
            order.world_size,
            slot.image,
            slot.image_bytes,
            context,
            digests=image_digests(content, parsed.tensors.values()),
            read_back=self._read_back,
        )
        document = parsed.document
        return ShardPersisted(
            rank=order.rank,
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            shard=written.shard,
            snapshot_at=memory.snapshot_at.get((order.generation, order.step), time.time()),
            durable_seconds=written.durable_seconds,
            verify_seconds=written.verify_seconds,
            identity=document["identity"],
            progress=document["progress"],
            replicas=document.get("replicas", {}),
        )


def _failed(keeper: str, order: PersistOrder, error: str, transient: bool, *, no_space: bool = False) -> PersistFailed:
    return PersistFailed(
        keeper=keeper,
        rank=order.rank,
        generation=order.generation,
        step=order.step,
        attempt=order.attempt,
        error=error,
        transient=transient,
        no_space=no_space,
    )
