"""The members of the run: which rank an agent is, where it runs, and how to reach it and the keepers."""

from dataclasses import dataclass
from typing import Any

from orchestrator.decide.rendezvous import Rendezvous
from orchestrator.mailbox import Mailboxes
from orchestrator.roster import KeeperRoster
from workers.keeper_messages import PersistOrder
from workers.messages import Command


@dataclass(slots=True, kw_only=True)
class Crew:
    """Looks into the rendezvous and the roster; changes neither."""

    rendezvous: Rendezvous
    mail: Mailboxes
    keepers: KeeperRoster

    def rank_of(self, agent: str) -> int | None:
        return next((r for r, member in self.rendezvous.members.items() if member.joined.agent == agent), None)

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, member in self.rendezvous.members.items() if member.joined.node == node]

    def nodes_in_use(self) -> set[str]:
        """Where agents or keepers run."""
        return nodes_of(self.rendezvous) | {keeper.node for keeper in self.keepers.all()}

    def post_to_agents(self, command: Command) -> None:
        for member in self.rendezvous.members.values():
            self.mail.post(member.joined.agent, command)

    def post_to_rank_keeper(self, rank: int, command: PersistOrder) -> None:
        """To the keeper that holds this rank's snapshots of the generation."""
        member = self.rendezvous.members.get(rank)
        node = self.keepers.places(command.generation).get(rank) or (member.joined.node if member else None)
        if node is not None:
            self.keepers.post_to_node(node, command)

    def status(self) -> dict[str, Any]:
        """For `SupervisedTrainer.status()`: what runs where, and how far it is."""
        members = dict(self.rendezvous.members)  # also looked at from other threads
        return {
            "state": self.rendezvous.phase.value,
            "generation": self.rendezvous.generation,
            "step": max((member.step for member in members.values()), default=-1),
            "ranks": [
                {
                    "rank": rank,
                    "pid": member.process.pid if member.process else None,
                    "agent_pid": member.joined.pid,
                    "node_id": member.joined.node,
                    "step": member.step,
                    "heard_at": member.heard_at,
                }
                for rank, member in sorted(members.items())
            ],
            "keepers": [{"node_id": keeper.node, "pid": keeper.pid} for keeper in self.keepers.all()],
        }


def nodes_of(rendezvous: Rendezvous) -> set[str]:
    """The nodes that agents run on."""
    return {member.joined.node for member in rendezvous.members.values()}
