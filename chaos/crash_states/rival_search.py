"""Looking at what two drivers at once may come to. Tasks, as in search.py.

Two drivers of a hundred requests each go in far too many orders for all of them. Two switches are enough for what is
known to go wrong between two processes: one looks, the other one changes what was seen, the first goes on. So all
orders with one switch are looked at, also those in which a driver ends with a request under way that is carried out
when the other one is done, and those in which an answer is lost; all orders with two switches that are right before or
after a request that changes something; and of the others with two a part that the seed chooses, so that as many seeds
as there are parts look at all of them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, cast

from chaos.crash_states.check import Judge, Violation, damage
from chaos.crash_states.enumerate import digest_of
from chaos.crash_states.object_record import bucket_of
from chaos.crash_states.promises import Promise
from chaos.crash_states.requests import tree_of
from chaos.crash_states.rival_mutants import rival_mutants
from chaos.crash_states.rivals import PLAYS, Play, Played, RivalDriver, Schedule, play
from chaos.crash_states.search import Tally, caught
from orchestrator.archive import GENERATIONS_DIR, QUARANTINE_DIR
from orchestrator.decide.lineage import state_of
from workers.checkpoint.manifest import CHECKPOINTS_DIR
from workers.checkpoint.store import Store
from workers.errors import Fenced, LastgoodError

PARTS_OF_TWO_SWITCHES = 32
_ENOUGH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Of:
    """Schedules of one play: with one switch; with two, next to requests that change something; and the other ones."""

    one: tuple[Schedule, ...]
    near: tuple[Schedule, ...]
    two: tuple[Schedule, ...]


def schedules(seed: int) -> list[Schedule]:
    """Of all plays, those with fewer switches first."""
    found = [_schedules(name) for name in PLAYS]
    two = list(chain.from_iterable(of.two for of in found))
    whole = chain.from_iterable((*of.one, *of.near) for of in found)
    return [*whole, *two[seed % PARTS_OF_TWO_SWITCHES :: PARTS_OF_TWO_SWITCHES]]


def _schedules(name: Play) -> _Of:
    runs = [play(Schedule(play=name, turns=((first, _ENOUGH),))) for first in (0, 1)]
    # Each sends as many as it does after the other one, or before; a few more where answers differ.
    requests = [max(run.requests[driver] for run in runs) + 2 for driver in (0, 1)]
    near = [{at + by for run in runs for at in run.changes[driver] for by in (0, 1)} for driver in (0, 1)]
    one: list[Schedule] = []
    two: list[Schedule] = []
    chosen: list[Schedule] = []
    for first in (0, 1) if name != "both begin" else (0,):  # there they are alike
        one += _with_one_switch(name, first, requests)
        for before, meanwhile in product(range(requests[first]), range(1, requests[1 - first])):
            is_near = before in near[first] and meanwhile in near[1 - first]
            turns = ((first, before), (1 - first, meanwhile), (first, _ENOUGH))
            (chosen if is_near else two).append(Schedule(play=name, turns=turns))
    return _Of(one=tuple(one), near=tuple(chosen), two=tuple(two))


def _with_one_switch(name: Play, first: int, requests: Sequence[int]) -> Iterator[Schedule]:
    for number in range(requests[first]):
        turns = ((first, number), (1 - first, _ENOUGH))
        yield Schedule(play=name, turns=turns)
        yield Schedule(play=name, turns=turns, gone=(first, number))
        for driver in (first, 1 - first):
            yield Schedule(play=name, turns=((driver, _ENOUGH),), twice=(first, number))


def look_at_rivals(seed: int, part: int, parts: int) -> Tally:
    """Judge the schedules that fall to this part."""
    tally = Tally()
    for schedule in schedules(seed)[part::parts]:
        tally.recordings += 1
        _judge_into(tally, play(schedule))
    return tally


def look_at_rival_mutant(index: int, seed: int) -> dict[str, Any]:
    """Look for a schedule in which this mutant breaks a guarantee; the first one is enough."""
    mutant = rival_mutants()[index]
    tally, of = Tally(), _schedules(mutant.plan["play"])
    tried = list(of.near if mutant.plan["switches"] == 2 else of.one)
    random.Random(seed).shuffle(tried)
    for schedule in tried:
        _judge_into(tally, play(schedule, cast(type[RivalDriver], mutant.driver)))
        if tally.examples:
            return caught(mutant.name, tally.checks, tally.examples[0])
    return caught(mutant.name, tally.checks, None)


def violations(played: Played) -> list[Violation]:
    """What is broken at the end, and was on the way."""
    owed = _Owed(played)
    return [*owed.of_drivers(), *owed.of_generations(), *owed.of_checkpoints(), *owed.of_the_next_one()]


class _Owed:
    def __init__(self, played: Played) -> None:
        self._played = played
        self._tree = tree_of(played.objects)
        self._store: Store = bucket_of(self._tree)
        self._created = {int(facts["number"]): facts["parent"] for facts in self._facts("generation created")}
        self._newest = max(self._created)
        self._committed = [str(facts["name"]) for facts in self._facts("committed")]
        self._deletes = [str(facts["name"]) for facts in self._facts("delete begins")]

    def of_drivers(self) -> Iterator[Violation]:
        """A driver stops only because another one has taken over, which then gets through."""
        files = [int(name.partition(".")[0]) for name in self._store.list_dir(GENERATIONS_DIR)]
        for number, error in self._played.errors.items():
            mine = self._played.generations[number]
            may = LastgoodError | OSError if mine else Fenced
            if max(files) <= mine or not isinstance(error, may):
                yield Violation("recovers", f"driver {number} ended with {type(error).__name__}: {error}")
        if len(self._played.errors) == 2:
            yield Violation("recovers", "both drivers stopped because of the other one")

    def of_generations(self) -> Iterator[Violation]:
        """A number is created once, and what was committed before is what a generation begins from."""
        numbers = [int(facts["number"]) for facts in self._facts("generation created")]
        if len(set(numbers)) < len(numbers):
            yield Violation("number used once", f"of the generations {numbers}, created one after the other")
        for name in self._committed if self._played.schedule.play != "passes over the newest" else ():
            state = _state(name)
            for number, parent in self._created.items():
                if number > state[0] and (parent is None or _state(parent) < state):
                    yield Violation("never lost", f"generation {number} begins from {parent}, and {name} was committed")

    def of_checkpoints(self) -> Iterator[Violation]:
        """Nothing goes that anybody relies on, or that was not to be deleted after all."""
        for parent, number in self._played.touched:
            yield Violation("kept", f"a part of {parent} was deleted, and generation {number} relies on it")
        parent = self._created[self._newest]
        refused = {str(facts["name"]) for facts in self._facts("delete refused")}
        dropped = {str(facts["path"]).rpartition("/")[2] for facts in self._facts("drops")}
        kept = {name for name in refused - dropped if self._deletes.count(name) == 1}
        kept |= {parent} if parent is not None and self._newest_commit() is None else set()
        there = self._store.list_dir(CHECKPOINTS_DIR)
        whole = set(there) - {name for name, _ in damage(self._tree, there, self._played.recording)}
        for name in sorted(kept - whole):
            yield Violation("kept", f"{name} was to stay, and is not there, or not whole")
        for name in sorted(whole):
            if f"{QUARANTINE_DIR}/{name}.json" in self._played.objects:
                yield Violation("rightly quarantined", f"{name}, and it is whole")

    def of_the_next_one(self) -> Iterator[Violation]:
        """Whoever begins next finds what was committed."""
        parent, newest = self._created[self._newest], self._newest_commit()
        begun = {str(facts["name"]) for facts in self._facts("commit begins")}
        new = {name for name in begun if _state(name)[0] >= self._newest}
        acceptable = {name for name in new if newest is None or _state(name) >= _state(newest)}
        if newest is None and parent is not None:
            acceptable.add(parent)
        promise = Promise(
            acceptable=frozenset(acceptable),
            fresh=newest is None and parent is None,
            kept=frozenset(set(self._committed) - set(self._deletes)),
            generation=self._newest,
        )
        yield from Judge(self._played.recording, bucket_of).check(self._tree, promise).violations

    def _newest_commit(self) -> str | None:
        """Of those that have returned in the newest generation."""
        return max((name for name in self._committed if _state(name)[0] >= self._newest), key=_state, default=None)

    def _facts(self, kind: str) -> Sequence[Any]:
        return [mark.facts for mark in self._played.marks if mark.kind == kind]


def _judge_into(tally: Tally, played: Played) -> None:
    tally.checks += 1
    tally.states.add(digest_of(tree_of(played.objects)))
    for violation in violations(played):
        tally.violated(violation.guarantee, violation.detail, played.schedule, "two drivers were at work")


def _state(name: str) -> tuple[int, int]:
    found = state_of(name)
    assert found is not None
    return found
