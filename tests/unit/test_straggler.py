"""Who the others wait for, told from looks at collectives that were taken at the same moments."""

import random

import pytest
from pulse_samples import a_pulse

from orchestrator.decide.straggler import Straggler, StragglerFinder


def looks(finder: StragglerFinder, slow: dict[int, float], *, ticks: int, seed: int = 0) -> list[Straggler]:
    """Ranks work for 0.1 s each, or longer, then wait for each other in a collective; they are looked at now and then.

    `slow`: how many seconds longer a rank works.
    """
    rng = random.Random(seed)
    found = []
    for tick in range(ticks):
        work = [0.1 * rng.lognormvariate(0.0, 0.3) + slow.get(rank, 0.0) for rank in range(finder.world_size)]
        moment = rng.uniform(0.0, max(work))
        for rank, seconds in enumerate(work):
            told = finder.pulse(rank, a_pulse(tick / 2, tick=tick, sequence=2 * tick + (moment >= seconds)))
            found += [told] if told else []
    return found


def test_a_slow_rank_is_found_with_what_it_costs() -> None:
    found = looks(StragglerFinder(4), {2: 0.1}, ticks=240)
    assert found[0].rank == 2
    # The others need 0.14 s at most, as a rule, and this one 0.2.
    assert 0.2 < found[-1].cost_fraction < 0.5
    assert len(found) == 1


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_noise_of_equal_ranks_is_no_straggler(world_size: int) -> None:
    for seed in range(10):
        assert not looks(StragglerFinder(world_size), {}, ticks=1000, seed=seed)


def test_a_slow_pair_is_not_blamed_on_either() -> None:
    assert not looks(StragglerFinder(8), {1: 0.2, 5: 0.2}, ticks=500)


def test_one_that_gets_much_worse_or_comes_back_is_told_again() -> None:
    finder = StragglerFinder(4)
    (slow,) = looks(finder, {2: 0.06}, ticks=240)
    worse = looks(finder, {2: 0.5}, ticks=240)
    assert worse[0].cost_fraction >= 2 * slow.cost_fraction
    assert not looks(finder, {}, ticks=480)
    assert looks(finder, {2: 0.5}, ticks=240)


def test_only_looks_in_training_count() -> None:
    finder = StragglerFinder(2)
    for tick in range(200):
        assert finder.pulse(0, a_pulse(tick / 2, tick=tick, sequence=1, phase="saving")) is None
        assert finder.pulse(1, a_pulse(tick / 2, tick=tick, sequence=2)) is None


def test_a_single_rank_has_nobody_who_waits_for_it() -> None:
    assert not looks(StragglerFinder(1), {0: 1.0}, ticks=200)
