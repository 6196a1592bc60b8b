"""Whether the run is still protected: whether saves that were due have come through lately.

Invariants:
- The run is unprotected when its newest committed state is older than the limit and a save failed, stalled or was
  skipped since. A run that has only not been asked to save is not.
- It is said at once, and again after growing pauses, until a save is committed; then that is said, once.
- A run that is to stop for it gets one more chance: the next save that is due, or a while of its own if none comes.
"""

from dataclasses import dataclass

_AGAIN_SECONDS_MAX = 3600.0
_LAST_CHANCE_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unprotected:
    """All since `since` would be lost. `reason`: of the newest failed save."""

    since: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedAgain:
    """A save was committed; `since` is when protection had been lost."""

    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopUnprotected:
    """The run is to end: the last chance is gone as well."""

    since: float
    reason: str


Decision = Unprotected | ProtectedAgain | StopUnprotected


class Protection:
    """`limit_seconds`: None if nobody asked. `protected_at`: when the newest committed state was the run's, or when the
    run began. `at` is a clock in seconds, the same for all.
    """

    def __init__(self, *, limit_seconds: float | None, stop: bool, protected_at: float) -> None:
        self._limit_seconds = limit_seconds
        self._stop = stop
        self._protected_at = protected_at
        self._reason: str | None = None
        self._said_at: float | None = None
        self._pause_seconds = 0.0
        self._stopped = False

    def committed(self, snapshot_at: float) -> list[Decision]:
        """A state was committed that the run had at that time."""
        since, said = self._protected_at, self._said_at is not None
        self._protected_at = max(self._protected_at, snapshot_at)
        self._reason, self._said_at = None, None
        return [ProtectedAgain(since=since)] if said else []

    def save_failed(self, reason: str, *, at: float, final: bool) -> list[Decision]:
        """A save that was due failed, stalls, or was skipped; `final`: this one is not tried again."""
        self._reason = reason
        if final and self._stop and self._said_at is not None and not self._stopped:
            return self._end(reason)
        return self.tick(at=at)

    def tick(self, *, at: float) -> list[Decision]:
        """Time has passed."""
        wakeup_at = self.wakeup_at
        if wakeup_at is None or at < wakeup_at or self._limit_seconds is None or self._reason is None:
            return []
        if self._said_at is None:
            self._pause_seconds = self._limit_seconds
        elif self._stop:
            return self._end(self._reason)
        else:
            self._pause_seconds = min(2 * self._pause_seconds, max(_AGAIN_SECONDS_MAX, self._limit_seconds))
        self._said_at = at
        return [Unprotected(since=self._protected_at, reason=self._reason)]

    def _end(self, reason: str) -> list[Decision]:
        self._stopped = True
        return [StopUnprotected(since=self._protected_at, reason=reason)]

    @property
    def wakeup_at(self) -> float | None:
        """When `tick` is due, None if nothing waits for time to pass."""
        if self._limit_seconds is None or self._reason is None or self._stopped:
            return None
        if self._said_at is None:
            return self._protected_at + self._limit_seconds
        if self._stop:
            return self._said_at + min(self._limit_seconds, _LAST_CHANCE_SECONDS_MAX)
        return self._said_at + self._pause_seconds
