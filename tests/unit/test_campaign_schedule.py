"""What strikes when is a function of plan and seed; when it is due follows from what is observed."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.campaign.plan import Plan, parse_plan
from chaos.campaign.schedule import Pacer, Planned, Seen, arms, sequence
from workers.failpoint import Action

PLAN = """
job: {steps: 1000, ranks: 3}
faults:
  count: 20
  mix: {kill_rank: 3, kill_keeper: 1, kill_agent: 0}
  moments: {any: 1, save: 1, recovery: 1}
  gap_seconds: {uniform: [1.0, 2.0]}
  burst_chance: 0.4
  burst_max: 3
  from_step: 10
  until_step: 900
  without_progress_max: 3
  hold_seconds: [0.5, 1.5]
armed: {count: 12, points: [persist.block, commit.write, snapshot.copy], actions: [kill_rank, enospc]}
"""


def plan(text: str = PLAN) -> Plan:
    return parse_plan(text, "test.yaml")


def only(moment: str, **changes: object) -> Plan:
    faults = replace(plan().faults, moments={moment: 1.0}, burst_chance=0.0, **changes)  # type: ignore[arg-type]
    return replace(plan(), faults=faults)


@given(seed=st.integers(0, 2**32))
def test_same_seed_gives_the_same_faults(seed: int) -> None:
    first, second = list(sequence(plan().faults, seed)), list(sequence(plan().faults, seed))
    assert first == second
    assert arms(plan(), seed) == arms(plan(), seed)


def test_other_seeds_give_other_faults() -> None:
    assert len({tuple(sequence(plan().faults, seed)) for seed in range(20)}) == 20


@given(seed=st.integers(0, 2**32))
def test_faults_keep_to_the_plan(seed: int) -> None:
    planned = list(sequence(plan().faults, seed))
    assert [one.number for one in planned] == list(range(1, 21))
    assert {one.fault for one in planned} <= {"kill_rank", "kill_keeper"}, "a weight of 0 means never"
    assert not planned[0].follows
    in_a_row = longest = 1
    for one in planned[1:]:
        in_a_row = in_a_row + 1 if one.follows else 1
        longest = max(longest, in_a_row)
        assert 1.0 <= one.gap_seconds <= 2.0
        assert 0.5 <= one.hold_seconds <= 1.5
        assert 0 <= one.spread < 1
    assert longest <= 3


def test_mix_is_followed_in_the_long_run() -> None:
    faults = replace(plan().faults, count=2000)
    found = Counter(one.fault for one in sequence(faults, 1))
    assert 0.7 < found["kill_rank"] / 2000 < 0.8


def test_gaps_of_a_trace_are_scaled_and_all_used() -> None:
    text = "faults: {count: 200, gap_seconds: {trace: [100, 200, 300], scale: 0.01}}"
    assert {one.gap_seconds for one in sequence(plan(text).faults, 3)} == {1.0, 2.0, 3.0}


@given(seed=st.integers(0, 2**32))
def test_armed_faults_lie_within_the_steps_and_fit_their_points(seed: int) -> None:
    found = arms(plan(), seed)
    assert len({arm.id for arm in found}) == len(found) == 12
    for arm in found:
        assert arm.action in get_args(Action)
        assert 10 <= arm.when["step_min"] < 900
        if arm.point == "commit.write":
            assert arm.action in ("kill_self", "enospc"), "no rank is there to be killed"
            assert "rank" not in arm.when
        else:
            assert arm.when["rank"] in range(3)


def seen(at: float, step: int = 50, **changes: object) -> Seen:
    return replace(
        Seen(at=at, step=step, training=True, recovering=False, save=None, save_seconds=1.0),
        **changes,  # type: ignore[arg-type]
    )


def strike(pacer: Pacer, look: Seen) -> Planned | None:
    planned = pacer.look(look)
    if planned is not None:
        pacer.struck(look.at)
    return planned


def test_a_fault_waits_until_the_run_has_trained_for_its_gap() -> None:
    pacer = Pacer(only("any").faults, 1)
    first = next(sequence(only("any").faults, 1))
    assert pacer.look(seen(0.0)) is None
    assert pacer.look(seen(first.gap_seconds - 0.01)) is None
    assert pacer.look(seen(first.gap_seconds - 0.005, training=False)) is None
    assert pacer.look(seen(first.gap_seconds + 0.01)) is None, "the calm began again"
    assert pacer.look(seen(2 * first.gap_seconds + 0.02)) == first


def test_nothing_strikes_before_the_first_step_nor_from_the_last_one_on() -> None:
    pacer = Pacer(only("any").faults, 1)
    assert all(pacer.look(seen(float(at), step=9)) is None for at in range(20))
    assert not pacer.done
    assert pacer.look(seen(30.0, step=10)) is None
    assert pacer.look(seen(33.0, step=10)) is not None
    assert pacer.look(seen(60.0, step=900)) is None
    assert pacer.done


def test_a_fault_for_a_save_waits_for_one_that_begins() -> None:
    pacer = Pacer(only("save").faults, 1)
    first = next(sequence(only("save").faults, 1))
    assert pacer.look(seen(0.0, save=40)) is None
    assert pacer.look(seen(5.0, save=40)) is None, "that one had begun before"
    assert pacer.look(seen(6.1, save=40)) is None, "however long it takes"
    assert pacer.look(seen(6.2)) is None
    assert pacer.look(seen(7.0, save=44)) is None
    assert pacer.look(seen(7.0 + first.spread - 0.01, save=44)) is None
    assert pacer.look(seen(7.0 + first.spread + 0.01, save=44)) == first


def test_a_fault_for_a_recovery_strikes_in_it_or_gives_up_waiting() -> None:
    pacer = Pacer(only("recovery").faults, 1)
    assert strike(pacer, seen(0.0)) is None
    assert strike(pacer, seen(2.0)) is not None, "the first one has none to wait for"
    assert strike(pacer, seen(2.1, training=False, recovering=True)) is None
    assert strike(pacer, seen(2.7, training=False, recovering=True)) is not None
    assert strike(pacer, seen(2.8)) is None
    assert strike(pacer, seen(4.9)) is None, "a recovery may still begin"
    assert strike(pacer, seen(5.8)) is not None


def test_a_run_without_progress_is_left_alone_until_it_gets_on() -> None:
    pacer = Pacer(only("any").faults, 1)
    struck = sum(strike(pacer, seen(float(at))) is not None for at in range(100))
    assert struck == 3
    assert not pacer.done
    assert strike(pacer, seen(101.0, step=51)) is not None


def test_a_burst_comes_at_once() -> None:
    faults = replace(plan().faults, burst_chance=1.0, burst_max=2, moments={"any": 1.0})
    pacer = Pacer(faults, 1)
    strike(pacer, seen(0.0))
    assert strike(pacer, seen(3.0)) is not None
    assert strike(pacer, seen(3.01, training=False)) is not None
    assert strike(pacer, seen(3.02, training=False)) is None


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_campaign_ends_after_its_faults(count: int) -> None:
    pacer = Pacer(only("any", count=count).faults, 1)
    struck = [strike(pacer, seen(3.0 * at, step=50 + at)) for at in range(40)]
    assert sum(one is not None for one in struck) == count
    assert pacer.done
