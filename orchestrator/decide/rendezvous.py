"""Who belongs to the run, and which generation they form. Events in, decisions out; no clock, no Ray, no disk.

Invariants: ranks start only when every agent of one group has a fresh rank waiting and none has one running; the
first rank that ends for another reason than having finished ends the generation for all; a generation's failure is
judged once all its ranks are gone, so that the earliest cause is known and not the loudest; messages about another
generation change nothing. Faults survived: an agent dies with its node (Ray starts a new group, which replaces the
old one as a whole); the coordinator was restarted in between (agents say what they were doing, and a running
generation goes on).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from orchestrator.decide.failure import Cause, Failure, cause_of, earliest
from orchestrator.decide.losses import Losses
from workers.memory_watch import MemorySeen
from workers.messages import AgentJoined, RankExited, RankFinished
from workers.processes import ProcessId


class Phase(Enum):
    GATHERING = "gathering"
    CREATING = "creating"
    RUNNING = "running"
    ENDING = "ending"
    JUDGING = "judging"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGeneration:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """`agents` by rank."""

    generation: int
    agents: tuple[str, ...]
    store_host: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRanks:
    generation: int
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The generation is over; answer with `proceed` or `stop`."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFinished:
    generation: int
    finished: RankFinished


Decision = CreateGeneration | StartRanks | EndRanks | Judge | AllFinished


@dataclass(slots=True)
class Member:
    """What is known of one agent. `generation`: of its running rank; None when none runs. `leaving`: it was told to
    end, or is gone, and no generation starts before its whole group is replaced. `heard_at`: Unix time of its last
    word."""

    joined: AgentJoined
    ready: bool
    store_port: int
    generation: int | None = None
    process: ProcessId | None = None
    finished: RankFinished | None = None
    done: bool = False
    leaving: bool = False
    step: int = -1
    heard_at: float = 0.0
    exit: RankExited | None = None


@dataclass(slots=True)
class Rendezvous:
    """`generation`: the newest one that was created; `resuming` means it may still be running (a restarted
    coordinator). `judged`, `agents_before`: the newest generation that failed, and the agents that had joined, before
    the restart. `losses`: what is known of agents that may be lost."""

    generation: int = 0
    resuming: bool = False
    judged: int = 0
    agents_before: frozenset[str] = frozenset()
    losses: Losses = field(default_factory=Losses)
    phase: Phase = Phase.GATHERING
    group: str | None = None
    members: dict[int, Member] = field(default_factory=dict)
    reason: str = "start"
    _causes: list[Cause] = field(default_factory=list)
    _last_step: int = -1

    # ------------------------------------------------------------ events

    def joined(self, event: AgentJoined, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        if event.group != self.group:
            decisions += self._new_group(event.group)
        running = event.generation
        self.members[event.rank] = Member(
            joined=event,
            ready=event.ready,
            store_port=event.store_port,
            generation=running,
            process=event.rank_process,
            finished=event.finished if event.finished and event.finished.generation == self.generation else None,
            heard_at=now,
        )
        if self.resuming:
            return decisions + self._resume(now)
        if running is not None and not (self.phase is Phase.RUNNING and running == self.generation):
            decisions.append(EndRanks(generation=running, agents=(event.agent,)))
        elif self.phase is Phase.RUNNING and running is None:
            decisions += self._member_lost_rank(event, now)
        return decisions + self._create_if_complete()

    def ready(self, agent: str, store_port: int) -> list[Decision]:
        member = self._member(agent)
        if member is None:
            return []
        member.ready, member.store_port = True, store_port
        return self._create_if_complete()

    def standby_lost(self, agent: str) -> None:
        member = self._member(agent)
        if member is not None:
            member.ready = False

    def started(self, agent: str, generation: int, process: ProcessId) -> None:
        member = self._member(agent)
        if member is not None and member.generation == generation:
            member.process = process

    def progressed(self, agent: str, generation: int, step: int, at: float) -> None:
        member = self._member(agent)
        if member is None or generation != self.generation:
            return
        member.heard_at = at
        member.step = step
        self._last_step = max(self._last_step, step)

    def uses_memory(self, agent: str, memory: MemorySeen) -> None:
        member = self._member(agent)
        if member is not None:
            member.heard_at = memory.at
            self.losses.uses_memory(agent, memory)

    def rank_finished(self, event: RankFinished) -> None:
        member = self._member(event.agent)
        if member is not None and event.generation == self.generation:
            member.finished = event

    def exited(self, event: RankExited) -> list[Decision]:
        member = self._member(event.agent)
        if member is None or event.generation != self.generation:
            return []
        member.generation, member.process, member.exit = None, None, event
        self._last_step = max(self._last_step, event.step)
        if self.phase not in (Phase.RUNNING, Phase.ENDING):
            return self._create_if_complete()
        if member.finished is not None and event.exit_code == 0:
            member.done = True
            return self._finish_if_complete() if self.phase is Phase.RUNNING else self._judge_if_over()
        self._note_exit(member.joined.rank, event)
        return self._end_generation()

    def fail(self, cause: Cause) -> list[Decision]:
        """The ranks still run, but something is wrong with the running generation: end it for that cause."""
        if self.phase is not Phase.RUNNING:
            return []
        self._causes.append(cause)
        return self._end_generation()

    def agents_lost(self, ranks: Iterable[int], *, kind: str = "agent_lost") -> list[Decision]:
        """The agents of these ranks are gone: what ran there has failed, and the group has to be replaced."""
        ran = []
        for rank in ranks:
            self.members[rank].leaving = True
            if self.members[rank].generation is not None:
                ran.append(rank)
        if self.phase not in (Phase.RUNNING, Phase.ENDING) or not ran:
            return []
        self._causes += self._lost(ran, kind)
        for rank in ran:
            self.members[rank].generation, self.members[rank].process = None, None
        return self._end_generation()

    def leave(self, agents: frozenset[str]) -> None:
        """These agents were told to end: the next generation is for the group that Ray starts then."""
        for member in self.members.values():
            member.leaving = member.leaving or member.joined.agent in agents

    def created(self, generation: int) -> list[Decision]:
        """The generation's file is in place: start its ranks, if all agents are still there."""
        self.generation = generation
        self._last_step, self._causes = -1, []
        if self.phase is not Phase.CREATING or not self._complete():
            if self.phase is Phase.CREATING:
                self.phase = Phase.GATHERING
            return self._create_if_complete()
        self.phase = Phase.RUNNING
        for member in self.members.values():
            member.generation, member.ready, member.finished, member.done = generation, False, None, False
            member.step, member.exit = -1, None
        first = self.members[0]
        return [
            StartRanks(
                generation=generation,
                agents=tuple(self.members[rank].joined.agent for rank in range(len(self.members))),
                store_host=first.joined.node_ip,
                store_port=first.store_port,
            )
        ]

    def proceed(self, reason: str) -> list[Decision]:
        """Go on after a judged failure."""
        self.phase, self.reason = Phase.GATHERING, reason
        return self._create_if_complete()

    def stop(self) -> list[Decision]:
        """End the run: what still runs is ended."""
        self.phase = Phase.STOPPED
        agents = tuple(m.joined.agent for m in self.members.values() if m.generation is not None)
        return [EndRanks(generation=self.generation, agents=agents)] if agents else []

    # ------------------------------------------------------------ rules

    def _member(self, agent: str) -> Member | None:
        return next((member for member in self.members.values() if member.joined.agent == agent), None)

    def _complete(self) -> bool:
        """Every agent of the group is there with a waiting rank and nothing running."""
        if not self.members:
            return False
        world_size = next(iter(self.members.values())).joined.world_size
        return len(self.members) == world_size and all(
            member.ready and member.generation is None and not member.leaving for member in self.members.values()
        )

    def _create_if_complete(self) -> list[Decision]:
        if self.phase is Phase.GATHERING and not self.resuming and self._complete():
            self.phase = Phase.CREATING
            return [CreateGeneration(reason=self.reason)]
        return []

    def _lost(self, ranks: list[int], kind: str = "agent_lost") -> list[Cause]:
        """Causes for agents that are gone. They did not even answer the order to kill their ranks: gone before their
        peers could fail of that."""
        by_agent = {self.members[rank].joined.agent: rank for rank in ranks}
        heard = {agent: self.members[rank].heard_at for agent, rank in by_agent.items()}
        if kind != "agent_lost":
            return [Cause(rank=rank, kind=kind, exit_code=None, at=heard[agent]) for agent, rank in by_agent.items()]
        return [
            Cause(rank=by_agent[one.agent], kind=one.kind, exit_code=None, at=one.at, detail=one.detail)
            for one in self.losses.explain(heard)
        ]

    def _new_group(self, group: str) -> list[Decision]:
        running = sorted(rank for rank, member in self.members.items() if member.generation is not None)
        lost = self._lost(running)
        self.losses = Losses()
        self.group, self.members = group, {}
        if self.phase is Phase.CREATING:
            self.phase = Phase.GATHERING
        if self.phase is Phase.RUNNING or (self.phase is Phase.ENDING and lost):
            self._causes += lost
            return self._end_generation()
        return []

    def _resume(self, now: float) -> list[Decision]:
        """After the coordinator's restart: once all agents are back, the generation goes on or is over."""
        members = list(self.members.values())
        if len(members) < members[0].joined.world_size:
            return []
        self.resuming = False
        if all(member.generation == self.generation or member.finished for member in members):
            self.phase = Phase.RUNNING
            for member in members:
                member.done = member.generation is None
            return self._finish_if_complete()
        self._note_ends_before_restart(now)
        if self._causes or any(member.generation is not None for member in members):
            self.phase = Phase.RUNNING
            return self._end_generation()
        return self._create_if_complete()

    def _note_ends_before_restart(self, now: float) -> None:
        """What ended the generation while no coordinator was there to hear it, or was told to one that is gone."""
        if self.judged >= self.generation:
            return
        for rank, member in sorted(self.members.items()):
            exited = member.joined.exited
            if exited is not None and exited.generation == self.generation:
                self._note_exit(rank, exited)
            elif member.joined.agent not in self.agents_before:
                self._causes.append(Cause(rank=rank, kind="agent_lost", exit_code=None, at=now))

    def _note_exit(self, rank: int, event: RankExited) -> None:
        """Its cause, unless it was killed because of another; also told twice it counts once."""
        cause = cause_of(rank, event)
        if (not event.ordered or event.error is not None) and cause not in self._causes:
            self._causes.append(cause)

    def _member_lost_rank(self, event: AgentJoined, now: float) -> list[Decision]:
        if event.finished is not None and event.finished.generation == self.generation:
            return []
        self._causes.append(Cause(rank=event.rank, kind="rank_lost", exit_code=None, at=now))
        return self._end_generation()

    def _end_generation(self) -> list[Decision]:
        running = tuple(m.joined.agent for m in self.members.values() if m.generation is not None)
        first = self.phase is Phase.RUNNING
        self.phase = Phase.ENDING
        if running:
            return [EndRanks(generation=self.generation, agents=running)] if first else []
        return self._judge_if_over()

    def _judge_if_over(self) -> list[Decision]:
        if any(member.generation is not None for member in self.members.values()):
            return []
        self.phase = Phase.JUDGING
        causes = sorted(self._causes, key=earliest)
        if not causes:
            causes = [Cause(rank=-1, kind="unknown", exit_code=None, at=0.0)]
        return [
            Judge(
                failure=Failure(
                    generation=self.generation,
                    first=causes[0],
                    echoes=tuple(causes[1:]),
                    step=self._last_step,
                    exit=member.exit if (member := self.members.get(causes[0].rank)) else None,
                )
            )
        ]

    def _finish_if_complete(self) -> list[Decision]:
        first = self.members[0].finished
        if first is None or not all(member.done for member in self.members.values()):
            return []
        self.phase = Phase.FINISHED
        return [AllFinished(generation=self.generation, finished=first)]
