"""Looking at many states: recordings, the states that they may leave, and the judge, put together as tasks.

A task is a function of its arguments alone, so that it can run in any process, and gives the same in each.
"""

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.crash_states.check import Judge, Verdict, check
from chaos.crash_states.enumerate import State, Tree, all_states, digest_of, draw, visible
from chaos.crash_states.model import Situation, situations
from chaos.crash_states.mutants import Mutant, mutants
from chaos.crash_states.ops import Leftover, Mark, Op, Rename, describe
from chaos.crash_states.promises import Promise, promises
from chaos.crash_states.scenario import TINY_BYTES, Order, Plan, Recording, record
from workers.checkpoint.manifest import MANIFEST_FILE
from workers.checkpoint.store import LocalStore

DRAWS = 500
"""States drawn from one recording."""
_ON_DISK = 2
"""Of these, how many are also laid out on a real file system."""
_EXAMPLES_MAX = 5
_LARGE_BYTES = (8 << 10, 64 << 10, 192 << 10)
_MUTANT_DRAWS = 24
_MEMORY = Path("/dev/shm")


@dataclass(slots=True, kw_only=True)
class Tally:
    """states: digests of those that were judged. checks: how often a state was judged, as one may be reached with
    different promises. classes: digests of what readers look at in them. recordings: of runs. on_disk: states that
    were judged on a real file system too."""

    states: set[bytes] = field(default_factory=set)
    classes: set[bytes] = field(default_factory=set)
    checks: int = 0
    recordings: int = 0
    on_disk: int = 0
    violations: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Both together."""
        self.states |= other.states
        self.classes |= other.classes
        self.checks += other.checks
        self.recordings += other.recordings
        self.on_disk += other.on_disk
        self.violations += other.violations
        self.examples = (self.examples + other.examples)[:_EXAMPLES_MAX]

    def violated(self, guarantee: str, detail: str, plan: Any, when: str) -> None:
        """Count it, and keep the first ones. `plan`: the dataclass that says what was done."""
        self.violations += 1
        if len(self.examples) < _EXAMPLES_MAX:
            self.examples.append({"guarantee": guarantee, "detail": detail, "plan": asdict(plan), "when": when})


def small_plans(seed: int, ranks: int, drawn: int) -> list[Plan]:
    """Runs with tiny shards, of which all states are looked at: in fixed orders and in `drawn` drawn ones."""
    # With more saves there are more states, but of no new kind; of three ranks there are too many as it is.
    plain = Plan(
        seed=seed, ranks=ranks, shard_bytes=64, saves=(3 if ranks < 3 else 2, 0), keep_last=2 if ranks < 3 else 1
    )
    return [
        replace(plain, order="one by one"),
        replace(plain, order="in step"),
        *(replace(plain, seed=seed + at) for at in range(drawn)),
        *([replace(plain, back=True), replace(plain, keep_last=1)] if ranks < 3 else []),
    ]


def large_plan(seed: int) -> Plan:
    """A larger run, drawn."""
    rng = random.Random(seed)
    return Plan(
        seed=seed,
        ranks=rng.choice((2, 3, 4)),
        saves=(rng.choice((2, 3, 4)), rng.choice((0, 1, 2))),
        shard_bytes=rng.choice(_LARGE_BYTES),
        keep_last=rng.choice((1, 2)),
        order=rng.choice(("drawn", "drawn", "in step")),
        beside=rng.random() < 0.5,
        back=rng.random() < 0.25,
        killed_after=rng.randrange(200) if rng.random() < 0.5 else None,
    )


def look_at_all(plans: Sequence[Plan], part: int, parts: int) -> Tally:
    """Judge all states of these runs that fall to this part."""
    tally, judged = Tally(recordings=len(plans)), set()
    for plan in plans:
        recording = record(plan, scratch=scratch())
        known, judge, owed = set(), Judge(recording), promises(recording.ops)
        for situation, promise in zip(situations(recording.ops), owed, strict=True):
            if (situation.key, promise) in known:
                continue
            known.add((situation.key, promise))
            for state in all_states(situation):
                key = (state.digest, promise)
                if state.digest[0] % parts == part and key not in judged:
                    judged.add(key)
                    judge_state(tally, plan, _when(situation), state, judge.check(state.tree, promise))
    return tally


def look_at_some(seed: int, draws: int = DRAWS) -> Tally:
    """Judge states that are drawn from one larger run."""
    plan = large_plan(seed)
    recording = record(plan, scratch=scratch())
    tally, judged = Tally(recordings=1), set()
    judge, owed = Judge(recording), promises(recording.ops)
    for situation, at, state in _drawn(recording, random.Random(seed), draws):
        promise = owed[at]
        if (state.digest, promise) in judged:
            continue
        judged.add((state.digest, promise))
        verdict = judge.check(state.tree, promise)
        judge_state(tally, plan, _when(situation), state, verdict)
        if tally.on_disk < _ON_DISK:
            tally.on_disk += 1
            on_disk = _check_on_disk(state.tree, recording, promise)
            if on_disk != verdict:
                told = f"in memory it comes to {verdict}, on disk to {on_disk}"
                tally.violated("the same on disk", told, plan, _when(situation))
    return tally


def look_at_mutant(index: int, seed: int) -> dict[str, Any]:
    """Look for a state in which this mutant breaks a guarantee; the first one is enough."""
    mutant = mutants()[index]
    looked = 0
    for plan in _plans_of(mutant, seed):
        recording = record(plan, mutant.driver, scratch=scratch())
        judge, owed = Judge(recording), promises(recording.ops)
        rng, judged = random.Random(seed), set()
        for situation, promise in zip(situations(recording.ops), owed, strict=True):
            if plan.killed_after is not None and situation.operations < plan.killed_after:
                continue  # as it was with a later kill
            for _ in range(_MUTANT_DRAWS):
                state = draw(situation, rng)
                if (state.digest, promise) in judged:
                    continue
                judged.add((state.digest, promise))
                looked += 1
                tally = Tally()
                judge_state(tally, plan, _when(situation), state, judge.check(state.tree, promise))
                if tally.examples:
                    return caught(mutant.name, looked, tally.examples[0])
    return caught(mutant.name, looked, None)


def scratch() -> Path | None:
    """Where to record: what is recorded is what was asked for, so a file system in memory is as good, and faster."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def lay_out(tree: Tree, folder: Path) -> None:
    """Write a state to a real directory."""
    for name, child in tree.items():
        if isinstance(child, bytes):
            (folder / name).write_bytes(child)
        else:
            (folder / name).mkdir()
            lay_out(child, folder / name)


def _plans_of(mutant: Mutant, seed: int) -> Iterable[Plan]:
    facts = dict(mutant.plan)
    killed = facts.pop("killed_in_commit", False)
    orders: tuple[Order, ...] = ("in step", "drawn", "one by one")
    for order in orders:
        plan = Plan(seed=seed, ranks=2, order=order, shard_bytes=TINY_BYTES, **facts)
        kills: Iterable[int | None] = kills_in_commit(record(plan, scratch=scratch())) if killed else (None,)
        for after in kills:
            yield replace(plan, killed_after=after)


def kills_in_commit(recording: Recording[Op]) -> Iterable[int]:
    """Kills around the moment when the manifest gets its name. A plan counts calls, of which some record nothing."""
    calls = 0
    for op in recording.ops:
        calls += not isinstance(op, Mark | Leftover)
        if isinstance(op, Rename) and op.target == MANIFEST_FILE:
            break
    return range(calls, calls + 6)


def _drawn(recording: Recording[Op], rng: random.Random, draws: int) -> Iterator[tuple[Situation, int, State]]:
    found = list(situations(recording.ops))
    # Where more is not durable there are more states.
    weights = [
        1 + 2 * sum(map(len, one.parts.values())) ** 0.5 + sum(not isinstance(op, Leftover) for op in one.name_ops)
        for one in found
    ]
    for at in rng.choices(range(len(found)), weights, k=draws):
        yield found[at], at, draw(found[at], rng)


def judge_state(tally: Tally, plan: Plan, when: str, state: State, verdict: Verdict) -> None:
    """Count it, and what is wrong with it."""
    tally.checks += 1
    tally.states.add(state.digest)
    tally.classes.add(digest_of(visible(state.tree)))
    for violation in verdict.violations:
        tally.violated(violation.guarantee, violation.detail, plan, when)


def caught(name: str, looked: int, example: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is reported of a mutant: `example` is the violation that it was caught by, if it was."""
    if example is None:
        return {"name": name, "caught": False, "states": looked, "guarantee": "", "detail": "", "when": ""}
    return {
        "name": name,
        "caught": True,
        "states": looked,
        "guarantee": example["guarantee"],
        "detail": example["detail"],
        "when": example["when"],
    }


def power_went(operations: int, last: str) -> str:
    """When, for people."""
    return f"the power went after operation {operations}, {last}"


def _when(situation: Situation) -> str:
    return power_went(situation.operations, describe(situation.last) if situation.last is not None else "")


def _check_on_disk(tree: Tree, recording: Recording[Op], promise: Promise) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="lastgood-crash-state-") as folder:
        lay_out(tree, Path(folder))
        return check(tree, recording, promise, LocalStore(Path(folder)))
