"""A save at once: which step, and what happens when ranks were faster than the order or the save fails."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.save_order import TRIES_MAX, OrderSave, SaveDone, SaveOrder


def training(*, steps_per_second: float = 10.0, steps: int = 20) -> SaveOrder:
    order = SaveOrder()
    order.generation_started(3, 100)
    for step in range(1, steps + 1):
        assert order.progressed(3, 100 + step, at=step / steps_per_second) == []
    return order


def test_the_step_is_as_far_ahead_as_the_run_gets_while_the_order_travels() -> None:
    assert training(steps_per_second=10.0).want() == [OrderSave(generation=3, step=125)]
    assert training(steps_per_second=100.0, steps=100).want() == [OrderSave(generation=3, step=250)]


def test_neighbouring_steps_that_two_ranks_tell_of_within_a_moment_are_no_rate() -> None:
    order = SaveOrder()
    order.generation_started(1, 0)
    for pulse in range(10):
        for rank in range(2):
            order.progressed(1, 5 * pulse + rank + 1, at=100 + pulse / 2 + 0.0002 * rank)
    assert order.want() == [OrderSave(generation=1, step=52)]


def test_a_slow_run_loses_no_step_to_the_margin() -> None:
    assert training(steps_per_second=0.1).want() == [OrderSave(generation=3, step=121)]


def test_who_asks_while_a_save_is_ordered_shares_it() -> None:
    order = training()
    assert len(order.want()) == 1
    assert order.want() == []
    assert order.committed(3, 125) == [SaveDone(step=125, committed=True)]
    assert len(order.want()) == 1


def test_before_the_first_step_nothing_is_ordered_until_there_is_one() -> None:
    order = SaveOrder()
    order.generation_started(3, 100)
    assert order.want() == []
    assert order.progressed(3, 101, at=5.0) == [OrderSave(generation=3, step=102)]


def test_a_rank_that_was_faster_gets_a_later_step() -> None:
    order = training()
    order.want()
    (again,) = order.refused(3, 125, 400)
    assert isinstance(again, OrderSave)
    assert again.step > 400
    assert order.refused(3, 125, 401) == []  # the other rank, of the same order


def test_a_commit_of_an_older_step_is_not_the_one_that_was_wanted() -> None:
    order = training()
    order.want()
    assert order.committed(3, 120) == []
    assert order.committed(3, 130) == [SaveDone(step=130, committed=True)]


def test_words_of_another_generation_change_nothing() -> None:
    order = training()
    order.want()
    assert order.refused(2, 125, 130) == []
    assert order.not_saved(2, 125, "late") == []
    assert order.committed(2, 125) == []
    order.generation_started(4, 120)
    assert not order.wanted
    assert order.committed(4, 125) == []


def test_a_save_that_never_works_is_given_up() -> None:
    order = training()
    (decision,) = order.want()
    for _ in range(TRIES_MAX - 1):
        assert isinstance(decision, OrderSave)
        (decision,) = order.not_saved(3, decision.step, "the disk is full")
    assert isinstance(decision, OrderSave)
    (decision,) = order.not_saved(3, decision.step, "the disk is full")
    assert isinstance(decision, SaveDone)
    assert not decision.committed
    assert "the disk is full" in decision.reason


@given(
    rate=st.floats(0.05, 500.0),
    delays=st.lists(st.floats(0.0, 3.0), min_size=TRIES_MAX, max_size=TRIES_MAX),
    lag=st.floats(0.0, 1.0),
)
def test_orders_only_ever_move_ahead_and_an_end_is_always_told(rate: float, delays: list[float], lag: float) -> None:
    """A run at a steady rate, of which the newest `lag` seconds are not known; each order travels for so long."""
    order = SaveOrder()
    order.generation_started(1, 0)
    now = 0.0
    for _ in range(10):
        now += 1.0
        order.progressed(1, int(max(0.0, now - lag) * rate), at=now)
    decisions = order.want()
    ordered: list[int] = []
    for delay in delays:
        if not decisions or isinstance(decisions[0], SaveDone):
            break
        ordered.append(decisions[0].step)
        now += delay
        reached = int(now * rate)
        if reached <= ordered[-1]:
            decisions = order.committed(1, ordered[-1])
        else:
            decisions = order.refused(1, ordered[-1], reached)
    assert ordered == sorted(set(ordered))
    assert not decisions or isinstance(decisions[0], SaveDone)
    assert order.wanted == (not decisions)
