"""`lastgood events` and `lastgood status`: what happened in a run, and how it is doing, from its ledger.

Both read only, work on a run that is alive, finished or dead, and need neither Ray nor torch. Text from a run is shown
without what would steer a terminal. Off a terminal nothing is animated and nothing coloured.
"""

import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import status_view
from orchestrator.observe import words
from orchestrator.observe.ledger import LEDGER_FILE
from orchestrator.observe.tail import Tail
from workers.errors import CallerError

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: storage_path/name.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on with what happens from now on, until interrupted.")]
EventsJson = Annotated[bool, typer.Option("--json", help="Print the ledger's lines as they are: one JSON object each.")]
Watch = Annotated[bool, typer.Option("--watch", help="Go on until the run has ended, or until interrupted.")]
StatusJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; with --watch one for each change.")]

_POLL_SECONDS = 0.2
_HEAD = ("v", "seq", "at", "kind")
_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(events)
    app.command()(status)


def events(run_dir: RunDir, follow: Follow = False, as_json: EventsJson = False) -> None:
    """Print what happened in a run, one line an event."""
    try:
        for entry in _entries(_tail(run_dir, wait=follow), follow):
            print(json.dumps(entry) if as_json else _line(entry), flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def status(run_dir: RunDir, watch: Watch = False, as_json: StatusJson = False) -> None:
    """Say in a few lines how a run is doing."""
    try:
        tail = _tail(run_dir, wait=watch)
        if watch:
            status_view.watch(tail, as_json=as_json)
            return
        doing = status_view.Doing().take_all(tail.read())
        print(json.dumps(doing.as_json())) if as_json else status_view.show(doing, time.time())
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def _tail(run_dir: Path, *, wait: bool) -> Tail:
    """Of the run's ledger, once there is one; CallerError if there is none and it is not waited for."""
    tail = Tail(run_dir / LEDGER_FILE)
    if not tail.exists():
        if not wait:
            raise CallerError(f"{run_dir} has no {LEDGER_FILE}; RUN_DIR is the storage_path/name of a supervised run")
        print(f"lastgood: {run_dir} has no {LEDGER_FILE} yet; waiting for a run to begin there", file=sys.stderr)
        while not tail.exists():
            time.sleep(_POLL_SECONDS)
    return tail


def _entries(tail: Tail, follow: bool) -> Iterator[dict[str, Any]]:
    yield from tail.read()
    while follow:
        time.sleep(_POLL_SECONDS)
        yield from tail.read()


def _line(entry: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    fields = "  ".join(f"{key}={_value(value)}" for key, value in entry.items() if key not in _HEAD)
    return words.visible(f"{at}Z  {entry['kind']:<14}  {fields}")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\n", "\\n") if len(text) <= 200 else f"{text[:200]!r}..."
