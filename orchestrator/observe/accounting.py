"""Where a run's time went. Pure: ledger entries in, in their order; an account out, whose parts add up to the whole.

Invariants:
- Each moment since the first entry is in exactly one kind of `KINDS`; so their sum is the time that has passed.
- Nothing that was settled is changed: each kind's seconds, as of an entry, only grow with the entries after it.
- The same entries give the same account, one by one as they are written or all at once after a restart.

Training is productive while it does steps that the run has not done before; steps that it does again, since a failure
took it back, are `repeated`, and count against the failure that took it back furthest and last. That differs from
subtracting what a failure made useless in when it is counted, not in how much, and never makes a number smaller.

How it meets what the ledger cannot know:
- When a step was done between two entries that name one is interpolated.
- Stall and interference are known after they happened: they are taken out of the training that follows.
- What a driver that ended without a word did after its last entry counts as down: nobody knows of these steps, and when
  they are done again, they are productive.
- A driver that is refused writes into the ledger of the one that trains on: what that one says next is believed.

The kinds follow the badput categories of Google's ML Goodput Measurement library, whose names stand in `GOOGLE_NAMES`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.observe.restarts import Restarts

PROGRESS_SECONDS = 60.0
"""How often, at least, a run that trains says in the ledger how far it is."""
SILENT_SECONDS = 3 * PROGRESS_SECONDS
"""One that has said nothing for so long, and has not ended, may be dead."""

KINDS: Mapping[str, str] = {
    "productive": "training steps that the run had not done before",
    "repeated": "training steps done again, since a failure took the run back",
    "save_stall": "the loop stood still for a snapshot",
    "save_interference": "steps took longer while a save was written",
    "startup": "from a driver's start until all ranks had finished a step",
    "detection": "from when a failure struck until the coordinator knew",
    "recovery": "from then until all ranks had finished a step again, restoring left out",
    "restore": "ranks read their state",
    "down": "no driver",
}
"""What a run's time is spent on, and what each kind means."""

GOOGLE_NAMES: Mapping[str, str] = {
    "productive": "PRODUCTIVE_TRAINING",
    "repeated": "WASTED_PROGRESS_FROM_DISRUPTION",
    "save_stall": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "save_interference": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "startup": "PROGRAM_STARTUP",
    "detection": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "recovery": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "restore": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "down": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
}

DRIVER = "driver"
"""The cause that stands for a driver that ended, and took the run back to its last checkpoint with it."""

_LOSING = frozenset({"repeated", "detection", "recovery", "restore"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """`state`: "empty", "starting", "training", "recovering", "finished" or "stopped". `seconds`: by kind, all of
    `KINDS`; they add up to `elapsed_seconds`, which ends with the run."""

    state: str
    seconds: Mapping[str, float]

    @property
    def elapsed_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def goodput_ratio(self) -> float | None:
        """Productive time over all time; None before any has passed."""
        return _ratio(self.seconds["productive"], self.elapsed_seconds)

    @property
    def ettr_ratio(self) -> float | None:
        """Effective training time ratio as Kokolis et al. (2024) define it: time neither spent on getting there, after
        a start or a failure, nor trained again, over the time in which there was a driver. Saves are part of it."""
        return _ratio(self._effective_seconds, self.elapsed_seconds - self.seconds["down"])

    @property
    def ettr_queueing_ratio(self) -> float | None:
        """The same over all time, that between drivers included."""
        return _ratio(self._effective_seconds, self.elapsed_seconds)

    @property
    def _effective_seconds(self) -> float:
        return self.seconds["productive"] + self.seconds["save_stall"] + self.seconds["save_interference"]

    @property
    def save_overhead_ratio(self) -> float | None:
        """The part of the training time that saving took."""
        saving = self.seconds["save_stall"] + self.seconds["save_interference"]
        return _ratio(saving, saving + self.seconds["productive"] + self.seconds["repeated"])


@dataclass(slots=True, kw_only=True)
class FailureCost:
    """One failure, and what it cost so far. Times are Unix seconds, None until they are known.

    `number`: counts from 1 over the run. `cause`: as in the ledger, or `DRIVER`. `step`: the last one done before.
    `restored_step`, `source`: where the next generation began. `stepped_at`: when all ranks had finished a step again;
    `regained_at`: when `step` was done again. `seconds`: of the account, by kind, that it is charged with.
    """

    number: int
    cause: str
    generation: int
    rank: int
    step: int
    failed_at: float
    noticed_at: float
    restored_step: int | None = None
    source: str | None = None
    stepped_at: float | None = None
    regained_at: float | None = None
    lost_samples: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(sorted(_LOSING), 0.0))

    @property
    def lost_steps(self) -> int:
        return 0 if self.restored_step is None else max(0, self.step - self.restored_step)

    @property
    def lost_seconds(self) -> float:
        return math.fsum(self.seconds.values())


class Accounting:
    """Takes entries in the order in which they were written. `costs`: of all failures, in that order."""

    def __init__(self) -> None:
        self.costs: list[FailureCost] = []
        self.generation = 0
        self.step = 0  # the highest that the run has done
        self.steps_done = 0  # those done again included
        self.stepped_at: float | None = None  # when the last one that the ledger names was done
        self.failures_without_progress = 0  # since a step was done that had not been done before
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._owed = {"save_stall": 0.0, "save_interference": 0.0}
        self._clock: float | None = None  # all before is settled
        self._last_at = 0.0
        self._state = "empty"
        self._over = False  # the run has ended, and nothing but another driver changes that
        self._failed = False  # the newest generation has
        self._driver = ""
        self._generation_driver = ""
        self._position = 0  # the last step done in the newest generation
        self._open: list[FailureCost] = []  # whose step is not regained, or whose ranks have not stepped
        self._restarts = Restarts()
        self._snapshot = (0, 0)
        self._samples_per_step = 0.0

    @property
    def regaining(self) -> int | None:
        """The step that is to be done again; None if the run is where it has not been before."""
        return self.step if self._position < self.step else None

    @property
    def state(self) -> str:
        """As an account has it."""
        return self._state

    @property
    def position(self) -> int:
        """The last step that the newest generation is known to have done."""
        return self._position

    def add_all(self, entries: Iterable[Mapping[str, Any]]) -> "Accounting":
        for entry in entries:
            self.add(entry)
        return self

    def add(self, entry: Mapping[str, Any]) -> None:
        """An entry of any kind; those that say nothing of this only show that the run was there."""
        kind, at = entry["kind"], float(entry["at"])
        self._restarts.take(entry)
        if self._clock is None:
            self._clock, self._last_at, self._state = at, at, "starting"
        if kind == "coordinator":
            self._coordinator(entry, at)
        elif kind == "generation":
            self._begin(entry, at)
        elif kind == "failure":
            self._failure(entry, at)
        elif kind == "stopped" and entry.get("driver") in (self._driver, self._generation_driver):
            self._end("stopped", at, over=entry.get("driver") == self._generation_driver or not self.generation)
        elif kind == "fenced" and entry.get("driver") == self._generation_driver:
            self._end("stopped", at, over=True)
        elif entry.get("generation") == self.generation and not self._failed and not self._over:
            self._of_generation(kind, entry, at)
        self._last_at = max(self._last_at, at)

    def at(self, now: float | None = None) -> Account:
        """The account at that time, for a run that is alive; None: as of the last entry."""
        seconds = dict(self._seconds)
        now = self._last_at if now is None else now
        if self._clock is not None and not self._ended and now > self._clock:
            for kind, part in self._parts(self._kind, now - self._clock).items():
                seconds[kind] += part
        return Account(state=self._state, seconds=seconds)

    def settled(self) -> Account:
        """What no later entry changes: each kind's seconds only ever grow, also if the ledger is read anew. It ends
        with the last entry that says what the time before was spent on."""
        return Account(state=self._state, seconds=dict(self._seconds))

    # ------------------------------------------------------------ entries

    def _coordinator(self, entry: Mapping[str, Any], at: float) -> None:
        if entry["resumed"]:
            return
        if not self._ended:
            self._advance(self._last_at)
        self._advance(at, "down")
        self._driver, self._state, self._over = entry["driver"], "starting", False

    def _begin(self, entry: Mapping[str, Any], at: float) -> None:
        if entry["generation"] <= self.generation:
            return
        if self._state == "training":  # nobody said that it failed
            self._state = "recovering"
        self._advance(at)
        restored = int(entry["restored_step"])
        unanswered = [cost for cost in self._open if cost.restored_step is None]
        if not unanswered and self.step > restored and self.generation:
            unanswered = [self._add_cost(DRIVER, rank=-1, step=self.step, failed_at=self._last_at, noticed_at=at)]
        for cost in unanswered:
            cost.restored_step, cost.source = restored, entry.get("source", "fresh")
            cost.lost_samples = cost.lost_steps * self._samples_per_step
        self.generation, self._generation_driver = entry["generation"], entry.get("driver", self._driver)
        self._position, self._failed, self._over = restored, False, False
        if self._state == "stopped":
            self._state = "starting"

    def _failure(self, entry: Mapping[str, Any], at: float) -> None:
        if entry["generation"] != self.generation or self._failed or self._over:
            return
        failed_at = min(float(entry["failed_at"]), at)
        step = max(int(entry["step"]), self._position)
        if self._state == "training":
            self._reached(step, failed_at)
        else:  # a step that some ranks had done, and not all
            self._advance(failed_at)
            self._moved_to(step)
            self.step = max(self.step, step)
        noticed_at = float(entry.get("noticed_at") or at)
        self._add_cost(entry["cause"], rank=entry["rank"], step=step, failed_at=failed_at, noticed_at=noticed_at)
        self.failures_without_progress += 1
        self._failed, self._state = True, "recovering"
        self._advance(min(noticed_at, at), "detection")

    def _of_generation(self, kind: str, entry: Mapping[str, Any], at: float) -> None:
        if kind == "first_step":
            if self._restarts.stepped_at is not None and self._state != "training":
                self._reached(int(entry["step"]), min(at, self._restarts.stepped_at))
        elif kind == "restored":
            if self._state != "training":
                self._advance(at - float(entry.get("seconds", 0.0)))
                self._advance(at, "restore")
        elif kind == "progress":
            self._reached(int(entry["step"]), float(entry["at_step"]))
            self._owed["save_stall"] += float(entry.get("stall_seconds", 0.0))
        elif kind == "snapshot":
            self._reached(int(entry["step"]), at - float(entry.get("copy_seconds", 0.0)))
            if (key := (self.generation, int(entry["step"]))) > self._snapshot:  # not again for another attempt
                self._snapshot = key
                self._owed["save_stall"] += float(entry.get("stall_seconds", 0.0))
        elif kind == "commit":
            self._reached(
                int(entry["step"]), float(entry.get("snapshot_at", at)) - float(entry.get("copy_seconds", 0.0))
            )
            self._owed["save_interference"] += max(0.0, float(entry.get("interference_seconds", 0.0)))
            if entry["step"] and entry.get("samples"):
                self._samples_per_step = entry["samples"] / entry["step"]
        elif kind == "finished":
            self._reached(int(entry["step"]), at)
            self._end("finished", at, over=True)

    def _end(self, state: str, at: float, *, over: bool) -> None:
        if not self._ended:
            self._advance(at)
        self._state, self._over = state, over

    # ------------------------------------------------------------ time

    @property
    def _ended(self) -> bool:
        return self._state in ("finished", "stopped")

    @property
    def _kind(self) -> str:
        """What time is spent on now."""
        if self._state == "training":
            return "repeated" if self._position < self.step else "productive"
        return {"starting": "startup", "recovering": "recovery"}.get(self._state, "down")

    def _reached(self, step: int, at: float) -> None:
        """The newest generation had done `step` by then."""
        assert self._clock is not None
        began_at, began = self._clock, self._position
        at = max(at, self._clock)
        if self._state != "training":
            # What came before the first step that is known of was not training.
            self._advance(at)
            self._state, began_at, began = "training", at, step
            for cost in self._open:
                if cost.restored_step is not None and cost.stepped_at is None:
                    cost.stepped_at = at
        for level in sorted({cost.step for cost in self._open if cost.step <= step} | {min(self.step, step), step}):
            if level > began:
                self._advance(began_at + (at - began_at) * (level - began) / (step - began))
            self._moved_to(level)
            self._note_regained()
        self._advance(at)
        self.step = max(self.step, step)

    def _moved_to(self, step: int) -> None:
        if step > self._position:
            self.stepped_at = self._clock
        if step > self.step:
            self.failures_without_progress = 0
        self.steps_done += max(0, step - self._position)
        self._position = max(self._position, step)

    def _note_regained(self) -> None:
        for cost in list(self._open):
            if cost.stepped_at is not None and cost.step <= self._position:
                cost.regained_at = self._clock
                self._open.remove(cost)

    def _culprit(self) -> FailureCost | None:
        """The failure that what happens now is charged to: of those that took the run back beyond here, the last."""
        return next(
            (cost for cost in reversed(self._open) if cost.stepped_at is None or cost.step > self._position), None
        )

    def _add_cost(self, cause: str, *, rank: int, step: int, failed_at: float, noticed_at: float) -> FailureCost:
        number = len(self.costs) + 1
        self.costs.append(
            FailureCost(
                number=number,
                cause=cause,
                generation=self.generation,
                rank=rank,
                step=step,
                failed_at=failed_at,
                noticed_at=noticed_at,
            )
        )
        self._open.append(self.costs[-1])
        return self.costs[-1]

    def _advance(self, to: float, kind: str | None = None) -> None:
        """Settle the time until then."""
        assert self._clock is not None
        if to <= self._clock:
            return
        parts = self._parts(kind or self._kind, to - self._clock)
        self._clock = to
        culprit = self._culprit()
        for name, part in parts.items():
            self._seconds[name] += part
            if name in self._owed:
                self._owed[name] -= part
            elif culprit is not None and name in _LOSING:
                culprit.seconds[name] += part

    def _parts(self, kind: str, seconds: float) -> dict[str, float]:
        """Time of that kind, with what saves owe taken out."""
        parts = {}
        if kind in ("productive", "repeated"):
            for name, owed in self._owed.items():
                if owed > 0:
                    parts[name] = min(owed, seconds)
                    seconds -= parts[name]
        return parts | {kind: seconds}


def account_of(entries: Iterable[Mapping[str, Any]]) -> Account:
    """As of the last entry."""
    return Accounting().add_all(entries).at()


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
