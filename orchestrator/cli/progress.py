"""Progress bars of long commands: on standard error, and only where that is a terminal, so that what is printed can be
piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def byte_progress(total: int) -> Iterator[Callable[[int], None]]:
    """To be called with each number of bytes that are done."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
