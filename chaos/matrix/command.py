"""`lastgood chaos matrix`. docs/chaos-matrix.md describes it."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chaos.demo.command import _standard_output_set_aside
from chaos.matrix.cells import WORLD_SIZES
from chaos.verdict import Outcome, Verdict, counts, exit_code
from workers.errors import CallerError, EnvironmentProblem

_MEMORY_BYTES_PER_JOB = 1 << 30
_RANKS_MAX = 8


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(matrix)


def matrix(
    only: Annotated[
        str | None, typer.Option(help="Only cells whose name contains this, or matches it as a shell's pattern.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the training, and the order of the cells.", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Cells tried at a time; they wait a lot.  [default: two for each CPU]", min=1)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the report goes, and verdicts, to go on from.  [default: a new temporary directory]"),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="How many ranks; may be repeated.  [default: 2 and 3]")
    ] = None,
    with_ray: Annotated[
        bool, typer.Option("--ray", help="Supervised runs on a real Ray: up to a minute a cell, one after the other.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and all else to stderr.")] = False,
) -> None:
    """Try every fault at every point of save, commit and restore, each in a small run of its own.

    Exits with 0 if everything that can be tried held, 3 if a guarantee is broken, 4 if a run never recovered, 2 for
    wrong usage, 5 if this machine cannot do it.
    """
    from chaos.matrix.cells import all_cells
    from chaos.matrix.runner import Settings, chosen, evidence, run_cells
    from workers.forks import ONE_THREAD

    sizes = tuple(sorted(set(ranks))) if ranks else WORLD_SIZES
    if min(sizes) < 2:
        raise CallerError(
            f"--ranks is {min(sizes)}; it has to be at least 2, for what one rank loses others must survive"
        )
    if max(sizes) > _RANKS_MAX:
        raise CallerError(f"--ranks is {max(sizes)}; it has to be at most {_RANKS_MAX}: each cell forks that many")
    cells = chosen(all_cells(sizes, supervised=with_ray), only)
    if not cells:
        raise CallerError(f"--only is {only!r}, which no cell's name contains; without it all are tried")
    jobs = 1 if with_ray else jobs or 2 * len(os.sched_getaffinity(0))
    _require_environment(jobs)
    os.environ.update(ONE_THREAD)  # what is imported next starts threads otherwise, and then nothing can be forked
    from chaos.report import report_dir, run_timeline, write_report

    settings = Settings(out=report_dir(out, "matrix"), seed=seed, jobs=jobs, supervised=with_ray)
    command = _command(seed=seed, only=only, sizes=sizes, with_ray=with_ray)
    console = Console(file=sys.stderr, highlight=False)
    console.print(f"seed {seed}: {len(cells)} cells, {jobs} at a time, in {settings.out}", markup=False, soft_wrap=True)
    # Ray, and what is forked, may write to standard output.
    with _standard_output_set_aside(), _progress(console, len(cells)) as told:
        verdicts = run_cells(
            cells,
            settings,
            replay=lambda cell: _command(seed=seed, only=cell.name, sizes=sizes, with_ray=with_ray),
            told=told,
        )
    timelines = [run_timeline(run, name) for name, run in evidence(verdicts, settings)]
    page = write_report(
        settings.out,
        title=f"Kill matrix, {'supervised' if with_ray else 'fast'} form",
        command=command,
        seed=seed,
        verdicts=verdicts,
        timelines=timelines,
    )
    if as_json:
        print(json.dumps(_summary(verdicts, seed, page), indent=2))
    else:
        found = counts(verdicts)
        print(", ".join(f"{number} {outcome}" for outcome, number in found.items()) + f" of {len(verdicts)} cells")
        print(f"report: {page}")
    raise typer.Exit(exit_code(verdicts))


def _summary(verdicts: list[Verdict], seed: int, page: Path) -> dict[str, Any]:
    bad = [verdict for verdict in verdicts if verdict.outcome in (Outcome.BROKEN, Outcome.UNRECOVERED)]
    return {
        "seed": seed,
        "cells": len(verdicts),
        **counts(verdicts),
        "failed": [{"name": one.name, "detail": one.detail, "replay": one.replay} for one in bad],
        "report": str(page),
    }


def _command(*, seed: int, only: str | None, sizes: tuple[int, ...], with_ray: bool) -> str:
    words = ["lastgood", "chaos", "matrix", *(["--ray"] if with_ray else []), "--seed", str(seed)]
    for size in sizes if sizes != WORLD_SIZES else ():
        words += ["--ranks", str(size)]
    if only is not None:
        words += ["--only", only]
    return shlex.join(words)


def _require_environment(jobs: int) -> None:
    if sys.platform != "linux":
        raise EnvironmentProblem(f"the matrix needs Linux, and this is {sys.platform}")
    import psutil

    available = psutil.virtual_memory().available
    if available < jobs * _MEMORY_BYTES_PER_JOB:
        raise EnvironmentProblem(
            f"{jobs} cells at a time need {jobs * _MEMORY_BYTES_PER_JOB / 2**30:.0f} GiB of free memory, and "
            f"{available / 2**30:.1f} GiB are available; lower --jobs"
        )


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Verdict], None]]:
    """A bar on a terminal; elsewhere a line for each cell that did not hold, as soon as it is known."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = 0
    # Without a thread that refreshes it: processes are forked meanwhile.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False
    ) as progress:
        task = progress.add_task("cells", total=total)

        def told(verdict: Verdict) -> None:
            nonlocal failed
            progress.advance(task)
            if verdict.outcome in (Outcome.BROKEN, Outcome.UNRECOVERED):
                failed += 1
                progress.update(task, description=f"cells, {failed} failed")
                console.print(f"{verdict.outcome}: {verdict.name}", markup=False, soft_wrap=True)
            progress.refresh()

        yield told
