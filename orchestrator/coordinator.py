"""The coordinator: one actor a run, which wires the pure decisions to agents, keepers and the disk.

Events are handled one at a time, in the order in which they came; what takes long (writing a manifest, deleting) goes
on beside that and comes back as an event. It may be killed at any moment: members introduce themselves to its
successor, which reads the generations and the ledger from disk, and no generation ends because of it.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator import corruption, handover, lifecycle, nodes, recovery
from orchestrator.archive import RunArchive
from orchestrator.cadence import Cadence
from orchestrator.copying import Copying
from orchestrator.crew import Crew, nodes_of
from orchestrator.decide import rendezvous as rv
from orchestrator.decide.budget import FailureBudget
from orchestrator.decide.losses import WorkerLoss
from orchestrator.decide.orders import Corruption
from orchestrator.decide.probation import Probation
from orchestrator.handover import Handover
from orchestrator.lifecycle import Lifecycle
from orchestrator.mailbox import Mailboxes
from orchestrator.observation import Observation
from orchestrator.observe.ledger import Ledger, begun_generations, read_ledger
from orchestrator.observe.page.status_page import StatusPage
from orchestrator.outcome import CoordinatorConfig, Outcome
from orchestrator.protection_watch import ProtectionWatch
from orchestrator.reports import ReportSequence
from orchestrator.roster import KeeperRoster
from orchestrator.rounds import RayEnded, Round, Rounds
from orchestrator.save_at_once import SaveAtOnce
from orchestrator.saves import Saves
from orchestrator.watch import Watch
from workers import failpoint
from workers.checkpoint.manifest import checkpoint_dir
from workers.checkpoint.place import open_store
from workers.errors import LastgoodError
from workers.keeper_messages import (
    GenerationDrained,
    KeeperJoined,
    PersistFailed,
    ShardCopied,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)
from workers.messages import (
    AgentFailed,
    AgentJoined,
    Command,
    Event,
    Finish,
    FirstStep,
    RankExited,
    RankFinished,
    RankMemory,
    RankPulse,
    RankReady,
    RankReport,
    RankRestored,
    RankStarted,
    Reported,
    RestoreFailed,
    SaveRefused,
    StacksDumped,
    StandbyLost,
    Standing,
    Terminated,
)

logger = logging.getLogger("lastgood")

_LOOK_SECONDS = 1.0


class Coordinator:
    """The actor's class. Its methods are what members and the driver call."""

    def __init__(self, config: CoordinatorConfig) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._mail = Mailboxes(config.driver)
        store = open_store(config.run_dir, config.recovery.checkpoint_storage)
        recovery.wait_for_storage(store, config.recovery.save_timeout_seconds)
        self._archive = RunArchive(store)
        self._ledger = Ledger(config.run_dir / "ledger.jsonl")
        current = recovery.current_generation(self._archive, config.driver)
        self._resuming = current is not None
        self._ledger.append(
            "coordinator",
            driver=config.driver,
            resumed=self._resuming,
            pid=os.getpid(),
            total_steps=config.recovery.total_steps,
            checkpoint_storage=config.recovery.checkpoint_storage,
        )
        failpoint.arm(config.recovery.failpoints, config.run_dir / "faults")
        self._budget = FailureBudget(config.recovery.max_failures, rng=random.Random())
        self._probation = Probation()
        before = recovery.replay(self._ledger.path, config.driver, self._budget, self._probation)
        self._rendezvous = rv.Rendezvous(
            generation=current.number if current else 0,
            resuming=self._resuming,
            judged=before.judged,
            agents_before=frozenset(before.agents),
        )
        self._keepers = KeeperRoster(lambda: nodes_of(self._rendezvous), self._mail.post)
        self._crew = Crew(rendezvous=self._rendezvous, mail=self._mail, keepers=self._keepers)
        self._protection = ProtectionWatch(
            config.recovery,
            self._ledger,
            protected_at=recovery.protected_at(self._ledger.path, config.driver),
            over=lambda: self._life.outcome.ended,
            stop=lambda message: self._life.stop(message, "EnvironmentProblem"),
        )
        self._copying = Copying(enabled=config.recovery.replicate_snapshots, ledger=self._ledger, keepers=self._keepers)
        self._cadence = Cadence(config.recovery, self._ledger, self._crew.post_to_agents)
        self._page = StatusPage(config.run_dir, live=self._page_status)
        self._page.follow(self._ledger)
        self._observation = Observation(
            config,
            self._ledger,
            failure_rate=self._cadence.failure_rate,
            copied_step=lambda: self._copying.copied_step,
            routes=self._page.routes(),
        )
        self._saves = Saves(
            run=config.run,
            archive=self._archive,
            ledger=self._ledger,
            keep_last=config.recovery.keep_last,
            keep_last_min=config.recovery.keep_last_min,
            stalled_seconds=config.recovery.save_stalled_seconds,
            protection=self._protection,
            copying=self._copying,
            cadence=self._cadence,
            rebuilding=self._resuming,
            post_to_rank_keeper=self._crew.post_to_rank_keeper,
            post_to_agents=self._crew.post_to_agents,
            on_committed=self._committed,
            on_fenced=lambda error: self._life.stop(str(error), type(error).__name__),
            on_corruption=self._put,
            on_given_up=lambda step, generation, reason: self._save_at_once.given_up(generation, step, reason),
        )
        self._reports = ReportSequence(self._mail.post)
        self._node_watch = nodes.NodeWatch(self._crew.nodes_in_use)
        self._save_at_once = SaveAtOnce(
            ledger=self._ledger,
            rendezvous=self._rendezvous,
            generation=self._rendezvous.generation,
            post=self._mail.post,
        )
        self._handover = Handover(
            ledger=self._ledger,
            rendezvous=self._rendezvous,
            saves=self._save_at_once,
            sigterm_seconds=config.recovery.sigterm_seconds,
            post=self._mail.post,
            put=self._put,
            ask=self._reports.ask_draining,
            room_without=lambda nodes: self._node_watch.room_without(nodes, config.needed),
        )
        self._rounds = Rounds(
            ledger=self._ledger,
            rendezvous=self._rendezvous,
            keepers=self._keepers,
            nodes=self._node_watch,
            needed=config.needed,
            can_exclude=config.can_exclude,
            excluded=recovery.excluded_nodes(self._ledger.path, config.driver),
            post=self._mail.post,
        )
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._looking: list[asyncio.Task[None]] = []
        begun = begun_generations(read_ledger(self._ledger.path))
        newest = recovery.newest_committed(self._archive, begun)
        self._committed_step = newest.step if newest else None
        self._loss: float | None = None
        self._saves.restoring = current.parent if current else None
        self._watch = Watch(
            rendezvous=self._rendezvous,
            ledger=self._ledger,
            floor_seconds=config.recovery.hang_seconds_min,
            start_seconds_max=config.recovery.start_seconds_max,
            post_to_agents=self._crew.post_to_agents,
            post_to_node=self._keepers.post_to_node,
            on_suspect_health=self._save_at_once.want,
        )
        self._life = Lifecycle(
            config=config,
            archive=self._archive,
            ledger=self._ledger,
            mail=self._mail,
            saves=self._saves,
            copying=self._copying,
            keepers=self._keepers,
            reports=self._reports,
            budget=self._budget,
            probation=self._probation,
            rendezvous=self._rendezvous,
            save_at_once=self._save_at_once,
            handover=self._handover,
            rounds=self._rounds,
            cadence=self._cadence,
            outcome=before.outcome,
            skipped=recovery.skipped_batches(self._ledger.path),
            begun=set(begun),
            put=self._put,
            checkpoint=newest.name if newest else None,
            record=current,
        )
        self._observation.start()

    # ------------------------------------------------------------ what members call

    async def join(self, member: str, process: str, event: AgentJoined | KeeperJoined, events_taken: int) -> Standing:
        standing = self._mail.join(member, process, events_taken)
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

    async def workers_lost(self, losses: Mapping[int, WorkerLoss]) -> None:
        """Ray Train lost these workers, by rank, and is about to replace all of them."""
        for rank, loss in losses.items():
            member = self._rendezvous.members.get(rank)
            if member is not None:
                self._rendezvous.losses.lost(member.joined.agent, loss)

    # ------------------------------------------------------------ what the driver calls

    async def keepers_wanted(self, have: Sequence[str]) -> list[str]:
        """The nodes that need a keeper and have none; waits a while for there to be some."""
        return await self._keepers.wanted(have)

    async def keeper_failed(self, node: str, problem: str) -> None:
        """A keeper could not even start."""
        if node in await self._node_watch.look():  # else its agents are gone as well
            self._life.stop(f"the keeper of node {node} could not be started: {problem}", "EnvironmentProblem")

    async def outcome(self) -> Outcome:
        return self._life.outcome

    async def ray_ended(self, error: str) -> Round | None:
        """Ray Train has ended, and there is no verdict: how to start it again, None if the run is over."""
        if self._life.outcome.ended:
            return None
        following = self._rounds.ray_ended(error)
        if isinstance(following, str):
            self._life.stop(following, "EnvironmentProblem")
            return None
        self._put(RayEnded())
        return following

    async def status(self) -> dict[str, Any]:
        return self._live_status()

    def _live_status(self) -> dict[str, Any]:
        """Also asked for by the status page, on a thread of its own."""
        return {
            **self._crew.status(),
            "loss": self._loss,
            "committed_step": self._committed_step,
            "copied_step": self._copying.copied_step,
        }

    def _page_status(self) -> dict[str, Any]:
        """With what /healthz says, so that a page is not green where the run is not well."""
        return {**self._live_status(), "problems": self._observation.problems()}

    # ------------------------------------------------------------ events

    def _put(self, event: Any) -> None:
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())
            loop = asyncio.get_running_loop()
            self._looking = [loop.create_task(self._look()), loop.create_task(self._node_watch.run(self._put))]
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

    async def _look(self) -> None:
        while True:
            self._watch.look()
            self._observation.waits(self._watch.waits())
            await asyncio.sleep(_LOOK_SECONDS)

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
                    rank=self._crew.rank_of(event.agent),
                    source=event.source,
                    checkpoint=event.checkpoint,
                    step=event.step,
                    seconds=event.seconds,
                )
            case RestoreFailed():
                if event.generation == rendezvous.generation:
                    self._life.restore_failed = event.reason
            case FirstStep():
                self._first_step(event)
            case RankPulse():
                await self._pulse(event)
            case StacksDumped():
                self._watch.stacks(event)
            case RankReport():
                if self._crew.rank_of(event.agent) == 0:
                    self._reports.metrics(event.metrics)
            case RankFinished():
                rendezvous.rank_finished(event)
            case RankExited():
                self._watch.rank_ended(event.agent, event.generation)
                await self._life.carry_out(rendezvous.exited(event))
            case RankMemory():
                rendezvous.uses_memory(event.agent, event.memory)
                self._observation.uses_memory(self._crew.rank_of(event.agent), event.memory.group_rss_bytes)
            case AgentFailed():
                self._life.stop(event.message, "CallerError")
            case Reported():
                self._reports.done(event)
                if event.draining is not None:
                    self._handover.draining(event.draining)
            case Terminated():
                self._handover.terminated(event)
            case SaveRefused():
                self._save_refused(event)
            case Snapshotted():
                self._saves.snapshotted(event)
                self._cadence.snapshotted(event.snapshot)
                self._observation.snapshotted(event.snapshot)
            case SnapshotSkipped():
                self._saves.skipped(event)
            case ShardPersisted():
                self._saves.persisted(event)
            case PersistFailed():
                self._saves.persist_failed(event)
            case Corruption():
                await corruption.answer(self._life, event)
            case ShardCopied():
                self._copying.copied(event)
            case GenerationDrained():
                if event.generation == rendezvous.generation:
                    self._copying.holds(event.keeper, event.held)
                await self._life.drained(event.keeper, event.generation)
            case lifecycle.DrainOverdue():
                await self._life.drained(None, event.generation)
            case lifecycle.Proceed():
                if rendezvous.phase is rv.Phase.JUDGING:
                    await self._life.carry_out(rendezvous.proceed(event.reason))
            case nodes.NodeLost():
                await self._node_lost(event.node)
            case RayEnded():
                await self._life.carry_out(rendezvous.agents_lost(list(rendezvous.members), kind="controller"))
            case handover.EndFor():
                await self._life.carry_out(rendezvous.fail(event.cause))
            case handover.NoticeDue():
                self._handover.tick()
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
        self._handover.members_changed()
        self._rounds.joined()
        if event.terminated is not None:
            self._handover.terminated(event.terminated)
        self._resume_saves()  # before a generation is created, which may restore what keepers hold
        await self._life.carry_out(decisions)
        if self._life.outcome.ended:
            self._mail.post(event.agent, Finish(last_report=self._reports.last))

    async def _keeper_joined(self, event: KeeperJoined) -> None:
        replaces_another = self._keepers.joined(event)
        if replaces_another:
            self._copying.keeper_lost(event.keeper)
        self._copying.holds(event.keeper, (*event.snapshots, *event.copies))
        self._ledger.append("keeper", node=event.node, pid=event.pid)
        if event.problem is not None:
            self._life.stop(event.problem, "EnvironmentProblem")
            return
        if replaces_another:
            self._saves.keeper_lost(self._crew.ranks_on(event.node))
            await self._life.keeper_lost(event.keeper)
        self._resume_saves()
        await self._life.create_generation()

    async def _node_lost(self, node: str) -> None:
        self._ledger.append("node_lost", node=node, ranks=self._crew.ranks_on(node))
        lost = self._keepers.at(node)
        for generation, ranks in self._keepers.node_lost(node):
            self._saves.keeper_lost(ranks, generation)
        if lost is not None:
            self._copying.keeper_lost(lost)
        await self._life.keeper_lost(lost)
        await self._life.carry_out(self._rendezvous.agents_lost(self._crew.ranks_on(node)))

    def _resume_saves(self) -> None:
        """After a restart: once agents and keepers are back, take over the saves that were under way."""
        if self._resuming and not self._rendezvous.resuming and self._keepers.complete():
            self._resuming = False
            # What was written here is seen without a probe, which read-only storage would refuse.
            generations = self._archive.scan(manifests=False, fresh=False).generations
            self._saves.rebuild(generations, len(self._rendezvous.members), self._keepers.all())

    def _first_step(self, event: FirstStep) -> None:
        self._rendezvous.progressed(event.agent, event.generation, event.step, event.at)
        rank = self._crew.rank_of(event.agent)
        self._ledger.append("first_step", generation=event.generation, rank=rank, step=event.step, at_step=event.at)

    async def _pulse(self, event: RankPulse) -> None:
        self._rendezvous.progressed(event.agent, event.generation, event.step, time.time())
        self._save_at_once.progressed(event.generation, event.step)
        rank = self._crew.rank_of(event.agent)
        if event.loss is not None and rank == 0:
            self._loss = event.loss
        self._cadence.pulse(event, rank)
        self._observation.pulse(rank, event)
        cause = self._watch.pulse(event)
        if cause is not None:
            await self._life.carry_out(self._rendezvous.fail(cause))

    def _save_refused(self, event: SaveRefused) -> None:
        rank = self._crew.rank_of(event.agent)
        if rank is not None:
            # Those ranks that were not too late need not keep their snapshot of it.
            reason = f"step {event.newest_step} was finished when it was ordered"
            self._saves.skipped(
                SnapshotSkipped(keeper="", rank=rank, generation=event.generation, step=event.step, reason=reason)
            )
        self._save_at_once.refused(event)

    def _committed(self, step: int, generation: int, checkpoint: str) -> None:
        self._life.checkpoint, self._committed_step = checkpoint, step
        self._budget.committed(step)
        self._save_at_once.committed(generation, step)
        self._rounds.committed()
        self._probation.committed(checkpoint, step)
        # Ray would look for a directory.
        local = self._config.recovery.checkpoint_storage is None
        self._reports.commit(step, self._archive.store.place(checkpoint_dir(checkpoint)) if local else None)
