"""How fast snapshots may go over the network."""

import time
from collections.abc import Callable

_BURST_SECONDS = 0.1
"""How much of the allowance that was not used may be used later; little, so that the cap holds in short spans too."""


class Pace:
    """A cap on bytes a second, shared by all that asks it; None for no cap. Not for use by several threads at once."""

    def __init__(self, bytes_per_second_max: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_second_max = bytes_per_second_max
        self._clock = clock
        self._free_at = clock()

    def delay_seconds(self, size: int) -> float:
        """Count `size` bytes, and return how long to wait before they are sent."""
        if self._bytes_per_second_max is None:
            return 0.0
        now = self._clock()
        begin = max(self._free_at, now - _BURST_SECONDS)
        self._free_at = begin + size / self._bytes_per_second_max
        return max(0.0, begin - now)
