"""`lastgood chaos points`: what can be attacked."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from chaos.points import POINTS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(points)


def points(
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one JSON object for each point.")] = False,
) -> None:
    """List the fault points: where each lies, in which process, and what can be injected there."""
    if as_json:
        print(json.dumps([asdict(point) for point in POINTS], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("point", "process", "right before", "faults"):
        table.add_column(column, no_wrap=column != "right before")
    for point in POINTS:
        table.add_row(point.name, point.process, point.what, ", ".join(point.faults))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a line for each, whatever reads it
    console.print(table)
