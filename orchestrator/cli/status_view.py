"""How a run is doing, as lines for a terminal, once or again and again, and as JSON."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from orchestrator.observe import words
from orchestrator.observe.accounting import SILENT_SECONDS
from orchestrator.observe.discovery import exporter_url
from orchestrator.observe.summary import Summary
from orchestrator.observe.tail import Tail

_POLL_SECONDS = 0.5
_LABEL = 12
_STYLES = {"training": "green", "finished": "green", "stopped": "bold red", "recovering": "yellow", "starting": "cyan"}


class Doing:
    """A run's summary, and where it can be seen. `metrics_url`, `page_url`: None if there are none, or the run has
    ended."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._exporter: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.summary.state in ("finished", "stopped")

    def silent_seconds(self, now: float) -> float | None:
        """For how long a run that has not ended has written nothing; None if that is not long."""
        last_at = self.summary.last_at
        return None if self.ended or last_at is None or now - last_at <= SILENT_SECONDS else now - last_at

    @property
    def metrics_url(self) -> str | None:
        return None if self._exporter is None or self.ended else exporter_url(self._exporter)

    @property
    def page_url(self) -> str | None:
        return self.metrics_url and self.metrics_url.removesuffix("metrics")

    def take_all(self, entries: Iterable[dict[str, Any]]) -> "Doing":
        for entry in entries:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # of another version
                self.summary.add(entry)
            if entry["kind"] == "exporter":
                self._exporter = entry
            elif entry["kind"] == "coordinator" and not entry.get("resumed"):
                self._exporter = None
        return self

    def as_json(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "state": summary.state,
            "step": summary.accounting.position,
            "generation": summary.generation,
            "ranks": summary.ranks,
            "restored_from": summary.source,
            "committed_step": summary.committed_step,
            "committed_at": summary.committed_at,
            "checkpoint": summary.checkpoint,
            "commits": summary.commits,
            "saves_skipped": summary.skipped,
            "saves_failed": summary.failed_saves,
            "durable_seconds_median": summary.durable_seconds_median,
            "failures": dict(summary.failures),
            "lost_steps": summary.lost_steps,
            "time_seconds": dict(summary.accounting.at().seconds),
            "goodput_ratio": summary.accounting.at().goodput_ratio,
            "batches_skipped": summary.batches_skipped,
            "recovery_seconds": summary.recovery_seconds,
            "quarantined": summary.quarantined,
            "stop_reason": summary.stop_reason,
            "unprotected_since": summary.unprotected_since,
            "metrics_url": self.metrics_url,
            "page_url": self.page_url,
            "last_at": summary.last_at,
        }


def show(doing: Doing, now: float) -> None:
    """Print the lines once."""
    _console().print(_text(doing, now))


def watch(tail: Tail, *, as_json: bool) -> None:
    """Until the run has ended. On a terminal the lines stay in place; elsewhere they are printed when they change in
    anything but their ages."""
    doing = Doing().take_all(tail.read())
    console = _console()
    if as_json or not console.is_terminal:
        told = ""
        while True:
            now = time.time()
            text = json.dumps(doing.as_json()) if as_json else _text(doing, now).plain
            fresh = text if as_json else _text(doing, doing.summary.last_at or 0.0).plain
            if not as_json and doing.silent_seconds(now) is not None:
                fresh += "silent"
            if fresh != told:
                print(text if as_json or not told else f"\n{text}", flush=True)
                told = fresh
            if doing.ended:
                return
            time.sleep(_POLL_SECONDS)
            doing.take_all(tail.read())
    with Live(_text(doing, time.time()), console=console, auto_refresh=False, transient=False) as live:
        while not doing.ended:
            time.sleep(_POLL_SECONDS)
            doing.take_all(tail.read())
            live.update(_text(doing, time.time()), refresh=True)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def _text(doing: Doing, now: float) -> Text:
    text = Text()
    for label, told in _lines(doing, now):
        style = "bold red" if label in ("UNPROTECTED", "SILENT") else "dim"
        text.append(f"{label:<{_LABEL - 1}} ", style)
        text.append(f"{words.visible(told)}\n", _STYLES.get(doing.summary.state, "") if label == "state" else "")
    text.right_crop(1)
    return text


def _lines(doing: Doing, now: float) -> Iterator[tuple[str, str]]:
    summary = doing.summary
    origin = {"memory": ", restored from memory", "checkpoint": ", restored from a checkpoint"}.get(
        summary.source or "", ""
    )
    yield "state", f"{summary.state}, generation {summary.generation}, {summary.ranks} ranks{origin}"
    if (silent := doing.silent_seconds(now)) is not None:
        yield "SILENT", f"nothing was written for {silent:,.0f} s; unless it waits for Ray, its driver is gone"
    regaining = summary.accounting.regaining
    before = f", done before up to {regaining}" if regaining is not None else ""
    yield "step", f"{summary.accounting.position}" + ("" if doing.ended else f" or later{before}")
    age = f", {max(0.0, now - summary.committed_at):,.0f} s ago" if summary.committed_at is not None else ""
    yield "protected", f"up to {summary.protected_to}{age}" if age else summary.protected_to
    if summary.unprotected_since is not None:
        yield "UNPROTECTED", f"nothing was saved for {now - summary.unprotected_since:.0f} s, saves fail"
    durable = summary.durable_seconds_median
    cost = f", durable after {durable:.2f} s (median)" if durable is not None else ""
    yield "saves", f"{summary.commits} committed, {summary.skipped} skipped, {summary.failed_saves} failed{cost}"
    causes = ", ".join(f"{cause} {count}" for cause, count in summary.failures.most_common())
    yield "failures", f"{summary.failures.total()}{f' ({causes})' if causes else ''}"
    recovery = summary.recovery_seconds_median
    yield (
        "lost",
        f"{summary.lost_steps} steps trained again"
        + (f", {recovery:.2f} s from a failure to training (median)" if recovery is not None else ""),
    )
    account = summary.accounting.at()
    if account.goodput_ratio is not None:
        spent = sorted(account.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind.replace('_', ' ')} {seconds:,.1f} s" for kind, seconds in spent if seconds >= 0.05)
        yield "time", f"{100 * account.goodput_ratio:.1f} % productive ({parts})"
    if summary.batches_skipped:
        yield "left out", f"{summary.batches_skipped} batches, whose loss or gradient norm was bad"
    last = summary.last_failure
    if last is not None:
        code = "" if last["exit_code"] is None else f" {last['exit_code']}"
        who = f"rank {last['rank']}" if last["rank"] >= 0 else "no single rank"
        yield "last cause", f"{who} after step {last['step']}: {last['error'] or last['cause'] + code}"
    for name, reason in summary.quarantined.items():
        yield "quarantine", f"{name}: {reason}"
    if summary.stop_reason is not None:
        yield "stopped", summary.stop_reason.splitlines()[-1] if summary.stop_reason else ""
    if doing.page_url is not None and doing.metrics_url is not None:
        yield "page", doing.page_url
        yield "metrics", doing.metrics_url
