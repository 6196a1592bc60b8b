"""Measurements that are noisy, have outliers, and change for good from one moment to the next."""

import random
import statistics

import pytest

from orchestrator.decide.measure import Measure, Slowdown


def measured(*samples: float) -> Measure:
    subject = Measure()
    for sample in samples:
        subject.add(sample)
    return subject


def test_nothing_is_said_before_anything_was_measured() -> None:
    assert Measure().value is None


def test_noise_is_averaged_out() -> None:
    rng = random.Random(0)
    subject = measured(*[rng.uniform(0.5, 1.5) for _ in range(16)])
    values = []
    for _ in range(500):
        subject.add(rng.uniform(0.5, 1.5))
        assert subject.value is not None
        values.append(subject.value)
    assert statistics.fmean(values) == pytest.approx(1.0, abs=0.05)
    assert statistics.stdev(values) < 0.15


@pytest.mark.parametrize("factor", [0.1, 4.0, 10.0])
def test_a_jump_is_believed_at_once(factor: float) -> None:
    assert measured(*[2.0] * 16, 2.0 * factor).value == pytest.approx(2.0 * factor)


def test_a_jump_beyond_ten_times_waits_for_a_second_one() -> None:
    assert measured(*[2.0] * 16, 900.0).value == 20.0
    assert measured(*[2.0] * 16, 900.0, 950.0).value == 925.0
    assert measured(*[2.0] * 16, 0.002).value == pytest.approx(0.2)
    assert measured(*[2.0] * 16, 0.002, 0.002).value == 0.002


def test_an_outlier_is_taken_back_by_the_next_that_is_as_usual() -> None:
    assert measured(*[2.0] * 16, 9.0, 2.0).value == 2.0
    assert measured(*[2.0] * 16, 9.0, 2.0, 90.0, 2.0).value == 2.0


def test_two_outliers_that_do_not_agree_are_no_change() -> None:
    assert measured(*[2.0] * 16, 9.0, 90.0, 2.0).value == 2.0


def test_what_is_next_to_nothing_is_all_alike() -> None:
    assert measured(*[0.0] * 5, 1e-4).value == 0.0
    assert measured(*[0.0] * 5, 0.5).value == pytest.approx(0.01)
    assert measured(*[0.0] * 5, 0.5, 0.5).value == 0.5


def test_a_slow_drift_is_followed() -> None:
    assert measured(*[1.01**n for n in range(500)]).value == pytest.approx(1.01**491, rel=0.02)


def test_a_save_held_training_up_by_what_its_steps_took_longer() -> None:
    subject = Slowdown()
    subject.step(9.0, beside=True)  # nothing to compare with yet
    assert subject.ended() == 0.0
    for seconds in (1.0, 1.0, 1.1, 0.9):
        subject.step(seconds, beside=False)
    for seconds in (1.5, 1.25, 1.0):
        subject.step(seconds, beside=True)
    assert subject.ended() == pytest.approx(0.75)
    subject.step(0.9, beside=True)
    assert subject.ended() == 0.0
