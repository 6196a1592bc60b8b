"""Has Ray Train started again: when its controller has died, and when a node is to be left out. The coordinator's side.

Ray Train is told where to run when it starts, and at no other time. So a node is excluded by ending the round (all
agents return) and beginning another with a label selector; orchestrator/ray_fit.py is the driver's side. Decisions are
in decide/rounds.py and decide/nodes.py.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.decide.failure import Failure
from orchestrator.decide.nodes import NodeBlame
from orchestrator.decide.rendezvous import Rendezvous
from orchestrator.decide.rounds import ENDS_MAX, RayRounds
from orchestrator.nodes import NodeWatch
from orchestrator.observe.ledger import Ledger
from orchestrator.roster import KeeperRoster
from workers.messages import Command, Finish

logger = logging.getLogger("lastgood")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Start Ray Train again: after a while, without the excluded nodes. `group`: the placement group that is done."""

    delay_seconds: float
    excluded: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, slots=True)
class RayEnded:
    """Ray Train has ended, and with it all agents."""


class Rounds:
    """`needed`: the resources of all ranks together; `can_exclude`: False if the user's own label selector is in the
    way. `excluded`: by this driver so far (a restarted coordinator)."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        rendezvous: Rendezvous,
        keepers: KeeperRoster,
        nodes: NodeWatch,
        needed: dict[str, float],
        can_exclude: bool,
        excluded: Iterable[str],
        post: Callable[[str, Command], None],
    ) -> None:
        self._ledger = ledger
        self._rendezvous = rendezvous
        self._keepers = keepers
        self._nodes = nodes
        self._needed = needed
        self._can_exclude = can_exclude
        self._post = post
        self._excluded = set(excluded)
        self._blame = NodeBlame()
        self._rounds = RayRounds()
        self._ending = False
        self._joined = False

    def committed(self) -> None:
        self._rounds.committed()

    def joined(self) -> None:
        self._joined = True

    async def judged(self, failure: Failure, last_report: int) -> None:
        """A generation failed and the run goes on; maybe somewhere else."""
        places = self._keepers.places(failure.generation)
        node = self._blame.failed(
            failure.first.kind, places.get(failure.first.rank), list(places.values()), at=time.time()
        )
        if node is None:
            return
        await self._nodes.look()
        possible = self._can_exclude and self._nodes.room_without(self._excluded | {node}, self._needed)
        logger.warning(
            "lastgood: node %s fails again and again, and no other does; %s",
            node,
            "it is used no more" if possible else "the run cannot do without it",
        )
        self._ledger.append("node_excluded", node=node, left_out=possible)
        if possible:
            self._excluded.add(node)
            self._ending = True
            agents = [member.joined.agent for member in self._rendezvous.members.values()]
            self._rendezvous.leave(frozenset(agents))
            for agent in agents:
                self._post(agent, Finish(last_report=last_report))

    def ray_ended(self, error: str) -> Round | str:
        """Ray Train has ended without a verdict: the next round, or why there is none."""
        group, joined, ending = self._rendezvous.group, self._joined, self._ending
        self._joined, self._ending = False, False
        delay_seconds: float | None = 0.0
        if not ending:
            delay_seconds = self._rounds.ended()
            logger.warning("lastgood: Ray Train ended early: %s", error)
            self._ledger.append("controller", error=error, ends=self._rounds.ends)
            if self._excluded and not joined:
                logger.warning("lastgood: Ray cannot place the ranks without %s", sorted(self._excluded))
                self._ledger.append("nodes_taken_back", nodes=sorted(self._excluded))
                self._excluded.clear()
        if delay_seconds is None:
            return (
                f"Ray Train ended {ENDS_MAX + 1} times in a row without a newer checkpoint, the last time with: {error}"
            )
        return Round(delay_seconds=delay_seconds, excluded=tuple(sorted(self._excluded)), group=group)
