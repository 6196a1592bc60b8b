"""Durations as people write them, 90s or 1h30m, to seconds and back."""

import math
import re

from workers.errors import CallerError

_UNITS = {
    **dict.fromkeys(("us",), 1e-6),
    **dict.fromkeys(("ms",), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400.0),
    **dict.fromkeys(("y", "year", "years"), 365 * 86400.0),
}
_PART = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)
_SECONDS_MAX = 1e12
_SHOWN = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))


def parse_duration(text: str, *, field: str, zero: bool = False) -> float:
    """Seconds of "90s", "10min", "2h", "1h30m", "250ms", "3d"; upper or lower case. Raises CallerError, which names
    `field`, for anything else, and for 0 unless `zero`: a number without a unit could be meant in any of them."""
    parts, end = [], 0
    while found := _PART.match(text, end):
        unit = _UNITS.get(found[2].lower())
        if unit is None:
            break
        parts.append(float(found[1]) * unit)
        end = found.end()
    seconds = sum(parts)
    if parts and end == len(text) and seconds < _SECONDS_MAX and (seconds > 0 or zero):
        return seconds
    least = "at least 0" if zero else "above 0"
    raise CallerError(f"{field} is {text!r}; it has to be a duration {least} with its unit, such as 90s, 10min or 2h")


def show_duration(seconds: float) -> str:
    """Three digits in the unit that suits: "0", "160 us", "3.25 s", "9.75 min", "2 h"; "for ever" if it never ends."""
    if math.isinf(seconds):
        return "for ever"
    if seconds == 0:
        return "0 s"
    for unit, size in _SHOWN:
        if round(seconds / size, 9) >= (2 if size > 1 else 1):
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
