"""Failure sources have the rates, and the character, that they say they have; and the same seed gives the same."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from chaos.simulator.failures import (
    Exponential,
    Failures,
    FailureSource,
    MarkovModulated,
    Periodic,
    RateSteps,
    Trace,
    Weibull,
    failures,
)

DAY = 86400.0


def times(source: FailureSource, until: float, seed: int = 1) -> list[float]:
    at = itertools.accumulate(source.gaps(np.random.default_rng(seed)))
    return list(itertools.takewhile(lambda one: one < until, at))


def gaps(source: FailureSource, count: int, seed: int = 1) -> np.ndarray:
    return np.array(list(itertools.islice(source.gaps(np.random.default_rng(seed)), count)))


@pytest.mark.parametrize(
    "source",
    [
        Exponential(mtbf_seconds=3600.0),
        Weibull(mtbf_seconds=3600.0, shape=0.7),
        Weibull(mtbf_seconds=3600.0, shape=2.0),
        MarkovModulated(mtbf_seconds=(7200.0, 600.0), stay_seconds=(20_000.0, 3000.0)),
        RateSteps(from_seconds=(0.0, 100 * DAY), mtbf_seconds=(7200.0, 900.0)),
        Periodic(every_seconds=1800.0, jitter_seconds=600.0),
    ],
)
def test_as_many_failures_come_as_the_rate_says(source: FailureSource) -> None:
    found = len(times(source, 300 * DAY))
    assert found == pytest.approx(source.failures_per_second(300 * DAY) * 300 * DAY, rel=0.06)


@pytest.mark.parametrize(("shape", "spread"), [(0.7, 1.46), (1.0, 1.0), (2.0, 0.52)])
def test_weibull_gaps_spread_as_their_shape_says(shape: float, spread: float) -> None:
    found = gaps(Weibull(mtbf_seconds=100.0, shape=shape), 20_000)
    assert found.mean() == pytest.approx(100.0, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(spread, rel=0.04)


def test_exponential_gaps_know_no_age() -> None:
    found = gaps(Exponential(mtbf_seconds=100.0), 20_000)
    assert (found[found > 150] - 150).mean() == pytest.approx(100.0, rel=0.04)


def test_a_markov_modulated_source_clusters() -> None:
    found = gaps(MarkovModulated(mtbf_seconds=(1000.0, 10.0), stay_seconds=(10_000.0, 1000.0)), 20_000)
    assert found.std() / found.mean() > 2
    logs = np.log(found)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] > 0.2


def test_a_rate_steps_when_it_is_told_to() -> None:
    source = RateSteps(from_seconds=(0.0, 50 * DAY, 60 * DAY), mtbf_seconds=(DAY, 3600.0, math.inf))
    found = np.array(times(source, 1000 * DAY))
    assert (found < 50 * DAY).sum() == pytest.approx(50, abs=20)
    assert ((found > 50 * DAY) & (found < 60 * DAY)).sum() == pytest.approx(240, abs=50)
    assert (found > 60 * DAY).sum() == 0


def test_preemption_comes_at_its_times() -> None:
    assert times(Periodic(every_seconds=100.0), 350.0) == [100.0, 200.0, 300.0]
    late = np.array(times(Periodic(every_seconds=100.0, jitter_seconds=30.0), 100_000.0)) % 100.0
    assert (late.min(), late.max()) == (pytest.approx(0, abs=1), pytest.approx(30, abs=1))


def test_a_trace_is_replayed_once() -> None:
    trace = Trace(seconds_since_previous_failure=(5.0, 10.0, 1.0))
    assert times(trace, 1000.0) == [5.0, 15.0, 16.0]
    assert trace.length_seconds == 16.0
    assert trace.failures_per_second(99.0) == 3 / 16


def merged(*sources: Failures, seed: int = 3) -> Iterator[tuple[float, str, bool]]:
    return ((one.at, one.cause, one.memory_survives) for one in failures(sources, seed))


def test_sources_are_merged_in_the_order_of_time_and_do_not_disturb_each_other() -> None:
    nodes = Failures(source=Exponential(mtbf_seconds=500.0), cause="agent_lost", domain="node", memory_survives=0.25)
    ranks = Failures(source=Weibull(mtbf_seconds=300.0, shape=0.7))
    alone = list(itertools.islice(merged(nodes), 2000))
    both = list(itertools.islice(merged(nodes, ranks), 4000))
    assert [one[0] for one in both] == sorted(one[0] for one in both)
    lost = [one for one in both if one[1] == "agent_lost"]
    assert lost == alone[: len(lost)]
    assert sum(survives for _, _, survives in alone) / 2000 == pytest.approx(0.25, abs=0.04)
    assert all(survives for _, cause, survives in both if cause == "signal")
    alike = list(itertools.islice(merged(nodes, nodes), 1000))
    assert len({one[0] for one in alike}) == 1000


def test_the_same_seed_gives_the_same_failures_and_another_one_others() -> None:
    source = Failures(source=Exponential(mtbf_seconds=500.0), memory_survives=0.5)
    runs = [list(itertools.islice(merged(source, seed=seed), 1500)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
