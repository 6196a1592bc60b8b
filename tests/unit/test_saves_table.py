"""The arithmetic of the benchmark of saves: what becomes of measurements, not what they are."""

import pytest
import saves_table
from saves_table import MIB, Results


def results(**arms: dict[str, list[float]]) -> dict[str, Results]:
    """Arms by name, `_` for `-`; those that begin with `soft` do not fsync."""
    named = {name.replace("_", "-"): values for name, values in arms.items()}
    return {name: Results(name, not name.startswith("soft"), values) for name, values in named.items()}


def goals(found: dict[str, Results]) -> dict[str, saves_table.Goal]:
    return {goal.text: goal for goal in saves_table.goals(found, slots_bytes=1000 * MIB, ranks=2)}


def test_the_slowest_rank_counts_in_each_column() -> None:
    merged = saves_table.slowest([{"stall": 0.1, "total": 0.9}, {"stall": 0.3, "total": 0.8}])
    assert merged == {"stall": 0.3, "total": 0.9}


def test_a_goal_is_a_ratio_of_medians() -> None:
    found = goals(results(lastgood={"stall": [0.01, 0.03, 9.0]}, floor_copy={"stall": [0.1, 0.2, 0.3]}))
    goal = found["stall when overlapped: lastgood / floor-copy"]
    assert goal.value == pytest.approx(0.03 / 0.2)
    assert goal.verdict == "missed, by 0.05"


@pytest.mark.parametrize(("stall", "verdict"), [(0.1, "met"), (0.05, "met"), (0.2, "missed, by 0.10")])
def test_a_goal_is_met_up_to_its_limit(stall: float, verdict: str) -> None:
    found = goals(results(lastgood={"stall": [stall]}, floor_copy={"stall": [1.0]}))
    assert found["stall when overlapped: lastgood / floor-copy"].verdict == verdict


def test_what_is_missing_is_said_and_not_counted_as_met() -> None:
    found = goals(results(lastgood={"total": [1.0]}, floor_copy={"stall": [1.0]}))
    assert found["stall when overlapped: lastgood / floor-copy"].verdict == "not measured: lastgood has no stall"
    assert found["overhead with verification: lastgood / floor-helper"].value is None
    assert not any(goal.verdict == "met" for goal in found.values())


def test_a_floor_that_cost_nothing_gives_no_ratio() -> None:
    found = goals(results(lastgood={"total": [1.0]}, floor_helper={"total": [-0.01]}))
    assert found["overhead with verification: lastgood / floor-helper"].value is None


def test_overhead_is_compared_with_each_durable_peer_and_no_other() -> None:
    arms = results(
        lastgood={"total": [1.0]}, floor_helper={"total": [1.0]}, hard={"total": [4.0]}, soft={"total": [0.1]}
    )
    compared = [goal for goal in saves_table.goals(arms, slots_bytes=0, ranks=2) if "peer" in goal.text]
    assert [(goal.text, goal.value) for goal in compared] == [("overhead beside a durable peer: lastgood / hard", 0.25)]


def test_a_warm_restore_is_the_one_from_memory_where_there_is_one() -> None:
    floor = {"restore_warm": [2.0]}
    without = goals(results(lastgood={"restore_warm": [4.0]}, floor_copy=floor))
    assert without["warm restore from the page cache: lastgood / floor-copy"].value == 2.0
    with_it = goals(results(lastgood={"restore_warm": [4.0], "restore_memory": [1.0]}, floor_copy=floor))
    assert with_it["warm restore from memory: lastgood / floor-copy"].value == 0.5


def test_memory_is_what_each_rank_uses_beyond_its_slots() -> None:
    found = goals(results(lastgood={"memory": [1090.0 * MIB]}))
    assert found["memory a rank beyond its slots, in MiB: lastgood"].value == 45.0


def test_growth_is_fitted_over_all_saves() -> None:
    steady = [100.0 * MIB + (3 * MIB if number % 2 else 0) for number in range(200)]
    assert saves_table.flat_goal(steady, ranks=2).verdict == "met"
    leaking = [100.0 * MIB + 0.5 * MIB * number for number in range(201)]
    goal = saves_table.flat_goal(leaking, ranks=2)
    assert goal.value == pytest.approx(50.0)
    assert goal.verdict == "missed, by 34.00"


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        (None, 1.0, "-"),
        ([], 1.0, "-"),
        ([0.5], 1.0, "0.50"),
        ([0.3, 0.5, 0.4], 1.0, "0.40 (0.30..0.50)"),
        ([0.01, 0.03], 1.0, "0.020 (0.010..0.030)"),
        ([2.0 * MIB], MIB, "2"),
    ],
)
def test_a_cell_shows_median_and_spread(values: list[float] | None, unit: float, expected: str) -> None:
    assert saves_table.cell(values, unit) == expected


def test_the_table_says_which_arm_could_not_be_measured_and_why() -> None:
    arms = results(lastgood={"stall": [0.5]}, soft={}) | {"gone": Results("gone", True, {}, "no module named gone")}
    lines = saves_table.table(arms).splitlines()
    assert lines[1].split()[:2] == ["lastgood", "0.50"]
    assert lines[-1] == "gone: not measured to the end: no module named gone"


def test_the_json_has_the_same_as_the_table() -> None:
    arms = results(lastgood={"stall": [1.0, 3.0]})
    found = saves_table.goals(arms, slots_bytes=0, ranks=2)
    document = saves_table.as_json(arms, found, {"rounds": 2})
    assert document["arms"]["lastgood"]["columns"]["stall"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "all": [1.0, 3.0],
    }
    assert [goal["verdict"] for goal in document["goals"]] == [goal.verdict for goal in found]
    assert document["settings"] == {"rounds": 2}
