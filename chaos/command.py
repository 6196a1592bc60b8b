"""`lastgood chaos`: the group of commands that attack and judge. Each command lives beside what it runs."""

from collections.abc import Callable
from importlib import import_module

import typer

# Modules with a function `register(app)`; they import torch and Ray only when their command runs.
_COMMANDS: tuple[str, ...] = ("chaos.crash_states.command",)


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        name="chaos",
        help="Attack a run where it hurts, and judge what is left.",
        no_args_is_help=True,
        add_completion=False,
    )
    for module in _COMMANDS:
        add: Callable[[typer.Typer], None] = import_module(module).register
        add(group)
    app.add_typer(group)
