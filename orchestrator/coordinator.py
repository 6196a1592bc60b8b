"""The coordinator: one actor a run, which wires the pure decisions to agents, keepers and the disk.

Events are handled one at a time, in the order in which they came; what takes long (writing a manifest, deleting) goes
on beside that and comes back as an event. It may be killed at any moment: members introduce themselves to its
successor, which reads the generations and the ledger from disk, and no generation ends because of it.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from orchestrator import lifecycle, recovery
from orchestrator.archive import RunArchive
from orchestrator.decide import rendezvous as rv
from orchestrator.decide.budget import FailureBudget
from orchestrator.decide.probation import Probation
from orchestrator.lifecycle import Lifecycle
from orchestrator.mailbox import Mailboxes
from orchestrator.observe.ledger import Ledger
from orchestrator.outcome import CoordinatorConfig, Outcome
from orchestrator.protection_watch import ProtectionWatch
from orchestrator.reports import ReportSequence
from orchestrator.roster import KeeperRoster
from orchestrator.saves import Saves
from workers import failpoint
from workers.checkpoint.store import LocalStore
from workers.errors import LastgoodError
from workers.messages import (
    AgentFailed,
    AgentJoined,
    Command,
    Event,
    Finish,
    GenerationDrained,
    KeeperJoined,
    PersistFailed,
    RankExited,
    RankFinished,
    RankProgress,
    RankReady,
    RankReport,
    RankRestored,
    RankStarted,
    Reported,
    RestoreFailed,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
    StandbyLost,
    Standing,
)

logger = logging.getLogger("lastgood")


class Coordinator:
    """The actor's class. Its methods are what members and the driver call."""

    def __init__(self, config: CoordinatorConfig) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._mail = Mailboxes(config.driver)
        recovery.wait_for_storage(config.run_dir, config.recovery.save_timeout_seconds)
        self._archive = RunArchive(LocalStore(config.run_dir))
        self._ledger = Ledger(config.run_dir / "ledger.jsonl")
        current = recovery.current_generation(self._archive, config.driver)
        self._resuming = current is not None
        self._ledger.append("coordinator", driver=config.driver, resumed=self._resuming)
        failpoint.arm(config.recovery.failpoints, config.run_dir / "faults")
        self._budget = FailureBudget(config.recovery.max_failures, rng=random.Random())
        self._probation = Probation()
        self._rendezvous = rv.Rendezvous(generation=current.number if current else 0, resuming=self._resuming)
        self._watch = ProtectionWatch(
            config.recovery,
            self._ledger,
            protected_at=recovery.protected_at(self._ledger.path, config.driver),
            over=lambda: self._life.outcome.ended,
            stop=lambda message: self._life.stop(message, "EnvironmentProblem"),
        )
        self._saves = Saves(
            run=config.run,
            archive=self._archive,
            ledger=self._ledger,
            keep_last=config.recovery.keep_last,
            keep_last_min=config.recovery.keep_last_min,
            stalled_seconds=config.recovery.save_stalled_seconds,
            watch=self._watch,
            rebuilding=self._resuming,
            post_to_rank_keeper=self._post_to_rank_keeper,
            post_to_keepers=lambda command: self._keepers.post_all(command),
            post_to_agents=self._post_to_agents,
            on_committed=self._committed,
        )
        self._reports = ReportSequence(self._mail.post)
        self._keepers = KeeperRoster(self._nodes, self._mail.post)
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        newest = recovery.newest_committed(self._archive)
        self._committed_step = newest.step if newest else None
        self._loss: float | None = None
        self._saves.restoring = current.parent if current else None
        self._life = Lifecycle(
            config=config,
            archive=self._archive,
            ledger=self._ledger,
            mail=self._mail,
            saves=self._saves,
            keepers=self._keepers,
            reports=self._reports,
            budget=self._budget,
            probation=self._probation,
            rendezvous=self._rendezvous,
            outcome=recovery.replay(self._ledger.path, config.driver, self._budget, self._probation),
            put=self._put,
            checkpoint=newest.name if newest else None,
        )

    # ------------------------------------------------------------ what members call

    async def join(self, member: str, event: AgentJoined | KeeperJoined, events_taken: int) -> Standing:
        standing = self._mail.join(member, events_taken)
        if standing == "member":
            self._put(event)
        return standing

    async def tell(self, member: str, batch: Sequence[tuple[int, Event]]) -> Standing:
        standing, events = self._mail.accept(member, batch)
        for event in events:
            self._put(event)
        return standing

    async def hear(
        self, member: str, incarnation: str | None, taken: int
    ) -> tuple[Standing, str, list[tuple[int, Command]]]:
        return await self._mail.hear(member, incarnation, taken)

    # ------------------------------------------------------------ what the driver calls

    async def keepers_wanted(self, have: Sequence[str]) -> list[str]:
        """The nodes that need a keeper and have none; waits a while for there to be some."""
        return await self._keepers.wanted(have)

    async def keeper_failed(self, node: str, problem: str) -> None:
        """A keeper could not even start."""
        self._life.stop(f"the keeper of node {node} could not be started: {problem}", "EnvironmentProblem")

    async def outcome(self) -> Outcome:
        return self._life.outcome

    async def status(self) -> dict[str, Any]:
        members = self._rendezvous.members
        return {
            "state": self._rendezvous.phase.value,
            "generation": self._rendezvous.generation,
            "step": max((member.step for member in members.values()), default=-1),
            "loss": self._loss,
            "committed_step": self._committed_step,
            "ranks": [
                {
                    "rank": rank,
                    "pid": member.process.pid if member.process else None,
                    "agent_pid": member.joined.pid,
                    "node_id": member.joined.node,
                    "step": member.step,
                }
                for rank, member in sorted(members.items())
            ],
            "keepers": [{"node_id": keeper.node, "pid": keeper.pid} for keeper in self._keepers.all()],
        }

    # ------------------------------------------------------------ events

    def _put(self, event: Any) -> None:
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())
        self._queue.put_nowait(event)

    async def _work(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                await self._handle(event)
            except LastgoodError as error:
                self._life.stop(str(error), type(error).__name__)
            except Exception as error:
                logger.exception("lastgood: the coordinator could not handle %s", type(event).__name__)
                self._life.stop(f"the coordinator failed: {type(error).__name__}: {error}", "TrainingFailed")

    async def _handle(self, event: Any) -> None:
        rendezvous = self._rendezvous
        match event:
            case AgentJoined():
                await self._agent_joined(event)
            case KeeperJoined():
                await self._keeper_joined(event)
            case RankReady():
                await self._life.carry_out(rendezvous.ready(event.agent, event.store_port))
            case StandbyLost():
                rendezvous.standby_lost(event.agent)
            case RankStarted():
                rendezvous.started(event.agent, event.generation, event.process)
            case RankRestored():
                self._ledger.append(
                    "restored",
                    generation=event.generation,
                    rank=self._rank_of(event.agent),
                    checkpoint=event.checkpoint,
                    step=event.step,
                    seconds=event.seconds,
                )
            case RestoreFailed():
                if event.generation == rendezvous.generation:
                    self._life.restore_failed = event.reason
            case RankProgress():
                self._progressed(event)
            case RankReport():
                if self._rank_of(event.agent) == 0:
                    self._reports.metrics(event.metrics)
            case RankFinished():
                rendezvous.rank_finished(event)
            case RankExited():
                self._life.notice_exit(event.generation)
                await self._life.carry_out(rendezvous.exited(event))
            case AgentFailed():
                self._life.stop(event.message, "CallerError")
            case Reported():
                self._reports.done(event)
            case Snapshotted():
                self._saves.snapshotted(event)
            case SnapshotSkipped():
                self._saves.skipped(event)
            case ShardPersisted():
                self._saves.persisted(event)
            case PersistFailed():
                self._saves.persist_failed(event)
            case GenerationDrained():
                await self._life.drained(event.keeper, event.generation)
            case lifecycle.DrainOverdue():
                await self._life.drained(None, event.generation)
            case lifecycle.Proceed():
                if rendezvous.phase is rv.Phase.JUDGING:
                    await self._life.carry_out(rendezvous.proceed(event.reason))
            case lifecycle.GiveUp():
                await self._life.give_up(event)
            case lifecycle.CreateAgain():
                await self._life.create_generation()

    async def _agent_joined(self, event: AgentJoined) -> None:
        before = {member.joined.agent for member in self._rendezvous.members.values()}
        group = self._rendezvous.group
        decisions = self._rendezvous.joined(event, time.time())
        for agent in before - {member.joined.agent for member in self._rendezvous.members.values()}:
            self._mail.retire(agent)
        self._reports.joined(event, new_group=event.group != group)
        self._ledger.append("agent", agent=event.agent, rank=event.rank, pid=event.pid, node=event.node)
        self._keepers.nodes_changed()
        await self._life.carry_out(decisions)
        self._resume_saves()
        if self._life.outcome.ended:
            self._mail.post(event.agent, Finish(last_report=self._reports.last))

    async def _keeper_joined(self, event: KeeperJoined) -> None:
        replaces_another = self._keepers.joined(event)
        self._ledger.append("keeper", node=event.node, pid=event.pid)
        if event.problem is not None:
            self._life.stop(event.problem, "EnvironmentProblem")
            return
        if replaces_another:
            self._saves.keeper_lost(self._ranks_on(event.node))
        self._resume_saves()
        await self._life.create_generation()

    def _resume_saves(self) -> None:
        """After a restart: once agents and keepers are back, take over the saves that were under way."""
        if self._resuming and not self._rendezvous.resuming and self._keepers.complete():
            self._resuming = False
            # What was written here is seen without a probe, which read-only storage would refuse.
            generations = self._archive.scan(manifests=False, fresh=False).generations
            self._saves.rebuild(generations, len(self._rendezvous.members), self._keepers.all())

    def _progressed(self, event: RankProgress) -> None:
        self._rendezvous.progressed(event.agent, event.generation, event.step)
        if event.loss is not None and self._rank_of(event.agent) == 0:
            self._loss = event.loss
        if event.first:
            self._ledger.append(
                "first_step",
                generation=event.generation,
                rank=self._rank_of(event.agent),
                step=event.step,
                at_step=event.at,
            )

    def _committed(self, step: int, generation: int, checkpoint: str) -> None:
        self._life.checkpoint, self._committed_step = checkpoint, step
        self._budget.committed(step)
        self._probation.committed(checkpoint, step)
        self._reports.commit(step, str(self._config.run_dir / "checkpoints" / checkpoint))

    # ------------------------------------------------------------ who is where

    def _rank_of(self, agent: str) -> int | None:
        return next((r for r, member in self._rendezvous.members.items() if member.joined.agent == agent), None)

    def _ranks_on(self, node: str) -> list[int]:
        return [rank for rank, member in self._rendezvous.members.items() if member.joined.node == node]

    def _nodes(self) -> set[str]:
        return {member.joined.node for member in self._rendezvous.members.values()}

    def _post_to_agents(self, command: Command) -> None:
        for member in self._rendezvous.members.values():
            self._mail.post(member.joined.agent, command)

    def _post_to_rank_keeper(self, rank: int, command: Command) -> None:
        member = self._rendezvous.members.get(rank)
        if member is not None:
            self._keepers.post_to_node(member.joined.node, command)
