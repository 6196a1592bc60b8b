"""`lastgood dashboards export`: copies dashboards and rules to where Grafana and Prometheus find them."""

from pathlib import Path
from typing import Annotated

import typer

import dashboards
from workers.errors import CallerError, EnvironmentProblem

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where to; it is created if it is not there.")]
Replace = Annotated[bool, typer.Option("--replace", help="Also files that are there and have been changed.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        name="dashboards",
        help="Grafana dashboards and Prometheus rules.",
        no_args_is_help=True,
        add_completion=False,
    )
    group.command()(export)
    group.callback()(_group)
    app.add_typer(group)


def _group() -> None:
    """So that one command alone still has its name."""


def export(directory: Directory, replace: Replace = False) -> None:
    """Write dashboards, rules, provisioning files and an example prometheus.yml."""
    if directory.exists() and not directory.is_dir():
        raise CallerError(f"DIR is {str(directory)!r}, which is a file; it has to be a directory")
    try:
        for path in dashboards.export(directory, replace=replace):
            print(path)
    except FileExistsError as error:
        raise CallerError(f"{error} is there already and differs; --replace writes over it") from None
    except OSError as error:
        raise EnvironmentProblem(f"{directory} cannot be written: {error}") from error
