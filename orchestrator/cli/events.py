"""`lastgood events` and `lastgood status`: what happened in a run, and how it is doing, from its ledger.

Both read only, work on a run that is alive, finished or dead, and need neither Ray nor torch.
"""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.observe.discovery import exporter_url, last_exporter
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from orchestrator.observe.summary import Summary, summarize
from workers.errors import CallerError

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: storage_path/name.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on with what happens from now on, until interrupted.")]
EventsJson = Annotated[bool, typer.Option("--json", help="Print the ledger's lines as they are: one JSON object each.")]
StatusJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_POLL_SECONDS = 0.2
_HEAD = ("v", "seq", "at", "kind")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(events)
    app.command()(status)


def events(run_dir: RunDir, follow: Follow = False, as_json: EventsJson = False) -> None:
    """Print what happened in a run, one line an event."""
    for entry in _entries(run_dir, follow):
        print(json.dumps(entry) if as_json else _line(entry), flush=follow)


def status(run_dir: RunDir, as_json: StatusJson = False) -> None:
    """Say in a few lines how a run is doing."""
    entries = list(_entries(run_dir, follow=False))
    summary = summarize(entries)
    exporter = last_exporter(entries)
    url = exporter_url(exporter) if exporter is not None else None
    if as_json:
        print(json.dumps(_as_json(summary) | {"metrics_url": url}))
    else:
        print("\n".join(_lines(summary, time.time())))
        if url is not None and summary.state not in ("finished", "stopped"):
            print(f"metrics     {url}")


def _entries(run_dir: Path, follow: bool) -> Iterator[dict[str, Any]]:
    ledger = run_dir / LEDGER_FILE
    if not ledger.is_file():
        raise CallerError(f"{run_dir} has no {LEDGER_FILE}; RUN_DIR is the storage_path/name of a supervised run")
    told = 0
    while True:
        entries = read_ledger(ledger)
        yield from entries[told:]
        told = len(entries)
        if not follow:
            return
        time.sleep(_POLL_SECONDS)


def _line(entry: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    fields = "  ".join(f"{key}={_value(value)}" for key, value in entry.items() if key not in _HEAD)
    return f"{at}Z  {entry['kind']:<14}  {fields}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\n", "\\n") if len(text) <= 200 else f"{text[:200]!r}..."


def _lines(summary: Summary, now: float) -> Iterator[str]:
    origin = {"memory": ", restored from memory", "checkpoint": ", restored from a checkpoint"}.get(
        summary.source or "", ""
    )
    yield f"state       {summary.state}, generation {summary.generation}, {summary.ranks} ranks{origin}"
    yield f"step        {summary.step} or later"
    age = f", {now - summary.committed_at:,.0f} s ago" if summary.committed_at is not None else ""
    yield f"protected   up to {summary.protected_to}{age}" if age else f"protected   {summary.protected_to}"
    if summary.unprotected_since is not None:
        yield f"UNPROTECTED nothing was saved for {now - summary.unprotected_since:.0f} s, saves fail"
    durable = summary.durable_seconds_median
    cost = f", durable after {durable:.2f} s (median)" if durable is not None else ""
    yield f"saves       {summary.commits} committed, {summary.skipped} skipped, {summary.failed_saves} failed{cost}"
    causes = ", ".join(f"{cause} {count}" for cause, count in summary.failures.most_common())
    yield f"failures    {summary.failures.total()}{f' ({causes})' if causes else ''}"
    recovery = summary.recovery_seconds_median
    yield f"lost        {summary.lost_steps} steps trained again" + (
        f", {recovery:.2f} s from a failure to training (median)" if recovery is not None else ""
    )
    account = summary.accounting.at()
    if account.goodput_ratio is not None:
        spent = sorted(account.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind.replace('_', ' ')} {seconds:,.1f} s" for kind, seconds in spent if seconds >= 0.05)
        yield f"time        {100 * account.goodput_ratio:.1f} % productive ({parts})"
    if summary.batches_skipped:
        yield f"left out    {summary.batches_skipped} batches, whose loss or gradient norm was bad"
    last = summary.last_failure
    if last is not None:
        code = "" if last["exit_code"] is None else f" {last['exit_code']}"
        who = f"rank {last['rank']}" if last["rank"] >= 0 else "no single rank"
        yield f"last cause  {who} after step {last['step']}: {last['error'] or last['cause'] + code}"
    for name, reason in summary.quarantined.items():
        yield f"quarantine  {name}: {reason}"
    if summary.stop_reason is not None:
        yield f"stopped     {summary.stop_reason.splitlines()[-1]}"


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "state": summary.state,
        "step": summary.step,
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
        "last_at": summary.last_at,
    }
