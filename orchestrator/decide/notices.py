"""What to do about word that a node or a process will be taken away. Events in, decisions out; no clock, no Ray.

Invariants: each notice is answered with one wish for a save and one hand-over; the hand-over comes as soon as the save
is committed or given up, and before the deadline in any case, so that what is lost to the notice is never more than
what a death at the deadline would have lost; notices that come while one is open share its save and its hand-over;
what its target did in the meantime (a rank killed at the deadline) is put down to the notice and not to the run.
"""

from dataclasses import dataclass

_MARGIN_SECONDS_MAX = 2.0
_MARGIN_FRACTION = 0.2
_DEATHS = frozenset({"agent_lost", "rank_lost", "signal", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """`target` tells repeats apart; `agents` must leave (none if a fresh rank in the same place is enough).

    `reason`: "drain" (Ray said so) or "sigterm". `at` and `deadline_at`: Unix time.
    """

    target: str
    node: str
    ranks: tuple[int, ...]
    agents: tuple[str, ...]
    reason: str
    at: float
    deadline_at: float

    @property
    def hand_over_at(self) -> float:
        """The latest moment at which the hand-over still fits."""
        return self.deadline_at - min(_MARGIN_SECONDS_MAX, _MARGIN_FRACTION * max(0.0, self.deadline_at - self.at))


@dataclass(frozen=True, slots=True, kw_only=True)
class WantSave:
    """Save at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """End the generation and let `agents` leave. `saved_step`: None if nothing could be committed in time."""

    notices: tuple[Notice, ...]
    saved_step: int | None


Decision = WantSave | HandOver


class Notices:
    """`running`, where it is asked for: whether ranks train, so that there is something to save."""

    def __init__(self) -> None:
        self._open: dict[str, Notice] = {}
        self._leaving: dict[str, Notice] = {}

    @property
    def wakeup_at(self) -> float | None:
        """When `tick` is due (Unix time), None if nothing is open."""
        return min((notice.hand_over_at for notice in self._open.values()), default=None)

    def knows(self, target: str) -> bool:
        return target in self._open or target in self._leaving

    def noticed(self, notice: Notice, *, running: bool) -> list[Decision]:
        if self.knows(notice.target):
            return []
        first = not self._open
        self._open[notice.target] = notice
        if not running:
            return self._hand_over(None)
        return [WantSave()] if first else []

    def saved(self, step: int) -> list[Decision]:
        """The save that was wanted is committed."""
        return self._hand_over(step)

    def not_saved(self) -> list[Decision]:
        """The save that was wanted was given up."""
        return self._hand_over(None)

    def tick(self, now: float) -> list[Decision]:
        wakeup = self.wakeup_at
        return self._hand_over(None) if wakeup is not None and now >= wakeup else []

    def covers(self, rank: int, kind: str) -> Notice | None:
        """The notice that explains why this rank ended in such a way, if there is one."""
        if kind not in _DEATHS:
            return None
        notices = (*self._open.values(), *self._leaving.values())
        return next((notice for notice in notices if rank in notice.ranks), None)

    def generation_ended(self) -> tuple[str, ...]:
        """The agents that have to leave before the next generation; what was to be saved is gone or on its way."""
        self._hand_over(None)
        return tuple(sorted({agent for notice in self._leaving.values() for agent in notice.agents}))

    def members_are(self, agents: frozenset[str]) -> None:
        """Who belongs to the run now: what is gone needs no notice any more."""
        for notices in (self._open, self._leaving):
            for target in [t for t, notice in notices.items() if notice.agents and agents.isdisjoint(notice.agents)]:
                del notices[target]

    def generation_started(self) -> None:
        """Fresh ranks run: what the old ones were told is over."""
        self._leaving = {target: notice for target, notice in self._leaving.items() if notice.agents}

    def _hand_over(self, saved_step: int | None) -> list[Decision]:
        if not self._open:
            return []
        notices = tuple(self._open.values())
        self._leaving |= self._open
        self._open = {}
        return [HandOver(notices=notices, saved_step=saved_step)]
