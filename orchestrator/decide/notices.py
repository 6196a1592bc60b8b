"""What to do about word that a node or a process will be taken away. Events in, decisions out; no clock, no Ray.

Invariants: each notice is answered with a save at once and one hand-over; the hand-over comes as soon as a save is
committed or given up and there is room elsewhere, and before the deadline in any case; where there is no room the ranks
train on, and save again when there is, or shortly before the deadline; notices that come while one is open share its
saves and its hand-over; what its target did in the meantime (a rank killed at the deadline) is put down to the notice
and not to the run.
"""

from dataclasses import dataclass

_MARGIN_SECONDS_MAX = 2.0
_MARGIN_FRACTION = 0.2
_LAST_SAVE_SECONDS_MAX = 20.0
_LAST_SAVE_FRACTION = 0.5
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
        return self.deadline_at - min(_MARGIN_SECONDS_MAX, _MARGIN_FRACTION * self._seconds)

    @property
    def last_save_at(self) -> float:
        """From when on a save is the last one, after which the ranks move whether there is room or not."""
        return self.deadline_at - min(_LAST_SAVE_SECONDS_MAX, _LAST_SAVE_FRACTION * self._seconds)

    @property
    def _seconds(self) -> float:
        return max(0.0, self.deadline_at - self.at)


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
    """`running`: whether ranks train, so that there is something to save. `room`: whether the ranks fit on nodes that
    nobody takes away. `now`: Unix time."""

    def __init__(self) -> None:
        self._open: dict[str, Notice] = {}
        self._leaving: dict[str, Notice] = {}
        self._staying = False  # saved, and no room yet
        self._saved_step: int | None = None

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that will be taken away."""
        notices = (*self._open.values(), *self._leaving.values())
        return frozenset(notice.node for notice in notices if notice.reason == "drain")

    @property
    def wakeup_at(self) -> float | None:
        """When `tick` is due, None if nothing is open."""
        open_now = self._open.values()
        return min((one.last_save_at if self._staying else one.hand_over_at for one in open_now), default=None)

    def knows(self, target: str) -> bool:
        return target in self._open or target in self._leaving

    def noticed(self, notice: Notice, *, running: bool, room: bool) -> list[Decision]:
        if self.knows(notice.target):
            return []
        first = not self._open
        self._open[notice.target] = notice
        if not running:
            return self._move_or_stay(room=room, now=notice.at)
        if first or self._staying:
            self._staying = False
            return [WantSave()]
        return []

    def saved(self, step: int, *, room: bool, now: float) -> list[Decision]:
        """The save that was wanted is committed."""
        self._saved_step = step
        return self._move_or_stay(room=room, now=now)

    def not_saved(self, *, room: bool, now: float) -> list[Decision]:
        """The save that was wanted was given up."""
        return self._move_or_stay(room=room, now=now)

    def tick(self, *, room: bool, now: float) -> list[Decision]:
        """Time has passed, or it may have become known that there is room."""
        if any(now >= notice.hand_over_at for notice in self._open.values()):
            return self._hand_over()
        if self._staying and (room or self._last_save(now)):
            self._staying = False
            return [WantSave()]
        return []

    def covers(self, rank: int, kind: str) -> Notice | None:
        """The notice that explains why this rank ended in such a way, if there is one."""
        if kind not in _DEATHS:
            return None
        notices = (*self._open.values(), *self._leaving.values())
        return next((notice for notice in notices if rank in notice.ranks), None)

    def generation_ended(self, *, room: bool, now: float) -> tuple[str, ...]:
        """The agents that have to leave before the next generation; what was to be saved is gone or on its way."""
        self._move_or_stay(room=room, now=now)
        return tuple(sorted({agent for notice in self._leaving.values() for agent in notice.agents}))

    def members_are(self, agents: frozenset[str]) -> None:
        """Who belongs to the run now: what is gone needs no notice any more."""
        for notices in (self._open, self._leaving):
            for target in [t for t, notice in notices.items() if notice.agents and agents.isdisjoint(notice.agents)]:
                del notices[target]

    def generation_started(self) -> None:
        """Fresh ranks run: what the old ones were told is over."""
        self._leaving = {target: notice for target, notice in self._leaving.items() if notice.agents}

    def _move_or_stay(self, *, room: bool, now: float) -> list[Decision]:
        if room or self._last_save(now):
            return self._hand_over()
        self._staying = bool(self._open)
        return []

    def _last_save(self, now: float) -> bool:
        # Whoever was sent SIGTERM is replaced where it is, or nearby: its node stays.
        return any(notice.reason != "drain" or now >= notice.last_save_at for notice in self._open.values())

    def _hand_over(self) -> list[Decision]:
        notices, saved_step = tuple(self._open.values()), self._saved_step
        self._leaving |= self._open
        self._open, self._staying, self._saved_step = {}, False, None
        return [HandOver(notices=notices, saved_step=saved_step)] if notices else []
