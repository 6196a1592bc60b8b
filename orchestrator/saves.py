"""Carries out what the commit machine decides: orders to keepers, manifests, the clean-up after a commit.

The decisions are in decide/commit.py and decide/retention.py, the disk in archive.py; this is the wiring between them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from orchestrator.archive import RunArchive
from orchestrator.decide import retention
from orchestrator.decide.commit import Abandon, Commit, CommitMachine, Corruption, Decision, Persist, Release, Skip
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.observe.ledger import Ledger, committed_checkpoints, read_ledger
from workers import failpoint
from workers.checkpoint.manifest import Manifest, checkpoint_name
from workers.errors import Fenced, LastgoodError
from workers.messages import (
    Command,
    KeeperJoined,
    PersistFailed,
    PersistOrder,
    ReleaseOrder,
    SaveOutcome,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)

logger = logging.getLogger("lastgood")


class Saves:
    """`post_to_rank_keeper(rank, command)`, `post_to_keepers(command)` and `post_to_agents(command)` send commands;
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
        rebuilding: bool,
        post_to_rank_keeper: Callable[[int, PersistOrder], None],
        post_to_keepers: Callable[[Command], None],
        post_to_agents: Callable[[Command], None],
        on_committed: Callable[[int, int, str], None],
        on_fenced: Callable[[Fenced], None],
        on_corruption: Callable[[Corruption], None],
        on_given_up: Callable[[int, int, str], None],
    ) -> None:
        self._run = run
        self._archive = archive
        self._ledger = ledger
        self._keep_last = keep_last
        self._machine = CommitMachine(rebuilding=rebuilding)
        self._post_to_rank_keeper = post_to_rank_keeper
        self._post_to_keepers = post_to_keepers
        self._post_to_agents = post_to_agents
        self._on_committed = on_committed
        self._on_fenced = on_fenced
        self._on_corruption = on_corruption
        self._on_given_up = on_given_up
        self._receipts: dict[tuple[int, int, int], dict[int, ShardPersisted]] = {}
        self._world_size = 0
        self._generation = 0
        self._idle = asyncio.Event()
        self._cleaning = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.committed: set[str] = set(committed_checkpoints(read_ledger(ledger.path)))
        self.restoring: str | None = None

    # ------------------------------------------------------------ events

    def generation_started(self, generations: Sequence[GenerationRecord], world_size: int) -> None:
        self._world_size = world_size
        self._generation = max(record.number for record in generations)
        self._carry_out(self._machine.generation_started(generations, at=_now()))

    def generation_ended(self, generation: int) -> None:
        self._carry_out(self._machine.generation_ended(generation, at=_now()))

    def snapshotted(self, event: Snapshotted) -> None:
        held = event.snapshot
        failpoint.hit("snapshot.known", rank=held.rank, step=held.step, generation=held.generation)
        self._carry_out(
            self._machine.snapshotted(
                held.rank, held.generation, held.step, attempt=held.attempt, again=event.again, at=_now()
            )
        )

    def skipped(self, event: SnapshotSkipped) -> None:
        self._carry_out(
            self._machine.snapshot_skipped(event.rank, event.generation, event.step, reason=event.reason, at=_now())
        )

    def persisted(self, event: ShardPersisted) -> None:
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
        self._ledger.append(
            "persist_failed",
            generation=event.generation,
            step=event.step,
            attempt=event.attempt,
            rank=event.rank,
            error=event.error,
            transient=event.transient,
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
        for manifest in self._archive.scan(manifests=False).checkpoints:
            self._carry_out(self._machine.committed(manifest.generation, manifest.step, manifest.attempt, at=_now()))
        for keeper in keepers:
            for held in keeper.snapshots:
                self.snapshotted(Snapshotted(keeper=keeper.keeper, snapshot=held))
            for receipt in keeper.receipts:
                self.persisted(receipt)
        self._carry_out(self._machine.rebuilt(at=_now()))

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
                    self._on_corruption(decision)
                case Release():
                    self._post_to_keepers(
                        ReleaseOrder(generation=decision.generation, upto_step=decision.upto_step, keep=decision.keep)
                    )
                case Skip():
                    self._ledger.append(
                        "save_skipped", generation=decision.generation, step=decision.step, reason=decision.reason
                    )
                    self._tell_outcome(decision.generation, decision.step, decision.reason)
        self._arm_retry()
        self._note_idle()

    def _order_persist(self, decision: Persist) -> None:
        self._ledger.append("snapshot", generation=decision.generation, step=decision.step, attempt=decision.attempt)
        name = checkpoint_name(decision.step, decision.generation, decision.attempt)
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
            self._carry_out(self._machine.commit_failed(**key, error=str(error), transient=True, at=_now()))
            return
        snapshot_at = max(receipt.snapshot_at for receipt in receipts.values())
        self._ledger.append(
            "commit",
            **key,
            checkpoint=manifest.name,
            bytes=sum(shard.bytes for shard in decision.shards),
            verified_from=sorted({shard.verified_from for shard in decision.shards}),
            snapshot_at=snapshot_at,
            durable_seconds=max(receipt.durable_seconds for receipt in receipts.values()),
            verify_seconds=max(receipt.verify_seconds for receipt in receipts.values()),
            commit_seconds=time.time() - snapshot_at,
        )
        self.committed.add(manifest.name)
        self._carry_out(self._machine.committed(**key, at=_now()))
        self._tell_outcome(decision.generation, decision.step, "")
        self._on_committed(decision.step, decision.generation, manifest.name)
        async with self._cleaning:  # two at once would trip over each other in the trash
            await asyncio.to_thread(self._clean_up)

    def _clean_up(self) -> None:
        if not self._archive.empty_trash(my_generation=self._generation):
            return
        protected = set(self._machine.in_flight) | ({self.restoring} if self.restoring else set())
        # By the ledger's word a checkpoint whose manifest is gone is damaged, and no orphan that may be deleted.
        scan = self._archive.scan(self.committed, manifests=False)
        for delete in retention.expired(
            generations=scan.generations,
            checkpoints=scan.checkpoints,
            orphans=scan.orphans,
            rejected=scan.rejected,
            protected=protected,
            my_generation=self._generation,
            keep_last=self._keep_last,
        ):
            if not self._archive.delete(delete.name, my_generation=self._generation):
                return
            self.committed.discard(delete.name)
            self._ledger.append("deleted", checkpoint=delete.name, reason=delete.reason)

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


def _now() -> float:
    return time.monotonic()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("lastgood: a commit failed", exc_info=task.exception())
