"""Where the shards of a set lie in the keepers' memory. Pure.

Invariant: a set can be restored exactly if each rank's shard is with some keeper, its own or one that has a copy.
"""

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.decide.save import Key
from workers.keeper_messages import HeldSnapshot


def places(
    key: Key, world_size: int, holdings: Mapping[str, Sequence[HeldSnapshot]], prefer: Mapping[int, str]
) -> dict[int, str] | None:
    """Rank -> a node whose keeper holds its shard of this set, the preferred one if it does; None if some is nowhere.

    `holdings`: node -> what its keeper holds.
    """
    found: dict[int, str] = {}
    for node, held in sorted(holdings.items()):
        for snapshot in held:
            if (snapshot.generation, snapshot.step) == key and (
                snapshot.rank not in found or prefer.get(snapshot.rank) == node
            ):
                found[snapshot.rank] = node
    return found if found.keys() == set(range(world_size)) else None


def copied_twice(worlds: Mapping[int, int], holdings: Mapping[str, Sequence[HeldSnapshot]]) -> Iterable[Key]:
    """The sets of which each rank's shard is with two keepers, newest first; `worlds`: generation -> its ranks."""
    nodes: dict[Key, dict[int, set[str]]] = {}
    for node, held in holdings.items():
        for snapshot in held:
            by_rank = nodes.setdefault((snapshot.generation, snapshot.step), {})
            by_rank.setdefault(snapshot.rank, set()).add(node)
    return [
        key
        for key, by_rank in sorted(nodes.items(), reverse=True)
        if by_rank.keys() == set(range(worlds.get(key[0], -1))) and all(len(where) > 1 for where in by_rank.values())
    ]
