"""Two drivers of one run at once, request by request, and what of it the judge and the mutants show."""

from dataclasses import replace

import pytest

from chaos.crash_states.check import GUARANTEES
from chaos.crash_states.ops import Mark
from chaos.crash_states.rival_mutants import rival_mutants
from chaos.crash_states.rival_search import look_at_rival_mutant, look_at_rivals, schedules, violations
from chaos.crash_states.rivals import PLAYS, Play, Schedule, play
from workers.errors import Fenced

ALONE = 10_000
PARTS = 180


def kinds(marks: list[Mark]) -> list[str]:
    return [mark.kind for mark in marks]


@pytest.mark.parametrize("name", PLAYS)
def test_equal_schedules_come_to_the_same(name: Play) -> None:
    schedule = Schedule(play=name, turns=((0, 7), (1, 30), (0, ALONE)))
    first, again = play(schedule), play(schedule)
    assert first.objects == again.objects and first.marks == again.marks and first.requests == again.requests


def test_a_schedule_says_who_goes_on() -> None:
    old_first = play(Schedule(play="takes over", turns=((0, ALONE),)))
    assert old_first.errors == {} and old_first.generations == [1, 2]
    new_first = play(Schedule(play="takes over", turns=((1, ALONE),)))
    assert isinstance(new_first.errors[0], Fenced) and new_first.generations == [1, 2]
    assert new_first.requests[0] < old_first.requests[0]
    # In the middle of the old one's save: it was there before the new one began, and did not commit.
    between = play(Schedule(play="takes over", turns=((0, 12), (1, ALONE))))
    assert isinstance(between.errors[0], Fenced)
    assert kinds(between.marks).count("committed") == kinds(new_first.marks).count("committed")


def test_a_driver_that_is_gone_sends_no_more_and_its_last_request_is_carried_out_late() -> None:
    turns = ((0, 9), (1, ALONE))
    gone = play(Schedule(play="takes over", turns=turns, gone=(0, 9)))
    lives = play(Schedule(play="takes over", turns=turns))
    assert gone.errors == {} and gone.requests[0] == 9 < lives.requests[0]


def test_a_request_whose_answer_is_lost_is_sent_again() -> None:
    turns = ((1, ALONE),)
    plain = play(Schedule(play="both begin", turns=turns))
    same = [play(Schedule(play="both begin", turns=turns, twice=(1, number))) for number in range(1, 90)]
    assert all(1 not in one.errors and violations(one) == [] for one in same)
    # Where the answer says that another one was there, one looks whose it is: a request more, or two.
    assert {one.requests[1] - plain.requests[1] for one in same} == {0, 1, 2}


def test_what_is_looked_at() -> None:
    found = schedules(0)
    assert len(set(found)) == len(found)
    assert {schedule.play for schedule in found} == set(PLAYS)
    assert any(schedule.twice for schedule in found) and any(schedule.gone for schedule in found)
    others = set(schedules(1))
    # What the seed chooses has two switches; some with two are looked at whatever it is.
    assert {len(schedule.turns) for schedule in set(found) ^ others} == {3}
    assert {len(schedule.turns) for schedule in set(found) & others} == {1, 2, 3}


def test_two_drivers_break_nothing() -> None:
    tally = look_at_rivals(1, 17, PARTS)
    assert tally.violations == 0, tally.examples
    assert tally.recordings > 30 and len(tally.states) > 10


MUTANTS = [pytest.param(index, id=mutant.name, marks=pytest.mark.slow) for index, mutant in enumerate(rival_mutants())]


def test_a_mutant_is_caught_that_commits_beside_another_driver() -> None:
    found = [look_at_rival_mutant(index, 0) for index, one in enumerate(rival_mutants()) if "commit" in one.name]
    assert [one["caught"] for one in found] == [True]


@pytest.mark.parametrize("index", MUTANTS)
def test_each_mutant_of_two_drivers_is_caught(index: int) -> None:
    found = look_at_rival_mutant(index, 0)
    assert found["caught"], found
    assert found["guarantee"] in GUARANTEES and found["detail"] and found["when"]


def test_the_judge_sees_what_is_broken() -> None:
    whole = play(Schedule(play="takes over", turns=((0, ALONE),)))
    assert violations(whole) == []
    manifest = max(key for key in whole.objects if key.endswith("manifest.json"))
    last = max(whole.generations)

    def seen(**changes: object) -> set[str]:
        return {violation.guarantee for violation in violations(replace(whole, **changes))}

    assert "never lost" in seen(objects={key: value for key, value in whole.objects.items() if key != manifest})
    assert "kept" in seen(touched=[("step-000000010-g0001-a01", 2)])
    assert "recovers" in seen(errors={1: Fenced("")})
    assert "recovers" in seen(errors={0: KeyError("")})
    assert "recovers" in seen(errors={0: OSError(""), 1: OSError("")})
    created = Mark("generation created", {"number": last, "parent": None})
    assert {"number used once", "never lost"} <= seen(marks=[*whole.marks, created])
