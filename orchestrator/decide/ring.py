"""Which node keeps copies of whose snapshots. Pure.

Invariants: each node keeps copies for one other at most, and never for itself, so that losing one node loses no
shard; the same nodes give the same ring, whatever order they are named in; a node that comes or goes changes only who
keeps for its neighbour.
"""

from collections.abc import Iterable, Mapping


def ring(nodes: Iterable[str]) -> Mapping[str, str]:
    """Node -> the node that keeps copies of its snapshots; nothing for fewer than two nodes."""
    ordered = sorted(set(nodes))
    if len(ordered) < 2:
        return {}
    return dict(zip(ordered, [*ordered[1:], ordered[0]], strict=True))
