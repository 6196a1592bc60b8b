"""`lastgood simulate`: policies that say how often to save, under the same failures. docs/cadence.md describes it."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orchestrator.cli.durations import parse_duration
from orchestrator.cli.plots import require_figure
from orchestrator.observe.costs import run_costs
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from workers.errors import CallerError

_SEEDS = 10
Duration = str | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


def _time(help_text: str) -> Any:
    return typer.Option(metavar="TIME", help=help_text)


def simulate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A scenario (.toml), or a trace: a CSV of times between failures.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="What to compare: auto, young, overhead, best-fixed, 30min, '500 steps'. May be repeated."),
    ] = None,
    stall: Annotated[Duration, _time("How long a save stops training; needed with a trace.")] = None,
    durable: Annotated[Duration, _time("From a save's begin until it can be restored.")] = None,
    restart: Annotated[Duration, _time("From a failure until training goes on.")] = None,
    step_time: Annotated[Duration, _time("Of one step.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Take what saves and restarts cost from this run's ledger.")
    ] = None,
    horizon: Annotated[Duration, _time("How long a run is.  [default: the scenario's, or the trace's]")] = None,
    overhead_max: Annotated[
        float | None,
        typer.Option(help="Part of the time that auto lets durable saves take; 1: as much as pays.", min=1e-6, max=1.0),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help=f"Runs of each policy.  [default: {_SEEDS}, of a trace 1]", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow it.", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes to run in.  [default: as many as there are CPUs]", min=1)
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what is wasted: a .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one JSON object for each policy.")] = False,
) -> None:
    """Simulate a job under failures, and compare ways to decide how often it saves.

    Options beat what the scenario says.
    """
    if plot is not None:
        require_figure(plot)
    from chaos.simulator import report
    from chaos.simulator.compare import run_all, runs
    from chaos.simulator.policies import known
    from chaos.simulator.scenario import read_file
    from chaos.simulator.seen import with_costs_given, with_costs_seen

    scenario, is_trace = read_file(file)
    if is_trace and stall is None and run is None:
        raise CallerError(f"{file} does not say what a save costs, no trace does; give --stall, such as 30s, or --run")
    job = with_costs_seen(scenario.job, run_costs(_entries(run))) if run is not None else scenario.job
    job = with_costs_given(
        job,
        stall=_seconds("--stall", stall),
        durable=_seconds("--durable", durable),
        restart=_seconds("--restart", restart),
        step=_seconds("--step-time", step_time, zero=False),
    )
    if horizon is not None:
        job = replace(job, horizon_seconds=_horizon(horizon, scenario.ends_after_seconds))
    limits = scenario.limits
    if overhead_max is not None:
        limits = replace(limits, durable_overhead_max=overhead_max)
    scenario = replace(scenario, job=job, limits=limits)
    where = "--policy" if policy else f"{file.name}.policies"
    policies = [known(name, where) for name in policy or scenario.policies]
    count = seeds or (1 if is_trace else _SEEDS)
    with _progress(runs(policies, count)) as told:
        found = run_all(
            scenario,
            tuple(dict.fromkeys(policies)),
            range(seed, seed + count),
            jobs=jobs or min(len(os.sched_getaffinity(0)), count),
            told=told,
        )
    if plot is not None:
        report.draw(found, plot)
    if as_json:
        print(json.dumps(report.as_json(found), indent=2))
    else:
        report.write(found)


def _entries(run: Path) -> list[dict[str, Any]]:
    ledger = run / LEDGER_FILE
    if not ledger.is_file():
        raise CallerError(f"--run is {str(run)!r}; it has to be the storage_path/name of a run, with {LEDGER_FILE}")
    return read_ledger(ledger)


def _seconds(field: str, given: Duration, *, zero: bool = True) -> float | None:
    return parse_duration(given, field=field, zero=zero) if given is not None else None


def _horizon(given: str, at_most: float) -> float:
    seconds = parse_duration(given, field="--horizon")
    if seconds > at_most:
        raise CallerError(f"--horizon is {given!r}; it has to be at most {at_most:.0f}s, where the trace ends")
    return seconds


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal, how many runs are over; on standard error, so that the output can be piped."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)
