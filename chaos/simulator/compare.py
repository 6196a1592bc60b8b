"""Runs policies on many seeds, in several processes, and gathers what they came to.

All policies meet the same failures: a seed draws them whatever the policy does.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from chaos.simulator.engine import simulate
from chaos.simulator.outcome import Outcome
from chaos.simulator.policies import BEST_FIXED, build, memoryless_best_seconds
from chaos.simulator.scenario import Scenario

_SEARCH_SEEDS_MAX = 20
_SEARCH_FACTORS = ((1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0), (0.7, 1.4), (0.84, 1.19), (0.92, 1.09))
"""Of the best interval so far, at first the best one for memoryless failures of the same mean rate. Finer steps would
change goodput by less than seeds do."""
_CHUNK_SEEDS = 4

Told = Callable[[int], None]
Mapper = Callable[[Iterable[tuple[Scenario, str, tuple[int, ...]]]], Iterable[tuple[Outcome, ...]]]


def run_all(
    scenario: Scenario, policies: Sequence[str], seeds: Sequence[int], *, jobs: int, told: Told
) -> dict[str, tuple[Outcome, ...]]:
    """The outcomes by policy, in the order of the seeds; that of the best fixed interval, which is found by trying, is
    "best-fixed: " and its seconds. `told(n)` is called when n more runs are over."""
    found: dict[str, tuple[Outcome, ...]] = {}
    with _mapper(jobs) as mapped:
        for policy in policies:
            if policy != BEST_FIXED:
                found[policy] = _run(scenario, policy, seeds, mapped, told)
                continue
            best = _find_best_fixed(scenario, seeds, mapped, told)
            found[f"{BEST_FIXED}: {best}"] = _run(scenario, best, seeds, mapped, told)
    return found


def runs(policies: Sequence[str], seeds: int) -> int:
    """How many runs that will be."""
    search = sum(map(len, _SEARCH_FACTORS)) * min(seeds, _SEARCH_SEEDS_MAX)
    return len(policies) * seeds + (search if BEST_FIXED in policies else 0)


def _find_best_fixed(scenario: Scenario, seeds: Sequence[int], mapped: Mapper, told: Told) -> str:
    seeds = seeds[:_SEARCH_SEEDS_MAX]
    best, tried = memoryless_best_seconds(scenario), dict[float, float]()
    for factors in _SEARCH_FACTORS:
        for seconds in [best * factor for factor in factors]:
            outcomes = _run(scenario, _every(seconds), seeds, mapped, told)
            tried[seconds] = statistics.fmean(one.goodput_ratio for one in outcomes)
        best = max(tried, key=lambda seconds: tried[seconds])
    return _every(best)


def _every(seconds: float) -> str:
    return f"{seconds:.3f}s"


def _run(scenario: Scenario, policy: str, seeds: Sequence[int], mapped: Mapper, told: Told) -> tuple[Outcome, ...]:
    chunks = [tuple(seeds[first : first + _CHUNK_SEEDS]) for first in range(0, len(seeds), _CHUNK_SEEDS)]
    outcomes: list[Outcome] = []
    for some in mapped((scenario, policy, chunk) for chunk in chunks):
        outcomes.extend(some)
        told(len(some))
    return tuple(outcomes)


def _simulate_chunk(task: tuple[Scenario, str, tuple[int, ...]]) -> tuple[Outcome, ...]:
    scenario, policy, seeds = task
    return tuple(simulate(scenario.job, scenario.failures(seed), build(policy, scenario), seed) for seed in seeds)


@contextmanager
def _mapper(jobs: int) -> Iterator[Mapper]:
    if jobs == 1:
        yield lambda tasks: map(_simulate_chunk, tasks)
        return
    # Not forked: the progress bar has a thread, and a fork may catch it holding a lock.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda tasks: pool.map(_simulate_chunk, tasks)
