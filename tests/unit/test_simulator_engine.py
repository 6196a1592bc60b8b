"""The simulator gives what walking through every save gives, and what exact expressions say."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.simulator.draws import Cost, Draws, most_below
from chaos.simulator.engine import simulate
from chaos.simulator.failures import Exponential, Failure, Failures, failures
from chaos.simulator.job import Intervals, Job, SaveCosts
from orchestrator.decide.tuner import TierName


@dataclass
class Every:
    """A fixed interval. `review_every`: asked again and again, though nothing changes."""

    durable_seconds: float
    memory_seconds: float | None = None
    review_every: float = math.inf
    review_at: float = math.inf
    asked: list[float] = field(default_factory=list)
    told: list[tuple[str, float, float, float]] = field(default_factory=list)
    restarts: list[tuple[str, float]] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)

    def intervals(self, up: float) -> Intervals:
        self.asked.append(up)
        self.review_at = up + self.review_every
        return Intervals(durable_seconds=self.durable_seconds, memory_seconds=self.memory_seconds)

    def saved(self, tier: TierName, stall_seconds: float, durable_seconds: float, interference_seconds: float) -> None:
        self.told.append((tier, stall_seconds, durable_seconds, interference_seconds))

    def failed(self, failure: Failure, up: float) -> None:
        self.failed_at.append(up)

    def restarted(self, tier: TierName, seconds: float) -> None:
        self.restarts.append((tier, seconds))


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


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
@pytest.mark.parametrize("variation", [0.0, 0.5])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("review_every", [math.inf, 3.0, 150.0])
def test_passing_over_saves_gives_what_walking_through_them_gives(
    seed: int, variation: float, in_memory: bool, review_every: float
) -> None:
    job = Job(
        durable=costs(3.0, 20.0, 30.0, 2.0, variation),
        memory=costs(0.3, 1.0, 5.0, 0.1, variation) if in_memory else None,
        step_seconds=0.5,
        horizon_seconds=40_000.0,
    )
    every = Every(100.0, 17.5 if in_memory else None, review_every)
    found = simulate(job, exponential(500.0, seed, 0.7), every, seed)
    useful, stalled, lost = walk(job, exponential(500.0, seed, 0.7), every, seed)
    assert found.failures.total() > 50
    assert found.badput_seconds["waiting"] == 0  # walking knows no budget
    assert found.useful_seconds == pytest.approx(useful, rel=1e-9, abs=1e-6)
    assert found.badput_seconds["stall"] + found.badput_seconds["interference"] == pytest.approx(stalled, abs=1e-6)
    assert found.badput_seconds["lost"] == pytest.approx(lost, abs=1e-6)


# ---------------------------------------------------------------- exact expressions


@pytest.mark.parametrize(
    ("stall", "interval", "restart"), [(10.0, 1400.0, 600.0), (100.0, 4000.0, 0.0), (1000.0, 13_000.0, 3000.0)]
)
def test_goodput_is_within_a_percent_of_dalys_exact_expression(stall: float, interval: float, restart: float) -> None:
    """Daly 2006: exponential failures that strike saves and restarts too; saves that block until they are durable."""
    mtbf = 100_000.0
    wall_over_useful = mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf) / interval
    job = Job(durable=costs(stall, stall, restart), step_seconds=10.0, horizon_seconds=8000 * mtbf)
    found = simulate(job, exponential(mtbf, 1), Every(interval), 1)
    assert found.failures.total() > 7500
    assert found.goodput_ratio == pytest.approx(1 / wall_over_useful, rel=0.01)
    assert 1 - found.goodput_ratio == pytest.approx(1 - 1 / wall_over_useful, rel=0.02)


def test_time_until_durable_costs_what_the_exact_expression_says() -> None:
    mtbf, interval, stall, durable, restart = 10_000.0, 900.0, 20.0, 620.0, 300.0
    kept = interval / mtbf / math.expm1((interval + stall) / mtbf)
    exact = kept * math.exp(-(restart + durable - stall) / mtbf)
    job = Job(durable=costs(stall, durable, restart), horizon_seconds=8000 * mtbf)
    found = simulate(job, exponential(mtbf, 2), Every(interval), 2)
    assert found.goodput_ratio == pytest.approx(exact, rel=0.01)
    assert 1 - found.goodput_ratio == pytest.approx(1 - exact, rel=0.02)


def test_random_costs_cost_what_their_mean_costs() -> None:
    mtbf, interval, stall = 20_000.0, 1000.0, 50.0
    exact = interval / mtbf / math.expm1((interval + stall) / mtbf)
    job = Job(durable=costs(stall, variation=1.0), horizon_seconds=8000 * mtbf)
    found = simulate(job, exponential(mtbf, 3), Every(interval), 3)
    assert found.goodput_ratio == pytest.approx(exact, rel=0.01)


def test_without_failures_saves_cost_exactly_their_part_of_the_time() -> None:
    job = Job(durable=costs(30.0), horizon_seconds=630.0 * 1000)
    found = simulate(job, strikes(), Every(600.0), 0)
    assert found.goodput_ratio == pytest.approx(1 - 30 / 630, abs=1e-12)
    assert (found.saves["durable"], found.badput_seconds["stall"]) == (1000, 30_000.0)


# ---------------------------------------------------------------- one failure at a time


def test_a_failure_loses_what_was_trained_since_the_newest_save_that_could_be_restored() -> None:
    job = Job(durable=costs(10.0, 60.0, 100.0), horizon_seconds=5000.0)
    # Saves begin at 500 and 1010, and can be restored 60 s later.
    assert simulate(job, strikes(1080.0), Every(500.0), 0).badput_seconds["lost"] == 60.0
    assert simulate(job, strikes(1060.0), Every(500.0), 0).badput_seconds["lost"] == 540.0
    assert simulate(job, strikes(400.0), Every(500.0), 0).badput_seconds["lost"] == 400.0


def test_a_save_cannot_be_restored_before_its_stall_is_over() -> None:
    job = Job(durable=costs(100.0), horizon_seconds=5000.0)
    assert simulate(job, strikes(550.0), Every(500.0), 0).badput_seconds["lost"] == 500.0
    assert simulate(job, strikes(650.0), Every(500.0), 0).badput_seconds["lost"] == 50.0


def test_a_failure_that_memory_survives_goes_back_to_the_newest_snapshot_in_it() -> None:
    job = Job(durable=costs(10.0, 10.0, 100.0), memory=costs(1.0, 5.0, 7.0), horizon_seconds=5000.0)
    for survives, lost, restart, source in ((True, 78.0, 7.0, "memory"), (False, 378.0, 100.0, "durable")):
        # A durable save begins at 403, then snapshots at 513, 614 and 715.
        found = simulate(job, strikes(794.0, memory_survives=survives), Every(400.0, 100.0), 0)
        assert found.badput_seconds["lost"] == lost
        assert found.badput_seconds["restart"] == restart
        assert found.restores == {source: 1}


def test_what_was_restored_from_memory_becomes_durable_too() -> None:
    job = Job(durable=costs(10.0, 10.0), memory=costs(1.0, 1.0), horizon_seconds=2000.0)
    struck = iter([Failure(300.0, "signal", "process", True), Failure(400.0, "agent_lost", "node", False)])
    found = simulate(job, struck, Every(1000.0, 100.0), 0)
    # The snapshot of 200 s of training is restored at 300, and after another 100 s again, from storage.
    assert found.restores == {"memory": 1, "durable": 1}
    assert found.badput_seconds["lost"] == 98.0 + 100.0
    assert found.saves["durable"] == 2


def test_a_failure_in_the_middle_of_a_restart_begins_it_anew() -> None:
    job = Job(durable=costs(0.0, 0.0, 100.0), horizon_seconds=5000.0)
    found = simulate(job, strikes(1000.0, 1080.0), Every(500.0), 0)
    assert found.badput_seconds["restart"] == 180.0
    assert found.failures == {"signal": 2}


def test_a_checkpoint_that_does_not_verify_costs_the_way_to_the_one_before() -> None:
    job = Job(durable=costs(0.0, 0.0), horizon_seconds=2000.0, damaged=1.0, keep_last=2)
    found = simulate(job, strikes(1050.0), Every(500.0), 0)
    assert found.stop_reason is not None
    assert "damaged" in found.stop_reason
    assert found.badput_seconds["stopped"] == 2000.0 - 1050.0
    some = Job(durable=costs(0.0, 0.0), horizon_seconds=200_000.0, damaged=0.3)
    lost = simulate(some, exponential(2000.0, 1), Every(100.0), 1).lost_seconds_per_failure
    assert lost == pytest.approx(50 + 100 * (0.3 + 0.3**2), rel=0.15)


def test_a_run_that_does_not_get_further_is_stopped_by_its_budget() -> None:
    job = Job(durable=costs(0.0, 0.0, 10.0), horizon_seconds=10_000.0)
    found = simulate(job, strikes(*[700.0 + 5 * n for n in range(40)]), Every(500.0), 0)
    assert found.stop_reason is not None
    assert "without getting past step 700" in found.stop_reason
    assert found.badput_seconds["waiting"] > 0
    assert found.failures.total() == 11
    limited = Job(durable=costs(0.0), horizon_seconds=10_000.0, max_failures=1)
    assert simulate(limited, strikes(100.0, 200.0), Every(500.0), 0).failures.total() == 2
    # A newer checkpoint in between refills the budget.
    assert simulate(limited, strikes(700.0, 1500.0, 2300.0), Every(500.0), 0).stop_reason is None


def test_a_run_ends_with_its_work() -> None:
    job = Job(durable=costs(10.0), memory=costs(1.0), work_seconds=1000.0)
    found = simulate(job, strikes(), Every(300.0, 100.0), 0)
    assert found.useful_seconds == 1000.0
    assert found.wall_seconds == pytest.approx(1000.0 + 3 * 10.0 + 6 * 1.0)
    again = simulate(job, strikes(950.0, memory_survives=False), Every(300.0, 100.0), 0)
    assert again.useful_seconds == 1000.0
    assert again.badput_seconds["lost"] > 0


def test_a_save_waits_until_the_one_before_can_be_restored() -> None:
    job = Job(durable=costs(10.0, 100.0), horizon_seconds=10_000.0)
    found = simulate(job, strikes(), Every(20.0), 0)
    assert found.saves["durable"] == 100


def test_an_interval_is_in_whole_steps() -> None:
    job = Job(durable=costs(0.0), step_seconds=7.0, horizon_seconds=700.0 * 21)
    assert simulate(job, strikes(), Every(20.0), 0).saves["durable"] == 700


def test_a_policy_is_told_what_was_measured_and_asked_at_the_ends_of_saves() -> None:
    job = Job(durable=costs(10.0, 60.0, 100.0, 5.0), horizon_seconds=2400.0)
    every = Every(500.0, review_every=600.0)
    simulate(job, strikes(1100.0), every, 0)
    # Saves are over at 515 and 1030 on the run's clock, from which the restart is missing, and 515 after the failure.
    assert every.asked == [0.0, 1030.0, 1100.0, 2130.0]
    assert set(every.told) == {("durable", 10.0, 60.0, 5.0)}
    assert every.failed_at == [1100.0]
    assert every.restarts == [("durable", 100.0)]


def test_storage_traffic_is_counted() -> None:
    job = Job(durable=costs(0.0), memory=costs(0.0), horizon_seconds=1000.0, state_bytes=100)
    found = simulate(job, strikes(555.0, memory_survives=False), Every(100.0, 10.0), 0)
    assert (found.bytes_written, found.bytes_read) == (100 * found.saves["durable"], 100)
    assert found.saves["durable"] == 5 + 4


@settings(max_examples=60, deadline=None)
@given(
    stall=st.floats(0, 50),
    durable=st.floats(0, 300),
    restart=st.floats(0, 500),
    variation=st.sampled_from([0.0, 0.8]),
    interval=st.floats(1, 5000),
    snapshots=st.none() | st.floats(1, 500),
    mtbf=st.floats(50, 20_000),
    survives=st.floats(0, 1),
    damaged=st.sampled_from([0.0, 0.2]),
    review_every=st.sampled_from([math.inf, 30.0]),
    seed=st.integers(0, 1000),
)
def test_every_second_is_counted_once(
    stall: float,
    durable: float,
    restart: float,
    variation: float,
    interval: float,
    snapshots: float | None,
    mtbf: float,
    survives: float,
    damaged: float,
    review_every: float,
    seed: int,
) -> None:
    job = Job(
        durable=costs(stall, durable, restart, stall / 3, variation),
        memory=costs(stall / 10, durable / 10, restart / 10, 0.0, variation) if snapshots else None,
        horizon_seconds=50_000.0,
        damaged=damaged,
    )
    found = simulate(job, exponential(mtbf, seed, survives), Every(interval, snapshots, review_every), seed)
    assert found.wall_seconds == 50_000.0
    assert found.useful_seconds + sum(found.badput_seconds.values()) == pytest.approx(50_000.0, abs=1e-5)
    assert found.useful_seconds >= -1e-6
    assert min(found.badput_seconds.values()) >= -1e-6


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    job = Job(durable=costs(10.0, 30.0, 60.0, variation=0.5), horizon_seconds=1e6)
    runs = [simulate(job, exponential(5000.0, seed), Every(300.0), seed).useful_seconds for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


# ---------------------------------------------------------------- draws


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(0, 100), st.integers(0, 100))
def test_sums_of_draws_are_those_of_walking_through_them(pool: list[float], first: int, count: int) -> None:
    draws = Draws(pool)
    walked = sum(draws[index] for index in range(first, first + count))
    assert draws.sum(first, count) == pytest.approx(walked, abs=1e-9)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60), st.floats(0, 100), st.integers(-5, 80))
def test_the_search_finds_the_last_sum_within_the_limit_from_any_guess(
    steps: list[float], limit: float, guess: int
) -> None:
    sums = [0.0, *np.cumsum(steps).tolist()]

    def used(count: int) -> float:
        return sums[count] if count < len(sums) else sums[-1] + 1000.0 * (count - len(sums) + 1)

    found = most_below(limit, used, guess)
    assert used(found) <= limit < used(found + 1)


def test_a_pool_has_exactly_the_mean_of_its_cost() -> None:
    rng = np.random.default_rng(0)
    for cost in (
        Cost(mean_seconds=3.0),
        Cost(mean_seconds=3.0, variation=2.0),
        Cost(seen=(1.0, 2.0, 6.0)),
        Cost(seen=(0.0,)),
    ):
        assert cost.pool(rng).mean() == pytest.approx(cost.mean)
    spread = Cost(mean_seconds=3.0, variation=0.5).pool(rng)
    assert spread.std() / spread.mean() == pytest.approx(0.5, rel=0.1)
    assert len(set(Cost(seen=(1.0, 2.0)).pool(rng).tolist())) == 2
