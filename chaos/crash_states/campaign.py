"""The whole check: all states of small runs, states drawn from larger ones, the mutants, and the peers, on several
processes. What is looked at depends on the seed alone, not on how many processes there are.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from chaos.crash_states import object_search, rival_search, search
from chaos.crash_states.check import GUARANTEES
from chaos.crash_states.mutants import mutants
from chaos.crash_states.object_mutants import object_mutants
from chaos.crash_states.peers import PEERS, look_at_peer
from chaos.crash_states.rival_mutants import rival_mutants
from chaos.crash_states.search import Tally
from chaos.verdict import Outcome, Verdict

_DRAWN_ORDERS = {2: 8, 3: 2}
"""Runs whose ranks interleave as drawn, by the number of ranks, beside those in fixed orders."""
_PARTS = 8
_AHEAD = 2

Told = Callable[[int], None]
"""Hears how many states more were judged."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """wanted: how many states were asked for. small: by number of ranks, all states of small runs. drawn: from larger
    runs. objects: of runs on object storage. rivals: of two drivers at once, there. mutants: see
    search.look_at_mutant. peers: see peers.look_at_peer.
    """

    seed: int
    wanted: int = 0
    small: dict[int, Tally] = field(default_factory=dict)
    drawn: Tally = field(default_factory=Tally)
    objects: Tally = field(default_factory=Tally)
    rivals: Tally = field(default_factory=Tally)
    mutants: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def on_files(self) -> Tally:
        """All states of file systems but those of mutants."""
        return _together(*self.small.values(), self.drawn)

    @property
    def total(self) -> Tally:
        """Those of object storage too."""
        return _together(self.on_files, self.objects, self.rivals)


def search_all(
    *, seed: int, states: int, jobs: int, small: bool = True, peers: bool = False, told: Told = lambda states: None
) -> Findings:
    """Judge at least `states` different states. `small`: with all those of small runs among them. `peers`: look at
    what others do, too."""
    found = Findings(seed=seed, wanted=states)
    with _pool(jobs) as submit:
        for ranks, orders in _DRAWN_ORDERS.items() if small else ():
            plans = search.small_plans(seed, ranks, orders)
            parts = [submit(search.look_at_all, plans, part, _PARTS) for part in range(_PARTS)]
            found.small[ranks] = _gather(parts, told)
            found.small[ranks].recordings = len(plans)
        plans = object_search.object_plans(seed) if small else []
        on_objects = [
            submit(object_search.look_at_objects, plan, part, _PARTS) for plan in plans for part in range(_PARTS)
        ]
        found.objects = _gather(on_objects, told)
        rivals = [submit(rival_search.look_at_rivals, seed, part, _PARTS) for part in range(_PARTS) if small]
        found.rivals = _gather(rivals, told)
        tried = [submit(search.look_at_mutant, index, seed) for index in range(len(mutants()))]
        tried += [submit(object_search.look_at_object_mutant, index, seed) for index in range(len(object_mutants()))]
        tried += [
            submit(rival_search.look_at_rival_mutant, index, seed) for index in range(len(rival_mutants())) if small
        ]
        others = [submit(look_at_peer, name, seed) for name in PEERS if peers]
        seen = set(found.total.states)
        drawing: list[Future[Tally]] = []
        number = 0
        while len(seen) < states or len(found.drawn.states) < states // 4:
            while len(drawing) < (_AHEAD * jobs if jobs > 1 else 1):
                drawing.append(submit(search.look_at_some, _seed(seed, number)))
                number += 1
            tally = drawing.pop(0).result()
            before = len(seen)
            seen |= tally.states
            told(len(seen) - before)
            found.drawn.add(tally)
        for future in drawing:
            future.cancel()
        found.mutants = [future.result() for future in tried]
        found.peers = [future.result() for future in others]
    return found


def verdicts(found: Findings) -> list[Verdict]:
    """One for each kind of storage, one for each mutant, and what others do."""
    replay = f"lastgood chaos crash-states --seed {found.seed} --states {found.wanted}"
    results = [_verdict("states after a power loss", found.on_files, replay)]
    if found.objects.recordings:
        results.append(_verdict("states of object storage", found.objects, replay))
    if found.rivals.recordings:
        results.append(_verdict("states after two drivers at once", found.rivals, replay))
    for mutant in found.mutants:
        results.append(
            Verdict(
                name=f"mutant: {mutant['name']}",
                outcome=Outcome.HELD if mutant["caught"] else Outcome.BROKEN,
                detail=mutant["detail"] if mutant["caught"] else f"not caught in {mutant['states']} states",
                replay=replay,
                facts=mutant,
            )
        )
    # What others do is a finding, and breaks nothing that lastgood promises.
    for peer in found.peers:
        skipped = bool(peer["skipped"])
        detail = peer["skipped"] or f"{peer['violations']} of {peer['states']} states: {peer['detail']}"
        results.append(
            Verdict(
                name=f"peer: {peer['name']}",
                outcome=Outcome.SKIPPED if skipped else Outcome.HELD,
                detail=detail,
                replay=f"{replay} --peers",
                facts=peer,
            )
        )
    return results


def as_json(found: Findings) -> dict[str, Any]:
    """The report for scripts."""
    total = found.total
    return {
        "seed": found.seed,
        "states": len(total.states),
        "classes": len(total.classes),
        "violations": total.violations,
        "seconds": round(found.seconds, 1),
        "exhaustive": [_tally_json(tally) | {"ranks": ranks} for ranks, tally in sorted(found.small.items())],
        "drawn": _tally_json(found.drawn),
        "examples": total.examples,
        "mutants": found.mutants,
        "object_store": _tally_json(found.objects),
        "two_drivers": _tally_json(found.rivals),
        "peers": found.peers,
        "guarantees": GUARANTEES,
    }


def _tally_json(tally: Tally) -> dict[str, Any]:
    return {
        "recordings": tally.recordings,
        "states": len(tally.states),
        "classes": len(tally.classes),
        "checks": tally.checks,
        "on_disk": tally.on_disk,
        "violations": tally.violations,
    }


def _together(*tallies: Tally) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _verdict(name: str, tally: Tally, replay: str) -> Verdict:
    first = tally.examples[0] if tally.examples else None
    return Verdict(
        name=name,
        outcome=Outcome.BROKEN if first else Outcome.HELD,
        detail=_told(first) if first else f"{len(tally.states)} states, no violation",
        replay=replay,
    )


def _told(example: dict[str, Any]) -> str:
    guarantee = GUARANTEES.get(example["guarantee"], "")
    return f"{example['guarantee']} ({guarantee}): {example['detail']}; {example['when']}, in the run {example['plan']}"


def _gather(parts: list[Future[Tally]], told: Told) -> Tally:
    total = Tally()
    for part in parts:
        tally = part.result()
        told(len(tally.states))
        total.add(tally)
    return total


def _seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


Submit = Callable[..., Future[Any]]


@contextmanager
def _pool(jobs: int) -> Iterator[Submit]:
    """Where to run tasks: here, if `jobs` is 1."""
    if jobs == 1:
        yield _at_once
        return
    context = multiprocessing.get_context("spawn")  # torch and threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        try:
            yield pool.submit
        finally:
            pool.shutdown(cancel_futures=True)


def _at_once(task: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(task(*args))
    return future


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def timed(search_it: Callable[[], Findings]) -> Findings:
    """With how long it took."""
    began = time.monotonic()
    found = search_it()
    found.seconds = time.monotonic() - began
    return found
