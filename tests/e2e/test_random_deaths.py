"""The supervisor's own parts die at random moments, alone and with a rank, and the run ends with the same bits."""

from pathlib import Path

import pytest
import random_deaths

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "seed"), [("coordinator", 1), ("keeper", 2)])
def test_a_part_of_the_supervisor_and_a_rank_die_together_at_a_random_moment(
    tmp_path: Path, reference: Path, victim: str, seed: int
) -> None:
    attacks = random_deaths.plan(seed, (victim,), with_rank=True)
    print(f"seed {seed}: {attacks}")
    random_deaths.run_trial(attacks, tmp_path, victim, reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_any_part_of_the_supervisor_dies_at_any_moment(tmp_path: Path, reference: Path, seed: int) -> None:
    attacks = random_deaths.plan(seed)
    print(f"seed {seed}: {attacks}")
    random_deaths.run_trial(attacks, tmp_path, "random", reference)
