"""What is known of an agent that is gone and can't be asked: when it was last heard, what its rank used, what Ray says.

Ray replaces all agents when one is lost, so most of those that are gone did nothing wrong: the ones that Ray names
come first, and of those that were killed for lack of memory, the one whose rank used most. An agent's loss is as old
as the last word from it, not as the news: its peers' collective errors, which follow from it, are told much sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.memory_watch import MemorySeen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """Why Ray lost a worker: a cause's kind, and Ray's own words."""

    kind: Literal["agent_lost", "oom"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A lost agent's cause; `at`: Unix time."""

    agent: str
    kind: str
    at: float
    detail: dict[str, Any]


@dataclass(slots=True)
class Losses:
    """Of one group of agents."""

    _memory: dict[str, MemorySeen] = field(default_factory=dict)
    _told: dict[str, WorkerLoss] = field(default_factory=dict)

    def uses_memory(self, agent: str, memory: MemorySeen) -> None:
        self._memory[agent] = memory

    def lost(self, agent: str, loss: WorkerLoss) -> None:
        """Ray names this agent; its first words about it count."""
        self._told.setdefault(agent, loss)

    def explain(self, heard_at: Mapping[str, float]) -> list[Explained]:
        """Why these agents are gone, the likeliest first cause first. `heard_at`: when each was last heard."""
        named_at = min((at for agent, at in heard_at.items() if agent in self._told), default=0.0)
        # Those that Ray names died together; it killed the others afterwards.
        explained = [
            self._explain(agent, named_at if agent in self._told else max(at, named_at))
            for agent, at in heard_at.items()
        ]
        return sorted(explained, key=lambda one: (one.at, one.agent not in self._told, -self._bytes(one.agent)))

    def _bytes(self, agent: str) -> int:
        memory = self._memory.get(agent)
        return memory.group_rss_bytes if memory else 0

    def _explain(self, agent: str, at: float) -> Explained:
        loss, memory = self._told.get(agent), self._memory.get(agent)
        detail: dict[str, Any] = {"memory": memory.to_json()} if memory else {}
        if loss is not None:
            detail |= {"ray": loss.message} | ({"killer": "ray"} if loss.kind == "oom" else {})
        return Explained(agent=agent, kind=loss.kind if loss else "agent_lost", at=at, detail=detail)
