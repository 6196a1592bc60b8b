"""Looking at what a power loss may leave of runs on object storage. Tasks, as in search.py.

Few states are possible there, since requests are carried out whole: so all of them are looked at, of runs that are
killed at every request.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chaos.crash_states.check import Judge
from chaos.crash_states.object_mutants import object_mutants
from chaos.crash_states.object_record import bucket_of
from chaos.crash_states.promises import promises
from chaos.crash_states.requests import Event, all_states, describe, moments
from chaos.crash_states.scenario import TINY_BYTES, Order, Plan, Recording, record_requests
from chaos.crash_states.search import Tally, caught, judge_state, power_went

_ORDERS: tuple[Order, ...] = ("in step", "drawn", "one by one")
_COURSES: tuple[tuple[Order, bool, bool], ...] = (
    ("in step", False, False),
    ("drawn", True, True),
    ("drawn", False, True),
    ("one by one", True, False),
)


def object_plans(seed: int) -> list[Plan]:
    """Runs of two and three ranks, in several orders; in some the second driver passes over the newest checkpoint, and
    in some checkpoints are deleted beside the next save."""
    return [
        Plan(seed=seed + at, ranks=ranks, saves=(3, 1), keep_last=1, order=order, back=back, beside=beside)
        for ranks in (2, 3)
        for at, (order, back, beside) in enumerate(_COURSES)
    ]


def look_at_objects(plan: Plan, part: int, parts: int) -> Tally:
    """Judge all states of a run, and of the same run killed at each request that falls to this part."""
    tally = Tally()
    judged: set[object] = set()
    for after in _kills(plan)[part::parts]:
        tally.recordings += 1
        _look_at(record_requests(replace(plan, killed_after=after)), tally, judged)
    return tally


def look_at_object_mutant(index: int, seed: int) -> dict[str, Any]:
    """Look for a state in which this mutant breaks a guarantee; the first one is enough."""
    mutant = object_mutants()[index]
    facts = dict(mutant.plan)
    killed = facts.pop("killed", False)
    looked = 0
    for order in _ORDERS:
        plan = Plan(seed=seed, ranks=2, order=order, shard_bytes=TINY_BYTES, **facts)
        for after in _kills(plan) if killed else (None,):
            tally = Tally()
            _look_at(record_requests(replace(plan, killed_after=after), mutant.driver), tally, set())
            looked += tally.checks
            if tally.examples:
                return caught(mutant.name, looked, tally.examples[0])
    return caught(mutant.name, looked, None)


def _kills(plan: Plan) -> Sequence[int | None]:
    """No kill, and one before and after the sending of each request of the first driver."""
    return [None, *range(record_requests(plan).calls)]


def _look_at(recording: Recording[Event], tally: Tally, judged: set[object]) -> None:
    known, judge, owed = set(), Judge(recording, bucket_of), promises(recording.ops)
    for moment, promise in zip(moments(recording.ops), owed, strict=True):
        if (moment.key, promise) in known:
            continue
        known.add((moment.key, promise))
        for state in all_states(moment):
            if (state.digest, promise) not in judged:
                judged.add((state.digest, promise))
                last = describe(moment.last) if moment.last is not None else ""
                when = power_went(moment.operations, last)
                judge_state(tally, recording.plan, when, state, judge.check(state.tree, promise))
