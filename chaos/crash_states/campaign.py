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

from chaos.crash_states import search
from chaos.crash_states.check import GUARANTEES
from chaos.crash_states.mutants import mutants
from chaos.crash_states.peers import PEERS, look_at_peer
from chaos.crash_states.search import Tally
from chaos.verdict import Outcome, Verdict

OBJECT_STORE = (
    "lastgood has no store on object storage yet, so there are no operations to record; only local and shared POSIX "
    "file systems are modelled"
)
_DRAWN_ORDERS = {2: 8, 3: 2}
"""Runs whose ranks interleave as drawn, by the number of ranks, beside those in fixed orders."""
_PARTS = 8
_AHEAD = 2

Told = Callable[[int], None]
"""Hears how many states more were judged."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """small: by number of ranks, all states of small runs. drawn: from larger runs. mutants: see
    search.look_at_mutant. peers: see peers.look_at_peer.
    """

    seed: int
    small: dict[int, Tally] = field(default_factory=dict)
    drawn: Tally = field(default_factory=Tally)
    mutants: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> Tally:
        """All states but those of mutants."""
        total = Tally()
        for tally in (*self.small.values(), self.drawn):
            total.add(tally)
        return total


def search_all(
    *, seed: int, states: int, jobs: int, small: bool = True, peers: bool = False, told: Told = lambda states: None
) -> Findings:
    """Judge at least `states` different states. `small`: with all those of small runs among them. `peers`: look at
    what others do, too."""
    found = Findings(seed=seed)
    with _pool(jobs) as submit:
        for ranks, orders in _DRAWN_ORDERS.items() if small else ():
            plans = search.small_plans(seed, ranks, orders)
            parts = [submit(search.look_at_all, plans, part, _PARTS) for part in range(_PARTS)]
            found.small[ranks] = _gather(parts, told)
            found.small[ranks].recordings = len(plans)
        tried = [submit(search.look_at_mutant, index, seed) for index in range(len(mutants()))]
        others = [submit(look_at_peer, name, seed) for name in PEERS if peers]
        seen = {state for tally in found.small.values() for state in tally.states}
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
    """One for lastgood, one for each mutant, and what could not be done."""
    total = found.total
    replay = f"lastgood chaos crash-states --seed {found.seed} --states {len(total.states)}"
    first = total.examples[0] if total.examples else None
    results = [
        Verdict(
            name="states after a power loss",
            outcome=Outcome.BROKEN if first else Outcome.HELD,
            detail=_told(first) if first else f"{len(total.states)} states, no violation",
            replay=replay,
        ),
        Verdict(name="object storage", outcome=Outcome.SKIPPED, detail=OBJECT_STORE),
    ]
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
        "object_store": {"skipped": OBJECT_STORE},
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


def _told(example: dict[str, Any]) -> str:
    guarantee = GUARANTEES.get(example["guarantee"], "")
    return (
        f"{example['guarantee']} ({guarantee}): {example['detail']}; the power went after operation "
        f"{example['operations']}, {example['last']}, of the run {example['plan']}"
    )


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
