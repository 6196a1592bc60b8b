"""The simulator gives what walking through every save gives, and what exact expressions say."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.simulator.draws import Cost, Draws, most_below
from chaos.simulator.engine import simulate
from chaos.simulator.failures import Exponential, Failure, Failures, failures
from chaos.simulator.job import Intervals, Job, SaveCosts
from chaos.simulator.outcome import Outcome


@dataclass
class Every:
    """A fixed interval. `review_every`: asked again and again, though nothing changes."""

    durable_seconds: float
    memory_seconds: float | None = None
    review_every: float = math.inf
    review_at: float = math.inf
    asked: list[float] = field(default_factory=list)

    def intervals(self, up: float) -> Intervals:
        self.asked.append(up)
        self.review_at = up + self.review_every
        return Intervals(durable_seconds=self.durable_seconds, memory_seconds=self.memory_seconds)

    def saved(self, tier: str, stall_seconds: float, durable_seconds: float, interference_seconds: float) -> None: ...

    def failed(self, failure: Failure, up: float) -> None: ...

    def restarted(self, tier: str, seconds: float) -> None: ...


def fixed(seconds: float) -> Cost:
    return Cost(mean_seconds=seconds)


def costs(
    stall: float, durable: float = 0.0, restart: float = 0.0, interference: float = 0.0, variation: float = 0.0
) -> SaveCosts:
    return SaveCosts(
        stall=Cost(mean_seconds=stall, variation=variation),
        interference=fixed(interference),
        durable=Cost(mean_seconds=durable, variation=variation),
        restart=Cost(mean_seconds=restart, variation=variation),
    )


def exponential(mtbf: float, seed: int, memory_survives: float = 1.0) -> Iterator[Failure]:
    source = Failures(source=Exponential(mtbf_seconds=mtbf), memory_survives=memory_survives)
    return failures([source], seed)


def strikes(*times: float, memory_survives: bool = True) -> Iterator[Failure]:
    return iter([Failure(at, "signal", "process", memory_survives) for at in times])


# ---------------------------------------------------------------- walking through every save


def walk(job: Job, struck: Iterator[Failure], every: Every, seed: int) -> tuple[float, float, float]:
    """Useful, stalled and lost seconds: one save after the other, in the plainest way."""
    rng = np.random.default_rng((seed, 0xC057))
    tiers = {}
    for name, tier in (("durable", job.durable), ("memory", job.memory)):
        if tier is not None:
            tiers[name] = [
                Draws(one.pool(rng).tolist()) for one in (tier.stall, tier.interference, tier.durable, tier.restart)
            ]
    used, restarts = dict.fromkeys(tiers, 0), dict.fromkeys(tiers, 0)
    now = work = lost = stalled = 0.0
    durable: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    failure = next(struck)
    while now < job.horizon_seconds:
        since_durable = since_memory = 0.0
        until = min(failure.at, job.horizon_seconds)
        while now < until:
            to_durable = every.durable_seconds - since_durable
            to_memory = (every.memory_seconds or math.inf) - since_memory
            run = min(to_durable, to_memory)
            if now + run >= until:
                work += until - now
                now = until
                break
            now, work, since_durable, since_memory = now + run, work + run, since_durable + run, since_memory + run
            name = "durable" if to_durable <= to_memory + 1e-9 else "memory"
            stall, interference, delay, _ = tiers[name]
            number = used[name]
            if name == "durable":
                durable.append((now + max(stall[number], delay[number]), work))
                since_durable = 0.0
            if "memory" in tiers:
                of_memory = tiers["memory"]
                index = used["memory"]
                memory.append((now + max(of_memory[0][index], of_memory[2][index]), work))
            since_memory = 0.0
            used[name] += 1
            pause = min(stall[number] + interference[number], until - now)
            stalled += pause
            now += pause
        while failure.at <= now < job.horizon_seconds:
            kept = [one for one in memory if one[0] <= now][-1:] if failure.memory_survives else []
            saved = [one for one in durable if one[0] <= now]
            newest = max((one[1] for one in (*kept, *saved)), default=0.0)
            from_memory = bool(kept) and kept[-1][1] >= newest
            source = "memory" if from_memory else "durable"
            if from_memory and not any(one[1] == newest for one in saved):
                saved.append(
                    (now + max(tiers["durable"][0][used["durable"]], tiers["durable"][2][used["durable"]]), newest)
                )
            durable = saved
            memory = kept if from_memory else []
            lost += work - newest
            work = newest
            restart = tiers[source][3][restarts[source]]
            restarts[source] += 1
            failure = next(struck)
            now = min(now + restart, failure.at, job.horizon_seconds)
    return work, stalled, lost


def check_against_walking(job: Job, every: Every, mtbf: float, seed: int, memory_survives: float = 1.0) -> Outcome:
    found = simulate(job, exponential(mtbf, seed, memory_survives), every, seed)
    useful, stalled, lost = walk(job, exponential(mtbf, seed, memory_survives), every, seed)
    assert found.failures.total() > 20
    assert found.useful_seconds == pytest.approx(useful, rel=1e-9, abs=1e-6)
    assert found.badput_seconds["stall"] + found.badput_seconds["interference"] == pytest.approx(stalled, abs=1e-6)
    assert found.badput_seconds["lost"] == pytest.approx(lost, abs=1e-6)
    return found
