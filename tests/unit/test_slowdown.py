"""By how much steps are slower while a save is written."""

import random

import pytest

from orchestrator.decide.slowdown import Slowdown


def test_what_steps_take_beyond_the_usual_while_a_save_is_written_is_its_slowdown() -> None:
    slowdown = Slowdown()
    assert list(slowdown.steps_took([0.19, 0.2, 0.21])) == [0.19, 0.2, 0.21]
    slowdown.begun()
    assert list(slowdown.steps_took([0.5, 0.3])) == []
    assert slowdown.seconds == pytest.approx(0.4)
    slowdown.ended()
    assert list(slowdown.steps_took([0.2])) == [0.2]
    assert slowdown.seconds == pytest.approx(0.4)
    slowdown.begun()
    assert slowdown.seconds == 0.0


def test_it_is_never_less_than_nothing_and_unknown_before_there_is_anything_usual() -> None:
    slowdown = Slowdown()
    slowdown.begun()
    slowdown.steps_took([5.0])
    assert slowdown.seconds == 0.0
    slowdown.ended()
    slowdown.steps_took([1.0])
    slowdown.begun()
    slowdown.steps_took([0.5])
    assert slowdown.seconds == 0.0


def test_steps_that_vary_as_always_are_not_slowed_down() -> None:
    rng = random.Random(0)
    slowdown = Slowdown()
    found = []
    for _ in range(200):
        slowdown.steps_took([rng.uniform(0.05, 0.15) for _ in range(20)])
        slowdown.begun()
        slowdown.steps_took([rng.uniform(0.05, 0.15) for _ in range(5)])
        found.append(slowdown.seconds)
        slowdown.ended()
    assert sum(seconds > 0.0 for seconds in found) < 20
    slowdown.begun()
    slowdown.steps_took([rng.uniform(0.15, 0.25) for _ in range(5)])
    assert slowdown.seconds == pytest.approx(0.5, abs=0.2)
