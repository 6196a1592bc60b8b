"""When a loss or gradient norm is bad: single cases, then any sequence against a plain model."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.loss_guard import BadValue, LossGuard


def fed(values: list[float], factor: float | None = 3.0) -> LossGuard:
    guard = LossGuard(factor)
    for value in values:
        assert guard.judge({"loss": value}) is None
    return guard


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_value_that_is_not_finite_is_bad_from_the_first_step_on(what: str, value: float) -> None:
    bad = LossGuard(None).judge({what: value})
    assert bad is not None
    assert (bad.what, bad.limit) == (what, None)
    assert f"is {value:g}" in str(bad)


def test_a_gradient_norm_that_may_overflow_is_passed_over_and_a_loss_is_not() -> None:
    guard = LossGuard(3.0)
    for _ in range(30):
        assert guard.judge({"loss": 1.0, "grad_norm": math.inf}, may_overflow=("grad_norm",)) is None
    assert guard.state_dict()["grad_norm"] == []
    assert guard.judge({"loss": math.nan, "grad_norm": math.inf}, may_overflow=("grad_norm",)) is not None


def test_without_a_factor_no_finite_value_is_bad_and_none_is_remembered() -> None:
    guard = fed([1.0] * 60 + [1e30], factor=None)
    assert guard.state_dict() == {"loss": [], "grad_norm": []}


def test_a_spike_is_bad_once_twenty_good_values_were_seen() -> None:
    assert fed([1.0] * 19).judge({"loss": 100.0}) is None
    assert fed([1.0] * 20).judge({"loss": 3.0}) is None
    bad = fed([1.0] * 20).judge({"loss": 3.1})
    assert bad == BadValue(what="loss", value=3.1, limit=3.0)
    assert str(bad) == "the loss is 3.1, above its limit of 3"


def test_a_step_with_one_bad_value_leaves_nothing_behind() -> None:
    guard = fed([1.0] * 20)
    before = guard.state_dict()
    assert guard.judge({"loss": 1.5, "grad_norm": math.nan}) is not None
    assert guard.state_dict() == before


def test_losses_below_zero_are_judged_by_their_size_and_zero_is_no_measure() -> None:
    assert fed([-2.0] * 20).judge({"loss": 5.9}) is None
    assert fed([-2.0] * 20).judge({"loss": 6.1}) is not None
    assert fed([0.0] * 20).judge({"loss": 1.0}) is None


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, 1e9]), max_size=120),
    restores=st.sets(st.integers(0, 119)),
    factor=st.floats(1.1, 100),
)
def test_any_sequence_is_judged_as_by_the_plain_model_however_often_it_is_restored(
    values: list[float], restores: set[int], factor: float
) -> None:
    guard, good = LossGuard(factor), list[float]()
    for number, value in enumerate(values):
        if number in restores:
            state = json.loads(json.dumps(guard.state_dict()))
            guard = LossGuard(factor)
            guard.load_state_dict(state)
        limit = factor * abs(statistics.median(good[-50:])) if len(good) >= 20 else 0.0
        expected = not math.isfinite(value) or (limit > 0 and value > limit)
        assert (guard.judge({"loss": value}) is not None) == expected
        if not expected:
            good.append(value)
