"""The demo's attack is fixed by its seed and hits what it promises to hit."""

from hypothesis import given
from hypothesis import strategies as st

from chaos.demo.plan import HALF_COPIED_BY_RANK, HALF_WRITTEN_BY_KEEPER, SAVE_POINTS, plan_attack

seeds = st.integers(0, 2**32)
steps = st.integers(24, 5_000)
workers = st.integers(2, 16)


@given(seeds, steps, workers)
def test_same_seed_plans_the_same_attack(seed: int, steps: int, workers: int) -> None:
    assert plan_attack(seed=seed, steps=steps, workers=workers) == plan_attack(seed=seed, steps=steps, workers=workers)


@given(seeds, steps, workers)
def test_both_kinds_of_half_written_saves_occur_and_another_rank_dies_between_them(
    seed: int, steps: int, workers: int
) -> None:
    plan = plan_attack(seed=seed, steps=steps, workers=workers)
    first, second = plan.inside_saves
    assert {first.point, second.point} == {HALF_COPIED_BY_RANK, HALF_WRITTEN_BY_KEEPER}
    assert all(arm.when["index_fraction"] == 0.5 for arm in plan.inside_saves)
    assert plan.random_kill.rank != first.when["rank"]
    assert {arm.when["rank"] for arm in plan.inside_saves} | {plan.random_kill.rank} <= set(range(workers))
    assert first.when["step_min"] < plan.random_kill.step < second.when["step_min"] < steps
    assert plan.kills == 3


@given(seeds, st.sampled_from(SAVE_POINTS))
def test_a_chosen_point_is_the_only_one_inside_a_save(seed: int, point: str) -> None:
    plan = plan_attack(seed=seed, steps=120, workers=2, kill_at=point)
    (arm,) = plan.inside_saves
    assert arm.point == point
    assert plan.kills == 2


def test_different_seeds_begin_with_different_kinds_of_kill() -> None:
    first_points = {plan_attack(seed=seed, steps=120, workers=2).inside_saves[0].point for seed in range(20)}
    assert first_points == {HALF_COPIED_BY_RANK, HALF_WRITTEN_BY_KEEPER}


def test_faults_of_one_plan_leave_different_markers() -> None:
    plan = plan_attack(seed=1, steps=120, workers=2)
    assert len({arm.id for arm in plan.inside_saves}) == len(plan.inside_saves)
