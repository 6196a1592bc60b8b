"""Durations are read with their unit, and shown in the one that suits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.durations import parse_duration, show_duration
from workers.errors import CallerError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("2h", 7200),
        ("10 min", 600),
        ("1h30m", 5400),
        ("1.5H", 5400),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("160us", 160e-6),
        ("3 days", 259200),
        ("1y", 31536000),
    ],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, field="--stall") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "90", "s", "-3s", "3 fortnights", "1h and 2m", "1h 30", "0s", "nan s", "9999999y"]
)
def test_what_is_no_duration_is_refused_by_name_value_and_remedy(text: str) -> None:
    with pytest.raises(CallerError) as error:
        parse_duration(text, field="--stall")
    message = f"--stall is {text!r}; it has to be a duration above 0 with its unit, such as 90s, 10min or 2h"
    assert str(error.value) == message


def test_zero_is_read_where_it_means_something() -> None:
    assert parse_duration("0s", field="--durable", zero=True) == 0.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (30.0, "30 s"),
        (90.0, "90 s"),
        (585.0, "9.75 min"),
        (600.0, "10 min"),
        (36000.0, "10 h"),
        (100 * 86400.0, "100 d"),
        (0.25, "250 ms"),
        (160e-6, "160 us"),
        (math.inf, "for ever"),
    ],
)
def test_a_duration_is_shown_in_the_unit_that_suits(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


@given(st.floats(1e-3, 1e9))
def test_what_is_shown_reads_back_as_nearly_the_same(seconds: float) -> None:
    shown = show_duration(seconds).replace(",", "")
    assert parse_duration(shown, field="--stall") == pytest.approx(seconds, rel=0.006)
