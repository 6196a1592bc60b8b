"""The keeper: one actor a node that owns the snapshot memory and turns snapshots into durable, verified shards.

Invariants: a snapshot is told of once it is digested (workers.rank_memory); it is written only from a COMPLETE slot,
which is HELD meanwhile so that no rank reuses it; each attempt writes a new file, never an old one; one write a rank is
under way, and of those ordered meanwhile the newest is next; a receipt is sent only for bytes that were read back,
unless that is switched off. Faults survived: a rank dies at any moment (its snapshots stay, its torn slot is reset);
the keeper dies (ranks hand the slots over again, receipts that were not taken are found again by writing the next
attempt); the coordinator dies (the keeper introduces itself again with what it holds).
"""

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from workers import failpoint, processes
from workers.checkpoint.manifest import CHECKPOINTS_DIR
from workers.checkpoint.persist import ReadBack, write_shard
from workers.checkpoint.place import open_store
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.store import LocalStore, is_no_space
from workers.errors import CheckpointDamaged
from workers.groups import GroupRecord
from workers.handing_out import HandingOut
from workers.keeper_messages import (
    CopyOrder,
    DropCopies,
    EndGeneration,
    GenerationDrained,
    HeldSnapshot,
    KeeperJoined,
    KillAgent,
    PersistFailed,
    PersistOrder,
    ReleaseOrder,
    ShardCopied,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)
from workers.link import Link
from workers.messages import Command
from workers.processes import ProcessId
from workers.rank_memory import Held, RankMemory
from workers.replication.exchange import Exchange, ExchangeSettings
from workers.replication.protocol import ShardKey
from workers.replication.replicator import Copied
from workers.wire import Channel, accept, listen

logger = logging.getLogger("lastgood")

_LOST_AFTER_SECONDS = 60.0
_OUTCOMES_KEPT = 64
_DRAIN_SECONDS = 0.5
_DIGEST_SECONDS = 4.0
# What more tries cannot mend: a read-only file system stays so for longer than a save waits.
_LASTING_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def keeper_address(run: str, driver: str, node: str) -> str:
    """The abstract socket at which the keeper of a node listens; at most 107 bytes."""
    return f"lastgood-{run}-{driver}-{node[:16]}"


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
        checkpoint_storage: str | None = None,
        coordinator: str,
        takeover_seconds: float,
        read_back: ReadBack | None,
        exchange: ExchangeSettings,
        failpoints: tuple[failpoint.Arm, ...] = (),
    ) -> None:
        self._node = node
        self._read_back = read_back
        self._name = f"{driver}/keeper-{node}"
        self._store = open_store(Path(run_dir), checkpoint_storage)
        self._ranks: dict[int, RankMemory] = {}
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
        self._exchange = Exchange(exchange, find_own=self._find_own, report=self._copied)
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
        self._exchange.close()
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
            memory = self._ranks.setdefault(rank, RankMemory(rank))
            if generation < memory.generation:
                channel.close()
                return
            memory.pid, memory.generation = hello["pid"], generation
            self._readers[threading.current_thread()] = generation
            self._groups.record(hello["pid"], generation)
            memory.free_torn()
            channel.send(
                "welcome", fds=tuple(slot.fd for slot in memory.slots), copies_bytes=self._exchange.copies.bytes()
            )
        handing_out = HandingOut(channel, self._exchange)
        try:
            while (message := channel.receive()) is not None:
                self._from_rank(channel, generation, memory, handing_out, *message)
        except OSError as error:
            logger.warning("lastgood: rank %d's connection broke: %s", rank, error)
        finally:
            handing_out.close()
            channel.close()
            with self._lock:
                self._readers.pop(threading.current_thread(), None)

    def _from_rank(
        self,
        channel: Channel,
        generation: int,
        memory: RankMemory,
        handing_out: HandingOut,
        message: dict[str, Any],
        fds: list[int],
    ) -> None:
        match message["kind"]:
            case "slots":
                with self._lock:
                    found = memory.adopt([Slot.from_fd(fd) for fd in fds], fresh=message["fresh"])
                for held in found:
                    memory.work(partial(self._digest, memory, held))
            case "snapshot":
                failpoint.hit("snapshot.received", **self._context(memory, (generation, message["step"])))
                with self._lock:
                    taken = memory.snapshot(message, generation)
                if taken is not None:
                    memory.work(partial(self._digest, memory, taken, again=message["again"]))
            case "skipped":
                skipped = SnapshotSkipped(
                    keeper=self._name,
                    rank=memory.rank,
                    generation=generation,
                    step=message["step"],
                    reason=message["reason"],
                    durable=message["durable"],
                )
                # After the snapshots that the rank made before.
                memory.work(partial(self._link.tell, skipped))
            case "make_room":
                with self._lock:
                    made = memory.make_room(self._releases)
                channel.send("room", made=made)
            case "fetch":
                self._hand_out(handing_out, message)
            case "part":
                handing_out.part(message)

    def _digest(self, memory: RankMemory, held: Held, *, again: bool = False) -> None:
        """Read all of a snapshot, unless that was done, and only then tell of it."""
        with self._lock:
            known = memory.is_known(held)
        try:
            if not known:
                held.read()
        except CheckpointDamaged as error:
            with self._lock:
                memory.unreadable(held)
            generation, step = held.key
            self._link.tell(
                SnapshotSkipped(
                    keeper=self._name,
                    rank=memory.rank,
                    generation=generation,
                    step=step,
                    reason=str(error),
                    durable=held.durable,
                )
            )
            return
        with self._lock:
            if not known:
                memory.digested(held)
            told = held.told()
        failpoint.hit("snapshot.digested", **self._context(memory, held.key))
        self._link.tell(Snapshotted(keeper=self._name, snapshot=told, again=again))

    def _hand_out(self, handing_out: HandingOut, message: dict[str, Any]) -> None:
        """The shards of one set, for a rank that restores it."""
        key = (message["generation"], message["step"])
        with self._lock:
            own = [memory.held[key] for memory in self._ranks.values() if key in memory.held]
            for held in own:
                handing_out.shard(held.rank, held.slot)
        handing_out.others(message, [held.rank for held in own])

    def _find_own(self, key: ShardKey) -> Slot | None:
        with self._lock:
            memory = self._ranks.get(key.rank)
            held = memory.held.get(key.set) if memory is not None else None
            if held is None:
                return None
            fd = os.dup(held.slot.fd)
        return Slot.from_fd(fd, populate=False)

    def _held_copy(self, order: PersistOrder) -> Held | None:
        """A copy of another node's shard, to be written in its keeper's place."""
        key = ShardKey(rank=order.rank, generation=order.generation, step=order.step)
        slot = self._exchange.copies.open(key)
        if slot is None:
            return None
        held = Held(rank=key.rank, key=key.set, slot=slot, at=time.time(), durable=True, is_copy=True)
        held.read()
        return held

    def _copied(self, copied: Copied) -> None:
        self._link.tell(
            ShardCopied(
                keeper=self._name,
                rank=copied.key.rank,
                generation=copied.key.generation,
                step=copied.key.step,
                bytes=copied.image_bytes,
                seconds=copied.seconds,
                error=copied.error,
            )
        )

    def _held(self) -> tuple[HeldSnapshot, ...]:
        return tuple(held.told() for memory in self._ranks.values() for held in memory.held.values())

    # ------------------------------------------------------------ the coordinator

    def _introduce(self) -> KeeperJoined:
        if self._problem is not None:
            self._problem = self._find_problem()
        host, port = self._exchange.address
        with self._lock:
            return KeeperJoined(
                keeper=self._name,
                node=self._node,
                pid=os.getpid(),
                host=host,
                port=port,
                snapshots=self._held(),
                copies=tuple(self._exchange.held()),
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
        try:
            if self._store.was_made("generations"):
                return None
            why, remedy = "which the driver made, is not there", "use a directory that all nodes share"
        except OSError as error:
            why, remedy = f"cannot be used ({error})", "give all nodes access to it"
        local = isinstance(self._store, LocalStore)
        setting = "RunConfig.storage_path" if local else "RecoveryConfig.checkpoint_storage"
        return f"{setting}: {self._store.place('.')}, {why} on node {self._node}; {remedy}"

    def _obey(self, command: Command) -> None:
        match command:
            case PersistOrder():
                self._begin_persist(command)
            case ReleaseOrder():
                self._release(command)
            case CopyOrder():
                self._exchange.copy(command)
            case DropCopies():
                self._exchange.copies.keep((command.generation, command.step))
            case EndGeneration():
                self._end_generation(command.generation)
            case KillAgent():
                processes.kill(ProcessId(pid=command.pid, start_ticks=command.start_ticks))

    def _end_generation(self, generation: int) -> None:
        """Kill what is left of its ranks, then read their connections and their last snapshots to the end: these
        count."""
        self._groups.kill_up_to(generation)
        self._exchange.end_generation(generation)
        with self._lock:
            readers = [reader for reader, owner in self._readers.items() if owner <= generation]
            memories = list(self._ranks.values())
        for reader in readers:
            reader.join(_DRAIN_SECONDS)
        deadline = time.monotonic() + _DIGEST_SECONDS
        for memory in memories:
            if not memory.wait(deadline - time.monotonic()):
                logger.warning("lastgood: the last snapshot of rank %d could not be digested in time", memory.rank)
        with self._lock:
            held = self._held()
        self._link.tell(
            GenerationDrained(keeper=self._name, generation=generation, held=(*held, *self._exchange.held()))
        )

    def _coordinator_lost(self, reason: str) -> None:
        logger.error("lastgood: keeper of node %s ends: %s", self._node, reason)
        self._groups.kill_up_to(None)
        os._exit(1)

    def _release(self, order: ReleaseOrder) -> None:
        with self._lock:
            self._releases[order.generation] = order
            for memory in self._ranks.values():
                memory.release(order)
                if memory.generation < order.generation:
                    memory.close_free()

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
            memory = self._ranks.setdefault(order.rank, RankMemory(order.rank))
            if not memory.is_writing:
                self._start_writing(order, memory)
                return
            replaced, memory.waiting = memory.waiting, order
            if replaced is not None:
                reason = "a newer one was ordered while the one before was still being written"
                self._end_persist(replaced, _failed(self._name, replaced, reason, False))

    def _start_writing(self, order: PersistOrder, memory: RankMemory) -> None:
        held = memory.held.get((order.generation, order.step)) or self._held_copy(order)
        if held is None or held.slot.state is not SlotState.COMPLETE:
            self._end_persist(order, _failed(self._name, order, "the keeper does not hold that snapshot", False))
            return
        held.slot.hold()
        held.attempt = order.attempt
        memory.is_writing = True
        threading.Thread(target=self._persist, args=(order, memory, held), name="lastgood-persist", daemon=True).start()

    def _persist(self, order: PersistOrder, memory: RankMemory, held: Held) -> None:
        outcome: ShardPersisted | PersistFailed
        try:
            outcome = self._write(order, memory, held)
        except OSError as error:
            transient = error.errno not in _LASTING_ERRORS
            outcome = _failed(self._name, order, str(error), transient, no_space=is_no_space(error))
        except Exception as error:
            logger.exception("lastgood: the shard of rank %d could not be saved", order.rank)
            outcome = _failed(self._name, order, f"{type(error).__name__}: {error}", True)
        failpoint.hit("persist.tell", **self._context(memory, held.key))
        with self._lock:
            memory.written(held, self._releases.get(order.generation))
            self._end_persist(order, outcome)
            failpoint.hit("persist.told", **self._context(memory, held.key))
            memory.is_writing = False
            following, memory.waiting = memory.waiting, None
            if following is not None:
                self._start_writing(following, memory)

    def _end_persist(self, order: PersistOrder, outcome: ShardPersisted | PersistFailed) -> None:
        self._outcomes[order] = outcome
        for old in list(self._outcomes)[:-_OUTCOMES_KEPT]:
            del self._outcomes[old]
        self._link.tell(outcome)

    def _context(self, memory: RankMemory, key: tuple[int, int]) -> dict[str, int]:
        return {"rank": memory.rank, "step": key[1], "generation": key[0], "rank_pid": memory.pid}

    def _write(self, order: PersistOrder, memory: RankMemory, held: Held) -> ShardPersisted:
        failpoint.hit("persist.begin", **self._context(memory, held.key))
        if not self._store.was_made(CHECKPOINTS_DIR):
            # Not made anew: if it is an unmounted file system, the save would land beside the run.
            raise FileNotFoundError(errno.ENOENT, "the run directory has vanished", self._store.place("."))
        written = write_shard(
            self._store,
            order.checkpoint,
            order.rank,
            order.world_size,
            held.slot.image,
            held.slot.image_bytes,
            self._context(memory, held.key),
            digests=held.digests(),
            read_back=self._read_back,
        )
        return ShardPersisted(
            rank=order.rank,
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            shard=written.shard,
            snapshot_at=held.at,
            durable_seconds=written.durable_seconds,
            verify_seconds=written.verify_seconds,
            **held.document,
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
