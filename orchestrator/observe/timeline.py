"""What a run went through, from its ledger: spans of time, marks in them, and happenings in words. Pure: entries in.

- spans: what the run did from when until when: "starting", "training", "recovering" (from the moment that a failure
  struck until all ranks had done a step again) or "down" (no driver: from the last that is known of one until the next
  one's coordinator). They touch; the last one is open until the run ends.
- marks: commits, failures and restores, for drawing.
- happenings: the ledger's entries that a person wants to read, said in words. Commits in a row are one happening.

Everything is bounded, so that the timeline of a run of months can be kept in the coordinator: the oldest go first.
How long the parts took in all is `accounting`'s business.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.observe import words
from orchestrator.observe.restarts import Restarts

_SPANS_MAX = 4000
_MARKS_MAX = 8000
_HAPPENINGS_MAX = 400
_ROW_SECONDS = 600.0
"""Commits in a row are told as one happening for so long; then the next one begins, so that a quiet run shows life."""


@dataclass(slots=True)
class Span:
    """`until`: None while it lasts. `cause`: of the failure, while recovering."""

    kind: str
    since: float
    until: float | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """`kind`: "commit", "failure" or "restore"."""

    kind: str
    at: float
    step: int


@dataclass(slots=True)
class Happening:
    """`tone`: "bad", "warn", "good" or "plain"."""

    at: float
    kind: str
    tone: str
    title: str
    detail: str = ""


@dataclass(slots=True)
class Timeline:
    """Takes entries in the order in which they were written. `started_at`, `ended_at`: None before that."""

    started_at: float | None = None
    ended_at: float | None = None
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_SPANS_MAX))
    commits: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS_MAX))
    failures: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS_MAX))
    restores: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS_MAX))
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=_HAPPENINGS_MAX))
    _restarts: Restarts = field(default_factory=Restarts)
    _first_steps: set[int] = field(default_factory=set)
    _ranks: int = 0
    _generation: int = 0
    _last_at: float = 0.0
    _row: list[int] = field(default_factory=list)
    _row_began: float = 0.0

    def take(self, entry: Mapping[str, Any]) -> None:
        """An entry of any kind."""
        at = float(entry["at"])
        if self.started_at is None:
            self.started_at = at
        restart = self._restarts.take(entry)
        self._span(entry, at)
        self._mark(entry, at)
        if entry["kind"] == "commit":
            self._commit(entry, at)
        elif (said := words.say(entry)) is not None:
            self.happenings.append(Happening(at, str(entry["kind"]), *said))
        if restart is not None:
            title = f"Training again, {words.duration(restart.seconds)} after the failure"
            self.happenings.append(Happening(at, "recovered", "good", title))
        self._last_at = max(self._last_at, at)

    def take_all(self, entries: Iterable[Mapping[str, Any]]) -> "Timeline":
        for entry in entries:
            self.take(entry)
        return self

    # ------------------------------------------------------------ spans

    def _span(self, entry: Mapping[str, Any], at: float) -> None:
        match entry["kind"]:
            case "coordinator" if not entry.get("resumed"):
                if self.spans and self.ended_at is None:
                    self._begin("down", self._last_at)
                elif self.spans:
                    self._begin("down", self.ended_at or at)
                self.ended_at = None
                self._begin("starting", at)
            case "generation":
                self._generation, self._ranks = entry["generation"], entry["ranks"]
                self._first_steps.clear()
            case "first_step" if entry["generation"] == self._generation:
                self._first_steps.add(entry["rank"])
                if len(self._first_steps) == self._ranks:
                    self._begin("training", float(entry["at_step"]))
            case "failure":
                self._fail(float(entry["failed_at"]), str(entry["cause"]))
            case "finished" | "stopped" | "fenced":
                self._close(at)
                self.ended_at = at
            case "commit" if self.ended_at is not None and entry["generation"] == self._generation:
                # It was another driver that stopped, which this one's processes kept out.
                self._begin("training", self.ended_at)
                self.ended_at = None

    def _fail(self, failed_at: float, cause: str) -> None:
        if self.spans and self.spans[-1].kind in ("starting", "recovering") and self.spans[-1].until is None:
            return  # a failure before all ranks had done a step: still the same restart
        self._begin("recovering", failed_at, cause)

    def _begin(self, kind: str, at: float, cause: str | None = None) -> None:
        at = max(at, self.spans[-1].since) if self.spans else at
        self._close(at)
        self.spans.append(Span(kind, at, cause=cause))

    def _close(self, at: float) -> None:
        if self.spans and (self.spans[-1].until is None or self.spans[-1].until > at):
            self.spans[-1].until = max(at, self.spans[-1].since)

    # ------------------------------------------------------------ marks and words

    def _mark(self, entry: Mapping[str, Any], at: float) -> None:
        match entry["kind"]:
            case "commit":
                self.commits.append(Mark("commit", at, entry["step"]))
            case "failure":
                self.failures.append(Mark("failure", float(entry["failed_at"]), max(0, entry["step"])))
            case "generation" if entry.get("source", "fresh") != "fresh":
                self.restores.append(Mark("restore", at, entry["restored_step"]))

    def _commit(self, entry: Mapping[str, Any], at: float) -> None:
        last = self.happenings[-1] if self.happenings else None
        if last is None or last.kind != "commit" or at - self._row_began > _ROW_SECONDS:
            self._row, self._row_began = [], at
            last = Happening(at, "commit", "good", "")
            self.happenings.append(last)
        self._row.append(entry["step"])
        last.at = at
        last.title, last.detail = words.commits(self._row, entry)
