"""Whether Ray Train is started again after it ended without a verdict. No clock, no Ray, no disk.

Invariant: after `ENDS_MAX` such ends in a row without a newer checkpoint the run stops; the first restart is
immediate, each later one waits twice as long as the one before.
"""

ENDS_MAX = 5
_DELAY_SECONDS_BASE = 1.0


class RayRounds:
    def __init__(self) -> None:
        self._ends = 0

    @property
    def ends(self) -> int:
        """Ends in a row without a newer checkpoint."""
        return self._ends

    def committed(self) -> None:
        """A newer checkpoint is in place."""
        self._ends = 0

    def ended(self) -> float | None:
        """Ray Train has ended; returns the seconds to wait before it is started again, None if it is not."""
        self._ends += 1
        if self._ends > ENDS_MAX:
            return None
        return 0.0 if self._ends == 1 else float(_DELAY_SECONDS_BASE * 2.0 ** (self._ends - 2))
