"""Tells what happens while it happens: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

_LINES_PER_RUN = 6


class Narrator:
    """Writes to one stream; safe to use from several threads, as rich's console is."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._steps = 0
        self._next_line = 0

    def say(self, text: str, *, style: str = "") -> None:
        """One line, with the seconds since the demo began."""
        console = self._progress.console if self._progress else self._console
        console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", style=style, markup=False)

    @contextmanager
    def run(self, title: str, steps: int) -> Iterator[None]:
        """Show one training run of so many steps; within it, `at_step` moves the bar."""
        self._steps, self._next_line = steps, 0
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            self._progress, self._task = progress, progress.add_task(title, total=steps, note="")
            try:
                yield
            finally:
                self._progress = self._task = None

    def at_step(self, step: int, loss: float | None) -> None:
        """The run has finished `step` steps; it may go back after a restore."""
        note = "" if loss is None else f"loss {loss:.3f}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, note=note)
        elif not self._console.is_terminal and step >= self._next_line:
            self.say(f"step {step} of {self._steps}  {note}")
            self._next_line = step + max(1, self._steps // _LINES_PER_RUN)

    def table(self, title: str, rows: list[tuple[str, str, bool]]) -> None:
        """The verdict: a row for each claim, with what was found and whether the claim holds."""
        table = Table(title=title, title_justify="left")
        table.add_column("claim")
        table.add_column("found")
        table.add_column("holds")
        for claim, found, holds in rows:
            table.add_row(claim, found, "yes" if holds else "NO", style="" if holds else "bold red")
        self._console.print(table)
