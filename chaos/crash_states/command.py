"""`lastgood chaos crash-states`: what a power loss may leave of a run, state by state (docs/crash-states.md)."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from chaos.verdict import Verdict, exit_code
from orchestrator.cli.signals import ended_by_signals

if TYPE_CHECKING:
    from chaos.crash_states.campaign import Findings

_STATES = 100_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="crash-states")(crash_states)


def crash_states(
    states: Annotated[int, typer.Option(help="How many different states to judge, at least.", min=1)] = _STATES,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes to run in.  [default: as many as there are CPUs]", min=1)
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Look at dcp.save and at Ray Train's checkpoint index too; needs strace.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes.  [default: a new temporary directory]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try what a power loss may leave of real saves: every state is recovered from, and judged.

    Exits with 3 if a guarantee is broken, or a mutant of the protocol is not caught.
    """
    from chaos.crash_states import campaign
    from chaos.report import report_dir, write_report

    directory = report_dir(out, "crash-states")
    print(f"seed {seed}", file=sys.stderr)
    with ended_by_signals(), _progress(states) as told:
        found = campaign.timed(
            lambda: campaign.search_all(
                seed=seed, states=states, jobs=jobs or len(os.sched_getaffinity(0)), peers=peers, told=told
            )
        )
    verdicts = campaign.verdicts(found)
    command = f"lastgood chaos crash-states --seed {seed} --states {states}{' --peers' if peers else ''}"
    page = write_report(directory, title="Crash states", command=command, seed=seed, verdicts=verdicts)
    if as_json:
        print(json.dumps(campaign.as_json(found) | {"report": str(page)}, indent=2))
    else:
        _write(found, verdicts, Console())
        print(f"report: {page}")
    raise typer.Exit(exit_code(verdicts))


def _write(found: "Findings", verdicts: list[Verdict], console: Console) -> None:
    table = Table(title=f"States after a power loss, {found.seconds:.0f} s")
    for column in ("", "runs", "states", "classes", "violations"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [(f"all of {ranks} ranks", tally) for ranks, tally in sorted(found.small.items())]
    rows += [("on object storage", found.objects), ("two drivers at once", found.rivals)]
    for name, tally in (*rows, ("drawn", found.drawn), ("together", found.total)):
        numbers = (tally.recordings, len(tally.states), len(tally.classes), tally.violations)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(table)
    table = Table(title="Mutants and peers")
    for column in ("", "outcome", "what was seen"):
        table.add_column(column)
    ours = [verdict for verdict in verdicts if verdict.name.startswith("states")]
    for verdict in (one for one in verdicts if one not in ours):
        facts = verdict.facts
        outcome = ("caught" if facts["caught"] else "NOT CAUGHT") if "caught" in facts else verdict.outcome.value
        if verdict.name.startswith("peer") and not facts["skipped"]:
            outcome = f"{facts['violations']} of {facts['states']}"
        table.add_row(verdict.name, outcome, verdict.detail)
    console.print(table)
    for verdict in ours:
        console.print(f"{verdict.name}: {verdict.outcome.value}: {verdict.detail}", highlight=False)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal, how many states are judged; on standard error, so that the output can be piped."""
    columns = (TextColumn("states"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)
