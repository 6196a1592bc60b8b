"""No more than so many bytes a second."""

import time
from collections.abc import Callable


class Pace:
    """Spreads a transfer over time: `take` waits until that many more bytes may be moved.

    What a slow device leaves unused is not made up for later: the rate is kept in every moment, not on average.
    `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        bytes_per_second_max: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second_max = bytes_per_second_max
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()

    def take(self, size_bytes: int) -> None:
        """Returns when the bytes that were taken before have had their time."""
        now = self._clock()
        if self._free_at > now:
            self._sleep(self._free_at - now)
        self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_second_max
