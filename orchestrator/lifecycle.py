"""From one generation to the next: carries out what the rendezvous decides.

Invariants: the ranks of a generation start only after its file is in place and every node has a keeper; a failure is
judged only when all its ranks are gone and the keepers have taken in what they had told; saves under way are waited for
only where the newest state cannot be restored from memory; the run ends once, with one outcome.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import recovery
from orchestrator.archive import RunArchive
from orchestrator.cadence import Cadence
from orchestrator.copying import Copying
from orchestrator.decide import bad_loss
from orchestrator.decide import rendezvous as rv
from orchestrator.decide.budget import FailureBudget, Retry, Stop
from orchestrator.decide.failure import Cause, Failure
from orchestrator.decide.lineage import GenerationRecord, MemorySet
from orchestrator.decide.probation import Probation
from orchestrator.handover import Handover
from orchestrator.mailbox import Mailboxes
from orchestrator.observe.ledger import Ledger
from orchestrator.outcome import CoordinatorConfig, Outcome
from orchestrator.reports import ReportSequence
from orchestrator.roster import KeeperRoster
from orchestrator.rounds import Rounds
from orchestrator.save_at_once import SaveAtOnce
from orchestrator.saves import Saves
from workers import failpoint
from workers.data.course import BatchId
from workers.errors import Fenced, LastgoodError, TrainingDiverged, TrainingFailed
from workers.keeper_messages import EndGeneration
from workers.messages import Finish, KillRank, StartRank

logger = logging.getLogger("lastgood")

_SETTLE_SECONDS = 5.0
_DRAIN_SECONDS = 5.0  # a keeper that is there may have to digest what the dead ranks had told it
_NO_KEEPER_SECONDS = 1.0
_RETRY_SECONDS = 2.0
_SILENT_SECONDS = 20.0
"""How long to wait for a keeper to say what it holds; the node of one that never does may be lost."""
_ASK_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class DrainOverdue:
    """Keepers have had their time to take in what the dead ranks had told them."""

    generation: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """Nothing is waited for any more: the next generation may begin."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends because of this failure, whose `entry` the ledger has."""

    failure: Failure
    entry: dict[str, Any]
    reason: str
    error_type: str = "TrainingFailed"


@dataclass(frozen=True, slots=True)
class CreateAgain:
    """The storage refused the generation's file a while ago, or saves under way have been waited for."""


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """`put` queues an event for the coordinator, to be handled after those that are there already. `begun`: numbers of
    the generations that are in the ledger."""

    config: CoordinatorConfig
    archive: RunArchive
    ledger: Ledger
    mail: Mailboxes
    saves: Saves
    copying: Copying
    keepers: KeeperRoster
    reports: ReportSequence
    budget: FailureBudget
    probation: Probation
    rendezvous: rv.Rendezvous
    save_at_once: SaveAtOnce
    handover: Handover
    rounds: Rounds
    cadence: Cadence
    outcome: Outcome
    skipped: frozenset[BatchId]
    begun: set[int]
    put: Callable[[Any], None]
    restore_failed: str | None = None
    _noticed_at: float | None = None
    checkpoint: str | None = None
    record: GenerationRecord | None = None
    _judging: Failure | None = None
    _refused_since: float | None = None
    _waiting: asyncio.Task[None] | None = None
    _memory: MemorySet | None = None
    _draining_since: float = 0.0
    _settling: asyncio.Task[None] | None = None

    async def carry_out(self, decisions: Sequence[rv.Decision]) -> None:
        for decision in decisions:
            match decision:
                case rv.CreateGeneration():
                    await self.create_generation()
                case rv.StartRanks():
                    self._start_ranks(decision)
                case rv.EndRanks():
                    self._noticed_at = self._noticed_at or time.time()
                    self._end_ranks(decision)
                case rv.Judge():
                    self._noticed_at = self._noticed_at or time.time()
                    self._drain(decision.failure)
                case rv.AllFinished():
                    self._finish(decision)

    async def create_generation(self) -> None:
        """Choose what to restore and create the generation's file; called again when the last keeper has joined."""
        if self.rendezvous.phase is not rv.Phase.CREATING or not self.keepers.complete():
            return
        if self.copying.silent() and time.monotonic() - self._draining_since < _SILENT_SECONDS:
            asyncio.get_running_loop().call_later(_ASK_AGAIN_SECONDS, self.put, CreateAgain())
            return
        memory = self.copying.restorable(len(self.rendezvous.members))
        if self.saves.worth_waiting_for(memory) and (self._settling is None or not self._settling.done()):
            # What they commit need not be trained again.
            if self._settling is None:
                self._settling = asyncio.get_running_loop().create_task(self._settle(CreateAgain()))
            return
        try:
            created = await asyncio.to_thread(
                recovery.create_generation,
                self.archive,
                run_dir=self.config.run_dir,
                committed=frozenset(self.saves.committed),
                begun=frozenset(self.begun),
                driver=self.config.driver,
                reason=self.rendezvous.reason,
                world_size=len(self.rendezvous.members),
                skip=self.skipped,
                suspects=dict(self.probation.suspects),
                memory=memory,
                on_quarantine=self._note_quarantine,
            )
        except OSError as error:
            self._create_later(error)
            return
        self._refused_since, self._settling = None, None
        record = self.record = created.record
        self.begun.add(record.number)
        for name, why in created.passed:
            logger.warning("lastgood: %s is passed over: %s", name, why)
            self.ledger.append("passed_over", checkpoint=name, reason=why)
        self.restore_failed, self._noticed_at = None, None
        self.saves.restoring = record.parent
        self._memory, from_copies = None, []
        if record.source == "memory" and memory is not None:
            self._memory, from_copies = memory, self.copying.from_copies(memory)
            self.keepers.moved(memory)
            self.saves.memory_taken(memory)
        else:  # in memory the newest checkpoint is still the one that it was
            self.checkpoint = record.parent
        self.saves.generation_started(created.generations, record.world_size)
        self.budget.generation_started(record.restored_step)
        self.save_at_once.generation_started(record.number, record.restored_step)
        self.handover.generation_started()
        self.probation.generation_started(recovery.origin_name(asdict(record)))
        self.skipped = frozenset(record.skip)
        await self.carry_out(self.rendezvous.created(record.number))
        self.ledger.append(
            "generation",
            generation=record.number,
            driver=self.config.driver,
            reason=record.reason,
            restored_step=record.restored_step,
            source=record.source,
            checkpoint=record.parent,
            parent_generation=record.parent_generation,
            ranks=record.world_size,
            nodes=len({member.joined.node for member in self.rendezvous.members.values()}),
            from_copies=from_copies,
            skip=record.skip,
        )

    def _create_later(self, error: OSError) -> None:
        """Storage that refuses a generation's file may come back; nothing trains meanwhile, so not for ever."""
        self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - self._refused_since > self.config.recovery.save_timeout_seconds:
            self.stop(f"no generation could be started in {self.config.run_dir}: {error}", "EnvironmentProblem")
            return
        logger.warning("lastgood: the next generation cannot be started yet: %s", error)
        asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.put, CreateAgain())

    def _note_quarantine(self, checkpoint: str, reason: str) -> None:
        self.ledger.append("quarantine", checkpoint=checkpoint, reason=reason)

    def _start_ranks(self, decision: rv.StartRanks) -> None:
        failpoint.hit("generation.start", generation=decision.generation)
        members = self.rendezvous.members
        restore = self.copying.restore_order(self.record, self._memory) if self.record else None
        self.keepers.placed(decision.generation, {rank: member.joined.node for rank, member in members.items()})
        for rank, agent in enumerate(decision.agents):
            self.mail.post(
                agent,
                StartRank(
                    generation=decision.generation,
                    rank=rank,
                    local_rank=members[rank].joined.local_rank,
                    world_size=len(decision.agents),
                    store_host=decision.store_host,
                    store_port=decision.store_port,
                    restore=restore,
                    snapshot_every_steps=self.cadence.snapshot_every_steps,
                    tuned_save_every_steps=self.cadence.save_every_steps,
                    skip=tuple(sorted(self.skipped)),
                ),
            )

    def _end_ranks(self, decision: rv.EndRanks) -> None:
        for agent in decision.agents:
            self.mail.post(agent, KillRank(generation=decision.generation))

    # ------------------------------------------------------------ failures

    def _drain(self, failure: Failure) -> None:
        """A generation is over: first let the keepers take in what its ranks had still told them."""
        self._judging = failure
        self.keepers.await_drained()
        self.copying.generation_ending()
        self._draining_since = time.monotonic()
        self.keepers.post_all(EndGeneration(generation=failure.generation))
        seconds = _DRAIN_SECONDS if self.keepers.all() else _NO_KEEPER_SECONDS
        asyncio.get_running_loop().call_later(seconds, self.put, DrainOverdue(failure.generation))

    async def drained(self, keeper: str | None, generation: int) -> None:
        """A keeper (None: time) says that the generation's ranks have nothing more to tell."""
        failure = self._judging
        if failure is not None and failure.generation == generation and self.keepers.drained(keeper):
            self._judging = None
            await self._judge(failure)

    async def keeper_lost(self, keeper: str | None) -> None:
        """It will not say that it has drained."""
        if self._judging is not None and keeper is not None:
            await self.drained(keeper, self._judging.generation)

    async def _judge(self, failure: Failure) -> None:
        """Write down why the generation ended, and go on or stop."""
        failpoint.hit("generation.judge", generation=failure.generation)
        failure = self.handover.judged(failure)
        entry = {
            **recovery.describe(failure),
            "noticed_at": self._noticed_at,
            "restore_failed": self.restore_failed,
        }
        self.ledger.append("failure", **entry)
        self.saves.generation_ended(failure.generation)
        verdict, suspect = recovery.judge(entry, self.budget, self.probation)
        record = self.record
        if self.restore_failed is not None and record is not None and record.parent_generation is not None:
            await self._set_aside(record, record.parent_generation, self.restore_failed)
            if isinstance(verdict, Retry):
                self.put(Proceed("restore_failed"))
                return
        error = failure.first.error
        if self.restore_failed is None and error is not None and error.exit_code != LastgoodError.exit_code:
            self._wait_in_background(self._settle(GiveUp(failure, entry, "repeating it cannot help", error.type)))
            return
        answer = self._answer_to_loss(failure.first) if failure.first.kind == "loss" else None
        verdict = answer if isinstance(answer, Stop) else verdict
        if isinstance(verdict, Stop):
            error_type = TrainingFailed.__name__ if answer is None else TrainingDiverged.__name__
            self._wait_in_background(self._settle(GiveUp(failure, entry, verdict.reason, error_type)))
            return
        if suspect is not None:
            self.ledger.append("probation", checkpoint=suspect, reason=self.probation.suspects[suspect])
        if isinstance(answer, bad_loss.Skip):
            self._skip(failure, answer)
        await self.rounds.judged(failure, self.reports.last)
        asyncio.get_running_loop().call_later(verdict.delay_seconds, self.put, Proceed("failure"))

    def _answer_to_loss(self, cause: Cause) -> bad_loss.Skip | Stop:
        return bad_loss.answer(cause.detail, self.config.recovery.on_bad_loss, self.skipped)

    def _skip(self, failure: Failure, skip: bad_loss.Skip) -> None:
        """Decided once it is in the ledger; every generation from the next one on passes over these batches."""
        detail = failure.first.detail
        logger.warning("lastgood: the run goes on without %d batches: %s", len(skip.batches), skip.batches)
        self.ledger.append(
            "skip",
            generation=failure.generation,
            rank=failure.first.rank,
            bad_step=detail["step"],
            batches=skip.batches,
        )
        self.skipped |= frozenset(skip.batches)

    async def _set_aside(self, restored: GenerationRecord, generation: int, reason: str) -> None:
        """What that generation restored, which `generation` had reached, is not to be tried again."""
        checkpoint = restored.parent
        if restored.source == "memory" or checkpoint is None:
            self.saves.memory_dropped(generation, restored.restored_step, reason)
            return
        try:
            await asyncio.to_thread(self.archive.quarantine, checkpoint, reason)
        except OSError as error:
            # The storage may have been away, and not the checkpoint damaged. If it is, that will be seen again.
            logger.warning("lastgood: %s could not be restored, and is not set aside yet: %s", checkpoint, error)
        else:
            self._note_quarantine(checkpoint, reason)

    async def give_up(self, event: GiveUp) -> None:
        """Stop with a report."""
        report = recovery.stop_report(
            event.failure,
            event.reason,
            entry=event.entry,
            run_dir=self.config.run_dir,
            checkpoint=self.checkpoint,
            suspects=self.probation.suspects,
        )
        entries = recovery.entries_of(self.config.driver, self.ledger.path)
        writing = asyncio.to_thread(report.write, entries, self.config.driver)
        try:
            path = await asyncio.wait_for(writing, _SETTLE_SECONDS)
        except TimeoutError:
            path = None  # the storage stalls
        self.stop(report.error(path), event.error_type, report=path)

    async def _settle(self, then: CreateAgain | GiveUp) -> None:
        """Wait for saves under way."""
        await self.saves.settle(_SETTLE_SECONDS)
        self.put(then)

    def _wait_in_background(self, waiting: Coroutine[Any, Any, None]) -> None:
        # Beside the queue of events, which bring what is waited for.
        self._waiting = asyncio.get_running_loop().create_task(waiting)

    # ------------------------------------------------------------ the end

    def _finish(self, decision: rv.AllFinished) -> None:
        finished = decision.finished
        metrics = {**finished.metrics, "step": finished.step}
        self.reports.metrics(metrics)
        self.reports.flush()
        self.ledger.append("finished", generation=decision.generation, step=finished.step, protected=finished.protected)
        self._end(
            Outcome(
                ended=True,
                step=finished.step,
                generation=decision.generation,
                metrics=metrics,
                checkpoint=self.checkpoint,
            )
        )

    def stop(self, error: str, error_type: str, report: str | None = None) -> None:
        """End the run with an error; the first one counts. `report`: path of the file that says more."""
        if self.outcome.ended:
            return
        driver = self.config.driver
        if error_type == Fenced.__name__:
            self.ledger.append("fenced", driver=driver, reason=error)  # the run itself goes on elsewhere
        else:
            self.ledger.append("stopped", driver=driver, reason=error, error_type=error_type, report=report)
        for decision in self.rendezvous.stop():
            if isinstance(decision, rv.EndRanks):
                self._end_ranks(decision)
        self._end(Outcome(ended=True, error=error, error_type=error_type, generation=self.rendezvous.generation))

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        for member in self.rendezvous.members.values():
            self.mail.post(member.joined.agent, Finish(last_report=self.reports.last))
