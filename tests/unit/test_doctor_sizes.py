"""Sizes are read as people write them, and what is no size is refused with its field."""

import pytest

from orchestrator.doctor.sizes import parse_size, show_bytes, show_seconds
from workers.errors import CallerError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100GB", 100 * 10**9),
        ("100GiB", 100 << 30),
        ("1.5TB", 1_500_000_000_000),
        ("1.5 TiB", 3 << 39),
        ("512mib", 512 << 20),
        (" 7kB ", 7000),
        (".5KiB", 512),
        ("4096B", 4096),
        ("2PB", 2 * 10**15),
    ],
)
def test_sizes_with_units_are_bytes(text: str, count: int) -> None:
    assert parse_size(text, field="--state") == count


@pytest.mark.parametrize(
    "text", ["", "100", "GB", "-1GB", "0GB", "0.1B", "1e3GB", "10 GX", "1,5TB", "10iB", "5GBs", "nanGB", "9999999PB"]
)
def test_what_is_no_size_is_refused_with_field_and_value(text: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_size(text, field="--state")
    assert f"--state is {text!r}" in str(refused.value)
    assert "100GB" in str(refused.value)


def test_sizes_and_times_are_shown_in_the_unit_that_suits() -> None:
    assert [show_bytes(count) for count in (12, 1536, 100 << 30, 3 << 39)] == ["12 B", "1.5 KiB", "100 GiB", "1.5 TiB"]
    assert [show_seconds(seconds) for seconds in (16e-5, 16e-3, 3.24, 600, 3 * 3600)] == [
        "160 us",
        "16 ms",
        "3.2 s",
        "10 min",
        "3.0 h",
    ]
