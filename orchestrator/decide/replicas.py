"""Whether the ranks of a save hold alike what they must, which do not, and what that says of earlier checkpoints.

Each rank says in its shard's document what it holds (workers/state/replicas.py): digests of the tensors that a set of
ranks, its holders, have alike, a window of them each time.

Invariants: compared is only what at least two ranks have said of the same bytes; a rank is called odd only if more than
half of those that were asked agree against it: of two that differ nobody can tell which is right.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYOUT = "names and sizes"
"""Stands for a tensor where ranks differ in which tensors they hold."""

Said = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that `holders` must have alike and do not. `odd`: those that are wrong; empty if nobody can tell.

    `what` names a tensor, or a value such as "lr.optimizer". `start`, `stop`: which bytes of it were compared.
    """

    what: str
    holders: tuple[int, ...]
    odd: tuple[int, ...]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A committed checkpoint and what its ranks had said. `said`: None if that cannot be read."""

    name: str
    generation: int
    said: Said | None


def differences(said: Mapping[int, Said]) -> tuple[Difference, ...]:
    """What the ranks of one save, each with what it said, do not have alike."""
    by_holders: dict[tuple[int, ...], dict[int, Said]] = {}
    for rank, document in said.items():
        for one in document.get("sets", ()):
            by_holders.setdefault(tuple(one["holders"]), {})[rank] = one
    found: list[Difference] = []
    for holders, sets in sorted(by_holders.items()):
        first = next(iter(sets.values()))
        if any(one != first for one in sets.values()):
            found += _differences_within(holders, sets)
    return tuple(found)


def odd_ranks(found: Iterable[Difference]) -> tuple[int, ...]:
    """Every rank that some difference shows to be wrong."""
    return tuple(sorted({rank for difference in found for rank in difference.odd}))


def culprit(found: Sequence[Difference]) -> int:
    """The one rank that accounts for all differences, -1 if there is none."""
    odd = odd_ranks(found)
    return odd[0] if len(odd) == 1 and all(odd[0] in difference.holders for difference in found) else -1


def describe(found: Sequence[Difference], *, tensors_max: int = 3) -> str:
    """The differences as a clause: what differs, and on which ranks."""
    names = list(dict.fromkeys(difference.what for difference in found))
    more = f" and {len(names) - tensors_max} more" if len(names) > tensors_max else ""
    listed = f"{', '.join(names[:tensors_max])}{more} {'differ' if names[1:] else 'differs'}"
    if odd := odd_ranks(found):
        return f"{listed} on {_ranks(odd)} from what the other ranks hold"
    holders = sorted({rank for difference in found for rank in difference.holders})
    return f"{listed} between {_ranks(holders)}, and nobody can tell which is right"


def suspects(
    found: Sequence[Difference], generation: int, checkpoints: Sequence[Compared]
) -> tuple[tuple[str, ...], str | None]:
    """Which of the committed `checkpoints` (all that count, newest first) may hold what was found in `generation`.

    When it began, the generation had all replicas alike. So suspect are its checkpoints back to the one at which the
    same bytes were compared last. The second value: a suspect that must be taken all the same, for want of any other.
    """
    bad: list[str] = []
    for checkpoint in checkpoints:
        if checkpoint.generation < generation:
            return tuple(bad), None
        if checkpoint.generation == generation:
            if _covers(checkpoint.said, found):
                return tuple(bad), None
            bad.append(checkpoint.name)
    return tuple(bad[:-1]), bad[-1] if bad else None


def _covers(said: Said | None, found: Iterable[Difference]) -> bool:
    """Whether all of these were compared then; they were equal, or it would not have been committed."""
    if said is None:
        return False
    facts = {tuple(one["holders"]): _facts(one) for one in said.get("sets", ())}
    return all((each.what, each.start, each.stop) in facts.get(each.holders, {}) for each in found)


def _differences_within(holders: tuple[int, ...], sets: Mapping[int, Said]) -> Iterable[Difference]:
    facts = {rank: _facts(one) for rank, one in sets.items()}
    for key in dict.fromkeys(key for of_rank in facts.values() for key in of_rank):
        votes = {rank: of_rank[key] for rank, of_rank in facts.items() if key in of_rank}
        (most, count), *others = Counter(votes.values()).most_common()
        if others:
            odd = tuple(sorted(rank for rank, vote in votes.items() if vote != most)) if 2 * count > len(votes) else ()
            yield Difference(what=key[0], holders=holders, odd=odd, start=key[1], stop=key[2])


def _facts(one: Said) -> dict[tuple[str, int, int], str]:
    """What a rank says of a set, by what it is about and which bytes of it."""
    digests = {(name, start, stop): digest for name, (start, stop, digest) in one["digests"].items()}
    values = {(name, 0, 0): repr(value) for name, value in one["values"].items()}
    return {(LAYOUT, 0, 0): one["layout"], **values, **digests}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
