"""Saves at once and hands over when a node is drained or a process is told to end.

The decisions are in decide/notices.py. Ray Train's own word on drained nodes is asked for
through the agents, since it counts how often each worker asks (orchestrator/reports.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.decide import notices as nt
from orchestrator.decide.failure import Cause, Failure
from orchestrator.decide.rendezvous import Member, Phase, Rendezvous
from orchestrator.decide.save_order import SaveDone
from orchestrator.observe.ledger import Ledger
from orchestrator.save_at_once import SaveAtOnce
from workers.messages import Command, Leave, NodesDraining, Terminated

logger = logging.getLogger("lastgood")

_ASK_SECONDS = 1.0
_DRAIN_SECONDS_DEFAULT = 110.0
"""How long a drained node without a deadline is taken to stay; Ray Train restarts its workers after 120 s."""


@dataclass(frozen=True, slots=True)
class EndFor:
    """The running generation has to end for this cause."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class NoticeDue:
    """Time has passed, and there may be room now: a save or a hand-over may be due."""


class Handover:
    """`post(agent, command)` sends a command; `put` queues an event for the coordinator; `ask` has Ray Train asked for
    draining nodes; `room_without(nodes)` says whether the ranks fit elsewhere; `sigterm_seconds` is how long a process
    that got SIGTERM is still there."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        rendezvous: Rendezvous,
        saves: SaveAtOnce,
        sigterm_seconds: float,
        post: Callable[[str, Command], None],
        put: Callable[[Any], None],
        ask: Callable[[], None],
        room_without: Callable[[frozenset[str]], bool],
    ) -> None:
        self._ledger = ledger
        self._rendezvous = rendezvous
        self._sigterm_seconds = sigterm_seconds
        self._post = post
        self._put = put
        self._ask = ask
        self._room_without = room_without
        self._saves = saves
        saves.on_done.append(self._save_done)
        self._notices = nt.Notices()
        self._asking: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None

    def generation_started(self) -> None:
        self._notices.generation_started()

    # ------------------------------------------------------------ notices

    def members_changed(self) -> None:
        self._notices.members_are(frozenset(member.joined.agent for member in self._members().values()))
        if self._asking is None:
            self._ask_again()

    def draining(self, word: NodesDraining) -> None:
        """Ray Train names nodes that will be taken away."""
        now = time.time()
        for node in word.nodes:
            ranks = tuple(sorted(rank for rank, member in self._members().items() if member.joined.node == node))
            if ranks:
                self._noticed(
                    nt.Notice(
                        target=f"node {node} {self._rendezvous.group}",
                        node=node,
                        ranks=ranks,
                        agents=tuple(self._members()[rank].joined.agent for rank in ranks),
                        reason="drain",
                        at=now,
                        deadline_at=word.deadline_at or now + _DRAIN_SECONDS_DEFAULT,
                    )
                )

    def terminated(self, event: Terminated) -> None:
        """An agent or its rank was sent SIGTERM."""
        for rank, member in self._members().items():
            if member.joined.agent == event.agent and event.generation in (None, self._rendezvous.generation):
                self._noticed(
                    nt.Notice(
                        target=f"{event.agent} {event.generation}",
                        node=member.joined.node,
                        ranks=(rank,),
                        agents=(event.agent,) if event.generation is None else (),
                        reason="sigterm",
                        at=event.at,
                        deadline_at=event.at + self._sigterm_seconds,
                    )
                )

    def _save_done(self, done: SaveDone) -> None:
        room, now = self._room(), time.time()
        if done.committed:
            self._carry_out(self._notices.saved(done.step, room=room, now=now))
        else:
            self._carry_out(self._notices.not_saved(room=room, now=now))

    def tick(self) -> None:
        self._carry_out(self._notices.tick(room=self._room(), now=time.time()))

    def _room(self) -> bool:
        return self._room_without(self._notices.nodes)

    def judged(self, failure: Failure) -> Failure:
        """A generation is over: whoever is to leave does so now. A death that was announced counts as the notice."""
        notice = self._notices.covers(failure.first.rank, failure.first.kind)
        self._leave_now()
        if notice is None:
            return failure
        detail = {"reason": notice.reason, "node": notice.node, "saved_step": None, "died_of": failure.first.kind}
        return replace(failure, first=replace(failure.first, kind="drain", detail=detail))

    def _members(self) -> Mapping[int, Member]:
        return self._rendezvous.members

    def _noticed(self, notice: nt.Notice) -> None:
        if self._rendezvous.phase in (Phase.FINISHED, Phase.STOPPED) or self._notices.knows(notice.target):
            return
        logger.warning("lastgood: ranks %s will be taken away (%s): saving at once", notice.ranks, notice.reason)
        self._ledger.append(
            "notice",
            node=notice.node,
            ranks=list(notice.ranks),
            reason=notice.reason,
            noticed_at=notice.at,
            deadline_at=notice.deadline_at,
        )
        running = self._rendezvous.phase is Phase.RUNNING
        room = self._room_without(self._notices.nodes | {notice.node})
        self._carry_out(self._notices.noticed(notice, running=running, room=room))

    def _carry_out(self, decisions: list[nt.Decision]) -> None:
        for decision in decisions:
            match decision:
                case nt.WantSave():
                    self._saves.want()
                case nt.HandOver():
                    self._hand_over(decision)
        self._arm()

    def _hand_over(self, decision: nt.HandOver) -> None:
        first = min(decision.notices, key=lambda notice: notice.at)
        detail = {"reason": first.reason, "node": first.node, "saved_step": decision.saved_step}
        match self._rendezvous.phase:
            case Phase.RUNNING:
                cause = Cause(rank=first.ranks[0], kind="drain", exit_code=None, at=first.at, detail=detail)
                self._put(EndFor(cause))
            case Phase.GATHERING | Phase.CREATING:
                self._leave_now()

    def _leave_now(self) -> None:
        agents = self._notices.generation_ended(room=self._room(), now=time.time())
        for agent in agents:
            self._post(agent, Leave())
        self._rendezvous.leave(frozenset(agents))

    def _arm(self) -> None:
        wakeup = self._notices.wakeup_at
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if wakeup is not None:
            wait = max(0.0, wakeup - time.time())
            self._due = asyncio.get_running_loop().call_later(wait, self._put, NoticeDue())

    def _ask_again(self) -> None:
        self._ask()
        self._put(NoticeDue())
        self._asking = asyncio.get_running_loop().call_later(_ASK_SECONDS, self._ask_again)
