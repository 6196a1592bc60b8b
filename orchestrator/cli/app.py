"""The command `lastgood`: gathers the commands that installed packages offer, and maps errors to exit codes.

Commands register through the entry point group `lastgood.commands`, so that packages above this one (chaos) can add
theirs. A registered module imports Ray, torch and numpy only when its command runs: listing commands must stay
fast, and a command may have to fork, which numpy's threads would not let it.

Exit codes: 0 done; 2 wrong usage; 3 a guarantee is broken; 5 the environment cannot run it; 1 anything else.
"""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from workers.errors import LastgoodError

COMMAND_GROUP = "lastgood.commands"


def build_app() -> typer.Typer:
    """The application with every registered command."""
    app = typer.Typer(
        name="lastgood",
        help="Keeps sharded PyTorch training on Ray Train alive.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def options(
        show_version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        pass

    for entry in sorted(entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name):
        register: Callable[[typer.Typer], None] = entry.load()
        register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lastgood {version('lastgood')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; an error that lastgood raised on purpose becomes one line and its class's exit code."""
    try:
        build_app()()
    except LastgoodError as error:
        print(f"lastgood: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
