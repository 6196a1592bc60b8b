"""When a rank's watcher looks: at the same moments on all ranks, whatever is done to the clock."""

from hypothesis import given
from hypothesis import strategies as st

from workers.watcher import TICK_SECONDS, look_at, next_look

TIMES = st.floats(min_value=1e9, max_value=4e9)


@given(TIMES)
def test_next_look_is_soon_wherever_the_clock_stands_and_at_the_ticks_moment(now: float) -> None:
    tick, seconds = next_look(now)
    assert 0.0 <= seconds <= 2 * TICK_SECONDS
    assert abs(now + seconds - look_at(tick)) < 1e-5


@given(TIMES)
def test_looks_follow_each_other_without_a_gap(now: float) -> None:
    tick, seconds = next_look(now)
    assert next_look(now + seconds + 1e-5)[0] == tick + 1
