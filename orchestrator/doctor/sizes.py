"""Sizes as people write them, 100GB or 1.5 TiB, to bytes and back."""

import re

from workers.errors import CallerError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {prefix: 1 << (10 * power) for power, prefix in enumerate("_KMGTP")}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGTP]?)(I?)B", re.IGNORECASE)
_BYTES_MAX = 1 << 63


def parse_size(text: str, *, field: str) -> int:
    """Bytes of "100GB" (10^9), "100GiB" (2^30), "1.5TB", "4096B"; upper or lower case. Raises CallerError, which names
    `field`, for anything else: a number without a unit is more often a mistake than a number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        number, prefix, binary = found[1], found[2].upper(), bool(found[3])
        unit = None if binary and not prefix else (_BINARY if binary else _DECIMAL)[prefix]
        if unit is not None and 1 <= float(number) * unit < _BYTES_MAX:
            return int(float(number) * unit)
    raise CallerError(f"{field} is {text!r}; it has to be a size above 0 with its unit, such as 100GB, 1.5TB or 512MiB")


def show_bytes(count: float) -> str:
    """As the memory of machines is given, in binary units: "1.5 GiB"."""
    for prefix in "PTGMK":
        if count >= _BINARY[prefix]:
            value = count / _BINARY[prefix]
            return f"{value:,.0f} {prefix}iB" if value >= 100 else f"{value:.3g} {prefix}iB"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """Two digits or so, in the unit that suits: "160 us", "3.2 s", "7 min"."""
    if seconds < 1e-3:
        return f"{_short(seconds * 1e6)} us"
    if seconds < 0.1:
        return f"{_short(seconds * 1e3)} ms"
    if seconds < 100:
        return f"{_short(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
