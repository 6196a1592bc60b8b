"""Watches the running generation: feeds pulses to the detectors and carries out what they decide.

The decisions are in decide/detector.py and decide/straggler.py. Stacks are asked for when ranks are suspected, so that
they are there when a hang is confirmed; the ledger's entry of the failure names their files.
"""

import logging
import statistics
import time
from collections.abc import Callable

from orchestrator.decide.detector import Cleared, Decision, HangDetector, Hung, Silent, Suspect
from orchestrator.decide.failure import Cause
from orchestrator.decide.rendezvous import Phase, Rendezvous
from orchestrator.decide.straggler import StragglerFinder
from orchestrator.observe.ledger import Ledger
from workers.keeper_messages import KillAgent
from workers.messages import Command, DumpStacks, RankPulse, StacksDumped

logger = logging.getLogger("lastgood")

_DUMPS_KEPT = 10
"""Stacks of later suspicions of a generation overwrite those of earlier ones."""


class Watch:
    """`post_to_agents(command)` and `post_to_node(node, command)`, to its keeper, send commands. Without a
    `floor_seconds` nothing is taken to hang. `on_suspect_health` is called when a rank turns slow: its machine may be
    about to fail, so it is time to save."""

    def __init__(
        self,
        *,
        rendezvous: Rendezvous,
        ledger: Ledger,
        floor_seconds: float | None,
        start_seconds_max: float,
        post_to_agents: Callable[[Command], None],
        post_to_node: Callable[[str, Command], None],
        on_suspect_health: Callable[[], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._ledger = ledger
        self._post_to_agents = post_to_agents
        self._post_to_node = post_to_node
        self._on_suspect_health = on_suspect_health
        self._detector = (
            None
            if floor_seconds is None
            else HangDetector(floor_seconds=floor_seconds, start_seconds_max=start_seconds_max)
        )
        self._stragglers = StragglerFinder(0)
        self._generation = 0
        self._suspicions = 0
        self._stacks: dict[int, StacksDumped] = {}

    def pulse(self, event: RankPulse) -> Cause | None:
        """Take in how a rank is; the cause to end the generation for, if there is one."""
        rank = self._rank_of(event.agent, event.generation)
        if rank is None:
            return None
        if event.generation != self._generation:
            self._begin(event.generation)
        self._find_straggler(rank, event)
        return self._carry_out(self._detector.pulse(rank, event)) if self._detector else None

    def look(self) -> None:
        """Time has passed; to be called every second."""
        if self._detector and self._rendezvous.phase is Phase.RUNNING:
            self._carry_out(self._detector.look(time.monotonic()))

    def waits(self) -> dict[int, float]:
        """By rank, the part of the last two minutes in which all others waited for it alone."""
        return self._stragglers.waits()

    def rank_ended(self, agent: str, generation: int) -> None:
        rank = self._rank_of(agent, generation)
        if self._detector and rank is not None:
            self._detector.ended(rank)

    def stacks(self, event: StacksDumped) -> None:
        rank = self._rank_of(event.agent, event.generation)
        if rank is None:
            return
        self._stacks[rank] = event
        if self._detector:
            self._detector.stacks(rank, event.in_collective)
        self._ledger.append(
            "stacks",
            generation=event.generation,
            rank=rank,
            file=event.file,
            where=event.where,
            in_collective=event.in_collective,
            problem=event.problem or None,
        )

    def _begin(self, generation: int) -> None:
        world_size = len(self._rendezvous.members)
        self._generation, self._suspicions, self._stacks = generation, 0, {}
        self._stragglers = StragglerFinder(world_size)
        if self._detector:
            self._detector.generation_started(world_size)

    def _carry_out(self, decisions: list[Decision]) -> Cause | None:
        for decision in decisions:
            match decision:
                case Suspect():
                    self._suspect(decision)
                case Cleared():
                    self._ledger.append("cleared", generation=self._generation, quiet_seconds=decision.quiet_seconds)
                case Silent():
                    self._silent(decision)
                case Hung():
                    return self._cause(decision)
        return None

    def _suspect(self, decision: Suspect) -> None:
        self._ledger.append(
            "suspected",
            generation=self._generation,
            ranks=decision.ranks,
            quiet_seconds=decision.quiet_seconds,
            limit_seconds=decision.limit_seconds,
        )
        name = f"hang-{self._suspicions % _DUMPS_KEPT}"
        self._suspicions += 1
        self._stacks = {}
        self._post_to_agents(DumpStacks(generation=self._generation, name=name))

    def _cause(self, hung: Hung) -> Cause:
        logger.warning(
            "lastgood: rank %s hangs (%s): nothing moved for %.1f s, the limit is %.1f s",
            ", ".join(map(str, hung.ranks)),
            hung.evidence,
            hung.quiet_seconds,
            hung.limit_seconds,
        )
        return Cause(
            rank=hung.rank,
            kind="hang",
            exit_code=None,
            at=time.time() - hung.quiet_seconds,
            detail={
                "ranks": list(hung.ranks),
                "evidence": hung.evidence,
                "quiet_seconds": hung.quiet_seconds,
                "limit_seconds": hung.limit_seconds,
                "where": {str(rank): dumped.where for rank, dumped in sorted(self._stacks.items())},
                "stacks": {str(rank): dumped.file for rank, dumped in sorted(self._stacks.items()) if dumped.file},
            },
        )

    def _silent(self, decision: Silent) -> None:
        """Its keeper can end a stopped agent, which Ray would go on waiting for; a lost node is noticed by Ray."""
        joined = self._rendezvous.members[decision.rank].joined
        logger.warning("lastgood: nothing was heard of rank %d's agent for %.0f s", decision.rank, decision.seconds)
        self._ledger.append(
            "silent",
            generation=self._generation,
            rank=decision.rank,
            pid=joined.pid,
            node=joined.node,
            seconds=decision.seconds,
        )
        self._post_to_node(joined.node, KillAgent(pid=joined.pid, start_ticks=joined.start_ticks))

    def _find_straggler(self, rank: int, event: RankPulse) -> None:
        found = self._stragglers.pulse(rank, event)
        if found is None:
            return
        joined = self._rendezvous.members[found.rank].joined
        logger.warning(
            "lastgood: rank %d on node %s is slow: the others wait for it %.0f%% of the time",
            found.rank,
            joined.node,
            100 * found.cost_fraction,
        )
        self._ledger.append(
            "straggler",
            generation=self._generation,
            rank=found.rank,
            node=joined.node,
            cost_fraction=found.cost_fraction,
            cost_seconds_per_step=found.cost_fraction * statistics.fmean(event.step_seconds or [0.0]),
        )
        self._on_suspect_health()

    def _rank_of(self, agent: str, generation: int) -> int | None:
        """The rank of an agent in the running generation; None if that is another one."""
        if self._rendezvous.phase is not Phase.RUNNING or generation != self._rendezvous.generation:
            return None
        return next((r for r, member in self._rendezvous.members.items() if member.joined.agent == agent), None)
