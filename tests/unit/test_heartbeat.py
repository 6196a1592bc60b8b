"""The page that a rank and its agent share."""

import math
import os
import time
from collections.abc import Iterator

import pytest

from workers.heartbeat import STEPS_KEPT, HeartbeatPage


@pytest.fixture
def ends() -> Iterator[tuple[HeartbeatPage, HeartbeatPage]]:
    """The rank's end and the agent's."""
    fd = HeartbeatPage.create_fd()
    rank, agent = HeartbeatPage(fd), HeartbeatPage(fd)
    os.close(fd)
    yield rank, agent
    rank.close()
    agent.close()


def test_what_the_loop_and_the_watcher_write_is_read_at_the_other_end(
    ends: tuple[HeartbeatPage, HeartbeatPage],
) -> None:
    rank, agent = ends
    rank.beat(phase="training", step=7)
    rank.observe(sequence=42, tick=9)
    seen = agent.read()
    assert (seen.phase, seen.step, seen.sequence, seen.tick) == ("training", 7, 42, 9)
    assert math.isnan(seen.loss)
    rank.beat(loss=0.5)
    assert (agent.read().step, agent.read().loss) == (7, 0.5)


def test_every_beat_is_a_sign_of_life(ends: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    rank, agent = ends
    before = agent.read().moves
    rank.beat()
    rank.beat()
    assert agent.read().moves == before + 2
    assert 0 <= time.monotonic() - agent.read().moved_at < 60


def test_the_times_of_the_last_steps_are_kept(ends: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    rank, agent = ends
    for step in range(1, 101):
        rank.beat(step=step, step_seconds=float(step))
    assert agent.step_seconds(97, 100) == (98.0, 99.0, 100.0)
    assert agent.step_seconds(100, 100) == ()
    assert agent.step_seconds(0, 100) == tuple(float(step) for step in range(101 - STEPS_KEPT, 101))


def test_a_phase_that_was_declared_ends_also_with_an_exception(ends: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    rank, agent = ends
    rank.beat(phase="training")
    with pytest.raises(ZeroDivisionError), rank.declared("ünïcode " * 20, 5.0):
        assert (agent.read().phase, agent.read().allowance_seconds) == ("declared", 5.0)
        assert agent.read().label.startswith("ünïcode")
        raise ZeroDivisionError
    assert (agent.read().phase, agent.read().label, agent.read().allowance_seconds) == ("training", "", 0.0)
