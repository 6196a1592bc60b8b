"""Verdicts on a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from chaos.verdict import Outcome, Verdict

_STYLES = {Outcome.BROKEN: "bold red", Outcome.UNRECOVERED: "bold red", Outcome.SKIPPED: "dim"}


def print_verdicts(title: str, verdicts: Iterable[Verdict], console: Console | None = None) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("guarantee", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("seen", overflow="fold")  # a path is not cut
    for verdict in verdicts:
        table.add_row(verdict.name, verdict.outcome.value, verdict.detail, style=_STYLES.get(verdict.outcome, ""))
    (console or Console(highlight=False)).print(table)
