"""The keepers of a run: one on each node that has agents.

A generation starts only when all of them are there, and a failed one is judged only when all have taken in what its
dead ranks had still told them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.decide.lineage import MemorySet
from workers.keeper_messages import KeeperJoined
from workers.messages import Command

_WANTED_SECONDS = 10.0
_GENERATIONS_KEPT = 8


class KeeperRoster:
    """`nodes()` names the nodes that have agents now; `post(keeper, command)` sends a command."""

    def __init__(self, nodes: Callable[[], Iterable[str]], post: Callable[[str, Command], None]) -> None:
        self._nodes = nodes
        self._post = post
        self._keepers: dict[str, KeeperJoined] = {}
        self._undrained: set[str] = set()
        self._places: dict[int, dict[int, str]] = {}
        self._nodes_changed = asyncio.Event()

    def joined(self, event: KeeperJoined) -> bool:
        """Whether it replaces another process on its node."""
        known = self._keepers.get(event.node)
        self._keepers[event.node] = event
        return known is not None and known.pid != event.pid

    def node_lost(self, node: str) -> list[tuple[int, list[int]]]:
        """Forget the keeper of a node that is gone; returns, by generation, the ranks whose snapshots it held."""
        self._keepers.pop(node, None)
        found = ((number, [r for r, at in places.items() if at == node]) for number, places in self._places.items())
        return [(number, ranks) for number, ranks in found if ranks]

    def nodes_changed(self) -> None:
        self._nodes_changed.set()

    async def wanted(self, have: Sequence[str]) -> list[str]:
        """The nodes that need a keeper and are not in `have`; waits a while for there to be some."""
        deadline = time.monotonic() + _WANTED_SECONDS
        while True:
            wanted = sorted(set(self._nodes()) - set(have))
            remaining = deadline - time.monotonic()
            if wanted or remaining <= 0:
                return wanted
            self._nodes_changed.clear()
            try:
                await asyncio.wait_for(self._nodes_changed.wait(), remaining)
            except TimeoutError:
                continue

    def complete(self) -> bool:
        return all(node in self._keepers for node in self._nodes())

    def at(self, node: str) -> str | None:
        """The keeper of that node, if there is one."""
        return self._keepers[node].keeper if node in self._keepers else None

    def all(self) -> list[KeeperJoined]:
        return [keeper for _, keeper in sorted(self._keepers.items())]

    def post_all(self, command: Command) -> None:
        for keeper in self._keepers.values():
            self._post(keeper.keeper, command)

    def placed(self, generation: int, places: Mapping[int, str]) -> None:
        """Rank -> node of a generation that starts; its snapshots stay there when the next one is placed elsewhere."""
        self._places[generation] = dict(places)
        for old in sorted(self._places)[:-_GENERATIONS_KEPT]:
            del self._places[old]

    def places(self, generation: int) -> Mapping[int, str]:
        """The nodes of that generation's ranks; nothing if they are not known (any more)."""
        return self._places.get(generation, {})

    def held_at(self, generation: int) -> dict[int, str]:
        """Rank -> the keeper that has its snapshots of that generation, as far as they are known."""
        return {
            rank: self._keepers[node].keeper for rank, node in self.places(generation).items() if node in self._keepers
        }

    def moved(self, memory: MemorySet) -> None:
        """Those of that set are where it says now: some as copies, in the place of what a lost node had."""
        nodes = {keeper.keeper: node for node, keeper in self._keepers.items()}
        self.placed(memory.generation, {rank: nodes[keeper] for rank, keeper in memory.where.items()})

    def post(self, keeper: str, command: Command) -> None:
        """To the keeper of that name."""
        self._post(keeper, command)

    def post_to_node(self, node: str, command: Command) -> None:
        if node in self._keepers:
            self._post(self._keepers[node].keeper, command)

    # A generation's end

    def await_drained(self) -> None:
        self._undrained = {keeper.keeper for keeper in self._keepers.values()}

    def drained(self, keeper: str | None) -> bool:
        """Note that this keeper (None: all of them, for their time is up) has drained; whether it was the last one."""
        if keeper is None:  # also where no keeper was known when it began, as after the coordinator's restart
            self._undrained = set()
            return True
        before = bool(self._undrained)
        self._undrained = self._undrained - {keeper}
        return before and not self._undrained
