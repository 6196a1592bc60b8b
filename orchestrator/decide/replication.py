"""Which sets of snapshots are copied to peers, and when. Events in, orders out; no clock, no network.

Invariants:
- Only a set that is complete on all ranks is copied: a copy of anything else would be of no use, and would replace one
  that is.
- One set at a time; then the newest complete one is next, and those in between are never copied. So a slow network
  makes copies older, and queues nothing up.
- Until all of a newer set is copied, the one before stays: with the ranks' own keepers, and with those that keep its
  copies. Losing one node at any moment leaves one of the two whole.

Faults survived: a copy that fails, or a node that is lost on the way (the set is given up for the next one).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orchestrator.decide.ring import ring
from orchestrator.decide.save import Key

NONE: Key = (0, 0)
"""Older than every set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The keeper of `node` sends the shards of `ranks` to the one of `to`, which keeps those of the set `keep` too."""

    key: Key
    node: str
    to: str
    ranks: tuple[int, ...]
    keep: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """All of this set is copied, or nothing is copied any more: what is older need not be kept."""

    key: Key
    ranks: int


@dataclass(slots=True)
class _Set:
    key: Key
    places: Mapping[int, str]
    missing: set[int] = field(default_factory=set)
    route: Mapping[str, str] = field(default_factory=dict)


class Replication:
    """`replicated`: the newest set that is copied for all ranks; `NONE` if there is none."""

    def __init__(self, *, replicated: Key = NONE) -> None:
        self.replicated = replicated
        self._outdated = False  # a keeper that had some of its copies is gone
        self._interrupted: Key = NONE  # was on its way when its generation ended
        self._in_flight: _Set | None = None
        self._waiting: tuple[_Set, frozenset[str]] | None = None

    @property
    def wanted(self) -> frozenset[Key]:
        """The sets whose memory should not be used for other things yet if that can be helped."""
        in_flight = self._in_flight.key if self._in_flight is not None else NONE
        return frozenset({self.replicated, self._interrupted, in_flight} - {NONE})

    def complete(self, key: Key, places: Mapping[int, str], nodes: Collection[str]) -> list[Copy | Keep]:
        """All ranks have this set in memory, each on its node of `places`; `nodes` can send and keep copies."""
        copied = key < self.replicated or (key == self.replicated and not self._outdated)
        if copied or (self._in_flight is not None and key <= self._in_flight.key):
            return []
        self._waiting = _Set(key, dict(places)), frozenset(nodes)
        return self._next()

    def copied(self, rank: int, key: Key) -> list[Copy | Keep]:
        """The copy of this rank's shard is where it should be."""
        current = self._in_flight
        if current is None or current.key != key:
            return []
        current.missing.discard(rank)
        if current.missing:
            return []
        self._in_flight, self.replicated = None, key
        self._outdated, self._interrupted = False, NONE
        return [Keep(key=key, ranks=len(current.places)), *self._next()]

    def failed(self, key: Key) -> list[Copy | Keep]:
        """Some shard of it could not be copied."""
        if self._in_flight is None or self._in_flight.key != key:
            return []
        self._in_flight = None
        return self._next()

    def keeper_lost(self, node: str) -> list[Copy | Keep]:
        """The keeper of this node is gone, with all that it held. What it had copies of is copied anew."""
        self._outdated = True
        if self._waiting is not None and node in self._waiting[0].places.values():
            self._waiting = None
        if self._in_flight is not None and node in {*self._in_flight.route, *self._in_flight.route.values()}:
            return self.failed(self._in_flight.key)
        return []

    def generation_ended(self) -> None:
        """What is on its way does not arrive any more; but enough of it may be there."""
        if self._in_flight is not None:
            self._interrupted = self._in_flight.key
        self._in_flight = self._waiting = None

    def generation_started(self, restored: Key) -> None:
        """From this state: what was reached after it is worth nothing."""
        self.generation_ended()
        if self.replicated > restored:
            self.replicated = NONE
        if self._interrupted > restored:
            self._interrupted = NONE
        self._outdated = True  # ranks, and with them copies, may be elsewhere

    def drop(self, generation: int, step: int | None = None) -> None:
        """This set, or all of that generation, is not to be used."""

        def dropped(key: Key) -> bool:
            return key[0] == generation and step in (None, key[1])

        self.replicated = NONE if dropped(self.replicated) else self.replicated
        self._interrupted = NONE if dropped(self._interrupted) else self._interrupted
        if self._in_flight is not None and dropped(self._in_flight.key):
            self._in_flight = None
        if self._waiting is not None and dropped(self._waiting[0].key):
            self._waiting = None

    def _next(self) -> list[Copy | Keep]:
        if self._in_flight is not None or self._waiting is None:
            return []
        (following, nodes), self._waiting = self._waiting, None
        following.route = ring(set(following.places.values()) & nodes)
        if not following.route or not set(following.places.values()) <= nodes:
            # With one node there is nothing to copy to, and what was copied when there were more is of no use.
            before = self.wanted
            self.replicated = self._interrupted = NONE
            return [Keep(key=following.key, ranks=0)] if before else []
        following.missing = set(following.places)
        self._in_flight = following
        return [
            Copy(
                key=following.key,
                node=node,
                to=to,
                ranks=tuple(sorted(rank for rank, at in following.places.items() if at == node)),
                keep=self.replicated,
            )
            for node, to in sorted(following.route.items())
        ]
