"""What a simulated run came to."""

from collections import Counter
from dataclasses import dataclass, field

BADPUT = ("stall", "interference", "lost", "restart", "waiting", "stopped")
"""Why time does not count: training stood still for saves; it was slowed by them; work was lost with a failure;
detecting it and starting again; waiting before a retry; the failure budget had stopped the run."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Seconds are wall time. useful_seconds and all badput together are wall_seconds.

    saves: taken up, by tier; some are cut short by a failure. restores: by where the state came from. decisions: how
    often an interval changed. bytes_written and bytes_read: to and from durable storage.
    """

    wall_seconds: float = 0.0
    useful_seconds: float = 0.0
    badput_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BADPUT, 0.0))
    failures: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    decisions: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    stop_reason: str | None = None

    @property
    def goodput_ratio(self) -> float:
        return self.useful_seconds / self.wall_seconds

    @property
    def lost_seconds_per_failure(self) -> float:
        return self.badput_seconds["lost"] / max(1, self.failures.total())
