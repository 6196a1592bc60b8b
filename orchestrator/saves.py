"""Carries out what the commit machine decides: orders to keepers, manifests, the clean-up after a commit.

The decisions are in decide/commit.py and decide/retention.py, the disk in archive.py; this is the wiring between them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from orchestrator.archive import RunArchive
from orchestrator.cadence import Cadence
from orchestrator.copying import Copying
from orchestrator.decide.commit import Abandon, Commit, CommitMachine, Corruption, Decision, Persist, Release, Skip
from orchestrator.decide.lineage import GenerationRecord, MemorySet
from orchestrator.housekeeping import Housekeeping
from orchestrator.observe.ledger import Ledger, committed_checkpoints, read_ledger
from orchestrator.protection_watch import ProtectionWatch
from orchestrator.snapshot_sets import SnapshotSets
from workers import failpoint
from workers.checkpoint.manifest import Manifest, checkpoint_name, parse_checkpoint_name
from workers.checkpoint.store import is_no_space
from workers.errors import Fenced, LastgoodError
from workers.keeper_messages import (
    KeeperJoined,
    PersistFailed,
    PersistOrder,
    ReleaseOrder,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)
from workers.messages import Command, SaveOutcome

logger = logging.getLogger("lastgood")

_ROOM_FACTOR = 1.1
"""How much is to be free for a save, as a multiple of the newest checkpoint's size."""


class Saves:
    """`post_to_rank_keeper(rank, command)` and `post_to_agents(command)` send commands;
    `on_committed(step, generation, checkpoint)` is called after each commit, `on_given_up(step, generation, reason)`
    for each step that was to be saved and will not be, `on_fenced` when another driver has taken over,
    `on_corruption(found)` when ranks do not hold alike what they must."""

    def __init__(
        self,
        *,
        run: str,
        archive: RunArchive,
        ledger: Ledger,
        keep_last: int,
        keep_last_min: int,
        stalled_seconds: float,
        protection: ProtectionWatch,
        copying: Copying,
        cadence: Cadence,
        rebuilding: bool,
        post_to_rank_keeper: Callable[[int, PersistOrder], None],
        post_to_agents: Callable[[Command], None],
        on_committed: Callable[[int, int, str], None],
        on_fenced: Callable[[Fenced], None],
        on_corruption: Callable[[Corruption], None],
        on_given_up: Callable[[int, int, str], None],
    ) -> None:
        self._run = run
        self._archive = archive
        self._ledger = ledger
        self._stalled_seconds = stalled_seconds
        self._protection = protection
        self._copying = copying
        self._cadence = cadence
        self._told_complete: tuple[int, int] | None = None
        self._running = False
        self._machine = CommitMachine(rebuilding=rebuilding)
        self._post_to_rank_keeper = post_to_rank_keeper
        self._post_to_agents = post_to_agents
        self._on_committed = on_committed
        self._on_fenced = on_fenced
        self._on_corruption = on_corruption
        self._on_given_up = on_given_up
        self._receipts: dict[tuple[int, int, int], dict[int, ShardPersisted]] = {}
        self._sets = SnapshotSets()
        self._world_size = 0
        self._generation = 0
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.committed: set[str] = set(committed_checkpoints(read_ledger(ledger.path)))
        self.restoring: str | None = None
        self._committed_bytes = 0  # of the newest checkpoint
        self._housekeeping = Housekeeping(
            archive=archive,
            ledger=ledger,
            keep_last=keep_last,
            keep_last_min=keep_last_min,
            committed=self.committed,
            protected=self._protected,
        )

    # ------------------------------------------------------------ events

    def generation_started(self, generations: Sequence[GenerationRecord], world_size: int) -> None:
        self._world_size = world_size
        self._generation = max(record.number for record in generations)
        self._running = True
        self._copying.generation_started(generations)
        self._carry_out(self._machine.generation_started(generations, at=_now()))

    def generation_ended(self, generation: int) -> None:
        self._running = False
        self._carry_out(self._machine.generation_ended(generation, at=_now()))

    def snapshotted(self, event: Snapshotted) -> None:
        held = event.snapshot
        failpoint.hit("snapshot.known", rank=held.rank, step=held.step, generation=held.generation)
        self._sets.told(event, self._machine.in_memory)
        self._copying.snapshotted(event.keeper, held)
        self._carry_out(
            self._machine.snapshotted(
                held.rank,
                held.generation,
                held.step,
                attempt=held.attempt,
                again=event.again,
                durable=held.durable,
                digest=held.digest,
                said=held.replicas,
                at=_now(),
            )
        )

    def skipped(self, event: SnapshotSkipped) -> None:
        if event.durable:
            self._protection.save_failed(f"rank {event.rank} made no snapshot: {event.reason}", final=False)
        self._carry_out(
            self._machine.snapshot_skipped(
                event.rank, event.generation, event.step, reason=event.reason, durable=event.durable, at=_now()
            )
        )

    def memory_dropped(self, generation: int, step: int, reason: str) -> None:
        """This set of snapshots could not be restored: it is used no more."""
        logger.warning("lastgood: the snapshots of step %d in memory are not used any more: %s", step, reason)
        self._ledger.append("memory_dropped", generation=generation, step=step, reason=reason)
        self._copying.drop(generation, step)
        self._carry_out(self._machine.memory_dropped(generation, step, reason=reason, at=_now()))

    def persisted(self, event: ShardPersisted) -> None:
        failpoint.hit("receipt.known", rank=event.rank, step=event.step, generation=event.generation)
        key = (event.generation, event.step, event.attempt)
        self._receipts.setdefault(key, {})[event.rank] = event
        self._carry_out(
            self._machine.shard_persisted(
                event.rank,
                event.generation,
                event.step,
                event.attempt,
                event.shard,
                said=event.replicas,
                at=_now(),
            )
        )

    def persist_failed(self, event: PersistFailed) -> None:
        if event.no_space:
            self._make_room()
        self._ledger.append(
            "persist_failed",
            generation=event.generation,
            step=event.step,
            attempt=event.attempt,
            rank=event.rank,
            error=event.error,
            transient=event.transient,
            no_space=event.no_space,
        )
        self._carry_out(
            self._machine.persist_failed(
                event.rank,
                event.generation,
                event.step,
                event.attempt,
                error=event.error,
                transient=event.transient,
                at=_now(),
            )
        )

    def keeper_lost(self, ranks: Sequence[int], generation: int | None = None) -> None:
        self._carry_out(self._machine.keeper_lost(ranks, at=_now(), generation=generation))

    def rebuild(
        self, generations: Sequence[GenerationRecord], world_size: int, keepers: Sequence[KeeperJoined]
    ) -> None:
        """After the coordinator's restart, when all keepers are back: what they hold, and what lies on disk."""
        self.generation_started(generations, world_size)
        self._copying.rebuild(generations, keepers)
        on_disk = self._archive.scan(manifests=False, fresh=False).checkpoints
        found = {(one.generation, one.step, one.attempt) for one in on_disk}
        # Keepers still have the receipts of what retention has deleted since.
        commits = (entry for entry in read_ledger(self._ledger.path) if entry["kind"] == "commit")
        found |= {(entry["generation"], entry["step"], entry["attempt"]) for entry in commits}
        for generation, step, attempt in sorted(found):
            self._carry_out(self._machine.committed(generation, step, attempt, at=_now()))
        for keeper in keepers:
            for held in keeper.snapshots:
                self.snapshotted(Snapshotted(keeper=keeper.keeper, snapshot=held))
            for receipt in keeper.receipts:
                self.persisted(receipt)
        self._carry_out(self._machine.rebuilt(at=_now()))
        # The earlier coordinator may have died before it told the ranks, of which some may wait for that.
        told = [step for owner, step, _ in found if owner == self._generation]
        if told:
            self._tell_outcome(self._generation, max(told), "")
        dropped = [entry for entry in read_ledger(self._ledger.path) if entry["kind"] == "memory_dropped"]
        for entry in dropped:
            self._carry_out(
                self._machine.memory_dropped(entry["generation"], entry["step"], reason=entry["reason"], at=_now())
            )

    def memory_taken(self, memory: MemorySet) -> None:
        """This set is restored. If a node is lost, it may be an older one than all ranks had, and lie elsewhere."""
        self._sets.lies(memory)
        self._carry_out(
            self._machine.memory_found(
                memory.generation,
                memory.step,
                digests=self._copying.digests(memory),
                committed=(memory.step, memory.generation) in {_state_of(name) for name in self.committed},
                at=_now(),
            )
        )

    @property
    def memory(self) -> MemorySet | None:
        """The newest set of snapshots that may be restored."""
        return self._sets.memory(self._machine.in_memory)

    def worth_waiting_for(self, memory: MemorySet | None) -> bool:
        """Whether a commit may come that is newer than this set."""
        if memory is None:
            return not self._machine.idle
        return self._machine.saves_newer(memory.generation, memory.step)

    @property
    def idle(self) -> bool:
        """Whether no commit will come before another snapshot does."""
        return self._machine.idle

    async def settle(self, timeout_seconds: float) -> None:
        """Wait for the saves that are being written: what they commit need not be trained again."""
        self._idle.clear()
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            logger.warning("lastgood: a save is still under way; recovering without it")

    # ------------------------------------------------------------ decisions

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Persist():
                    self._order_persist(decision)
                case Commit():
                    self._start(self._commit(decision))
                case Abandon():
                    self._abandon(decision)
                case Corruption():
                    self._copying.drop(decision.generation)
                    self._on_corruption(decision)
                case Release():
                    self._copying.release(
                        ReleaseOrder(generation=decision.generation, upto_step=decision.upto_step, keep=decision.keep)
                    )
                case Skip():
                    self._ledger.append(
                        "save_skipped", generation=decision.generation, step=decision.step, reason=decision.reason
                    )
                    self._tell_outcome(decision.generation, decision.step, decision.reason)
        self._note_complete()
        self._arm_retry()
        self._note_idle()

    def _note_complete(self) -> None:
        key = self._machine.in_memory
        if key != self._told_complete:
            self._told_complete = key
            memory = self.memory
            if memory is not None and self._running:
                self._copying.complete(memory)

    def _order_persist(self, decision: Persist) -> None:
        self._ledger.append(
            "snapshot",
            generation=decision.generation,
            step=decision.step,
            attempt=decision.attempt,
            **self._sets.costs((decision.generation, decision.step)),
        )
        name = checkpoint_name(decision.step, decision.generation, decision.attempt)
        began = _now()
        asyncio.get_running_loop().call_later(self._stalled_seconds, self._note_stalled, decision, name, began)
        for rank in decision.ranks:
            self._post_to_rank_keeper(
                rank,
                PersistOrder(
                    rank=rank,
                    world_size=self._world_size,
                    generation=decision.generation,
                    step=decision.step,
                    attempt=decision.attempt,
                    checkpoint=name,
                ),
            )

    def _note_stalled(self, decision: Persist, name: str, began: float) -> None:
        """Training goes on, and so does the save when the storage does; but somebody should look."""
        if name not in self._machine.in_flight:
            return
        key = (decision.generation, decision.step, decision.attempt)
        waiting_for = sorted(set(decision.ranks) - self._receipts.get(key, {}).keys())
        seconds = _now() - began
        logger.warning("lastgood: saving step %d stalls: it has taken %.0f s so far", decision.step, seconds)
        self._ledger.append(
            "save_stalled",
            generation=decision.generation,
            step=decision.step,
            attempt=decision.attempt,
            seconds=seconds,
            waiting_for=waiting_for,
        )
        self._protection.save_failed(f"saving step {decision.step} stalls", final=False)

    def _abandon(self, decision: Abandon) -> None:
        self._receipts.pop((decision.generation, decision.step, decision.attempt), None)
        logger.warning(
            "lastgood: attempt %d at saving step %d failed: %s%s",
            decision.attempt,
            decision.step,
            decision.reason,
            "" if decision.final else "; it is made again",
        )
        self._ledger.append(
            "save_failed",
            generation=decision.generation,
            step=decision.step,
            attempt=decision.attempt,
            reason=decision.reason,
            final=decision.final,
        )
        self._protection.save_failed(decision.reason, final=decision.final)
        name = checkpoint_name(decision.step, decision.generation, decision.attempt)
        self._start(asyncio.to_thread(self._housekeeping.discard, name, self._generation))
        if decision.final:
            self._tell_outcome(decision.generation, decision.step, decision.reason)

    def _tell_outcome(self, generation: int, step: int, reason: str) -> None:
        """An empty reason means committed."""
        self._post_to_agents(SaveOutcome(generation=generation, step=step, committed=not reason, reason=reason))
        if reason:
            self._on_given_up(step, generation, reason)

    async def _commit(self, decision: Commit) -> None:
        receipts = self._receipts.pop((decision.generation, decision.step, decision.attempt), {})
        key = {"generation": decision.generation, "step": decision.step, "attempt": decision.attempt}
        first = receipts[min(receipts)]
        manifest = Manifest(
            run=self._run,
            world_size=len(decision.shards),
            shards=decision.shards,
            identity=first.identity,
            progress=first.progress,
            created_at=time.time(),
            **key,
        )
        try:
            await asyncio.to_thread(self._archive.commit, manifest, my_generation=self._generation)
        except LastgoodError as error:
            if isinstance(error, Fenced):
                self._on_fenced(error)
            self._carry_out(self._machine.commit_failed(**key, error=str(error), transient=False, at=_now()))
            return
        except OSError as error:
            self._receipts[decision.generation, decision.step, decision.attempt] = receipts
            if is_no_space(error):
                self._make_room()
            self._carry_out(self._machine.commit_failed(**key, error=str(error), transient=True, at=_now()))
            return
        self._committed_bytes = sum(shard.bytes for shard in decision.shards)
        snapshot_at = max(receipt.snapshot_at for receipt in receipts.values())
        self._ledger.append(
            "commit",
            **key,
            checkpoint=manifest.name,
            bytes=self._committed_bytes,
            samples=sum(int(receipt.progress.get("samples", 0)) for receipt in receipts.values()) or None,
            verified_from=sorted({shard.verified_from for shard in decision.shards}),
            snapshot_at=snapshot_at,
            **self._sets.costs((decision.generation, decision.step)),
            durable_seconds=max(receipt.durable_seconds for receipt in receipts.values()),
            verify_seconds=max(receipt.verify_seconds for receipt in receipts.values()),
            commit_seconds=time.time() - snapshot_at,
            interference_seconds=self._cadence.interference_seconds(),
        )
        failpoint.hit("commit.recorded", generation=decision.generation, step=decision.step)
        self._protection.committed(snapshot_at)
        self.committed.add(manifest.name)
        self._carry_out(self._machine.committed(**key, at=_now()))
        self._tell_outcome(decision.generation, decision.step, "")
        failpoint.hit("commit.told", generation=decision.generation, step=decision.step)
        self._on_committed(decision.step, decision.generation, manifest.name)
        room_bytes = await asyncio.to_thread(self._housekeeping.clean_up, self._generation)
        if room_bytes is not None:
            self._cadence.room(room_bytes, self._committed_bytes)

    def _make_room(self) -> None:
        """The disk is full: older checkpoints may have to go before the save is made again."""
        wanted = int(_ROOM_FACTOR * self._committed_bytes)
        self._start(asyncio.to_thread(self._housekeeping.make_room, wanted, self._generation))

    def _protected(self) -> set[str]:
        return set(self._machine.in_flight) | ({self.restoring} if self.restoring else set())

    # ------------------------------------------------------------ small things

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)

    def _arm_retry(self) -> None:
        wakeup = self._machine.wakeup_at
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if wakeup is not None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(
                max(0.0, wakeup - _now()), lambda: self._carry_out(self._machine.tick(at=_now()))
            )

    def _note_idle(self) -> None:
        if self._machine.idle:
            self._idle.set()


def _state_of(checkpoint: str) -> tuple[int, int] | None:
    """Step and generation."""
    parsed = parse_checkpoint_name(checkpoint)
    return parsed[:2] if parsed is not None else None


def _now() -> float:
    return time.monotonic()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("lastgood: work on a save failed", exc_info=task.exception())
