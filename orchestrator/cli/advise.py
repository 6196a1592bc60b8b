"""`lastgood advise`: how often a job should save, what that costs, and what would help. docs/cadence.md has the model.

Its numbers come from options, from a run's ledger, and for the failure rate from the size of the cluster; an option
beats the rest. It only computes, and needs neither Ray nor torch.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import advise_report
from orchestrator.cli.advice import Advice, Situation
from orchestrator.cli.durations import parse_duration
from orchestrator.cli.plots import require_figure
from orchestrator.decide.cost import SaveCost, Tier
from orchestrator.decide.failure_rate import (
    DOMAINS,
    FAILURES_PER_NODE_DAY,
    NODE_SHARE,
    FailureRate,
    RatePosterior,
    prior_from_cluster,
)
from orchestrator.decide.hazard import Prior
from orchestrator.decide.run_history import RunHistory
from orchestrator.decide.tuner import MISSES_ALONE, MISSES_REPLICATED
from orchestrator.observe.costs import RunCosts, run_costs
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from workers.errors import CallerError

MEMORY_MISSES = NODE_SHARE * MISSES_REPLICATED["node"]
"""The part of failures after which memory has nothing to restore: what production assumes of replicated snapshots."""

Duration = str | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(advise)


def _time(help_text: str) -> Any:
    return typer.Option(metavar="TIME", help=help_text)


def advise(
    stall: Annotated[Duration, _time("How long a save stops training, e.g. 30s.")] = None,
    durable: Annotated[Duration, _time("From a save's begin until it can be restored.  [default: the stall]")] = None,
    interference: Annotated[Duration, _time("Training lost while a save is written on.  [default: 0s]")] = None,
    restart: Annotated[Duration, _time("From a failure until training goes on.  [default: 0s]")] = None,
    step_time: Annotated[Duration, _time("Of one step; intervals are whole steps then.")] = None,
    mtbf: Annotated[Duration, _time("Mean time between failures of the job, e.g. 3h.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Size of the job, to tell the failure rate from.", min=1)] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs on each node.", min=1)] = 8,
    failures_per_node_day: Annotated[
        float | None, typer.Option(help=f"Of each node, with --gpus.  [default: {FAILURES_PER_NODE_DAY:g}]")
    ] = None,
    memory_stall: Annotated[Duration, _time("The stall of a snapshot that stays in memory: a second tier.")] = None,
    memory_restart: Annotated[Duration, _time("The restart from there.  [default: as --restart]")] = None,
    memory_misses: Annotated[
        float | None, typer.Option(help="Part of the failures that leave nothing in memory.", min=0.0, max=1.0)
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Take costs and failures from the ledger of this run.")
    ] = None,
    every: Annotated[Duration, _time("Score this interval, beside the best one; needs no failure rate.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what is wasted: a .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how often to save, what that costs, and what would help most.

    Needs a save's --stall, and the failure rate as --mtbf or --gpus; or both from --run.
    """
    if plot is not None:
        require_figure(plot)
    seen = _read(run) if run is not None else None
    costs = seen.costs if seen is not None else RunCosts()
    rate = _rate(mtbf, gpus, gpus_per_node, failures_per_node_day, seen, every is not None)
    cost = SaveCost(
        stall_seconds=_stall(stall, costs, run),
        durable_seconds=_seconds("--durable", durable, _median(costs.durable_seconds)),
        interference_seconds=_seconds("--interference", interference, _median(costs.interference_seconds)),
    )
    restart_seconds = _seconds("--restart", restart, _median(costs.restarts_from("checkpoint")))
    missed = rate.missed if memory_misses is None else memory_misses
    memory, durable_rate = None, rate.per_second
    if memory_stall is not None or "memory" in costs.restart_seconds:
        snapshot = SaveCost(_seconds("--memory-stall", memory_stall, cost.stall_seconds))
        usual = _median(costs.restart_seconds.get("memory", [])) if restart is None else None
        memory = Tier(
            snapshot,
            rate.per_second * (1.0 - missed),
            _seconds("--memory-restart", memory_restart, restart_seconds if usual is None else usual),
        )
        durable_rate *= missed
    situation = Situation(
        durable=Tier(cost, durable_rate, restart_seconds),
        memory=memory,
        step_seconds=_seconds("--step-time", step_time, costs.step_seconds),
    )
    every_seconds = parse_duration(every, field="--every") if every is not None else None
    advice = Advice(situation=situation, every_seconds=every_seconds, memory_misses=missed, believed=rate.believed)
    if plot is not None:
        advise_report.draw(advice, plot)
    if as_json:
        print(json.dumps(advice.as_json(), indent=2))
    else:
        advise_report.write(advice)


@dataclass(frozen=True, slots=True)
class _Run:
    entries: list[dict[str, Any]]
    costs: RunCosts


@dataclass(frozen=True, slots=True)
class _Rate:
    """Of the job's failures. `missed`: the part of them after which memory has nothing to restore. `believed`: how sure
    the rate is, where data say so."""

    per_second: float
    missed: float = MEMORY_MISSES
    believed: RatePosterior | None = None


def _read(run: Path) -> _Run:
    ledger = run / LEDGER_FILE
    if not ledger.is_file():
        raise CallerError(f"--run is {str(run)!r}; it has to be the storage_path/name of a run, with {LEDGER_FILE}")
    entries = read_ledger(ledger)
    return _Run(entries, run_costs(entries))


def _stall(stall: Duration, costs: RunCosts, run: Path | None) -> float:
    if stall is None and not costs.stall_seconds:
        what = f"{run} has no committed save yet" if run else "neither --stall nor --run is given"
        raise CallerError(f"{what}, so what a save costs is unknown; give --stall, such as 30s")
    return _seconds("--stall", stall, _median(costs.stall_seconds))


def _rate(
    mtbf: Duration,
    gpus: int | None,
    gpus_per_node: int,
    failures_per_node_day: float | None,
    run: _Run | None,
    may_be_unknown: bool,
) -> _Rate:
    """From the first of these that says something."""
    if failures_per_node_day is not None and not 0 < failures_per_node_day < math.inf:
        raise CallerError(f"--failures-per-node-day is {failures_per_node_day}; it has to be a number above 0")
    if failures_per_node_day is not None and gpus is None and run is None:
        problem = "and neither --gpus nor --run says how many nodes there are; give --gpus, such as 1024"
        raise CallerError(f"--failures-per-node-day is {failures_per_node_day}, {problem}")
    if mtbf is not None:
        return _Rate(1.0 / parse_duration(mtbf, field="--mtbf"))
    nodes = math.ceil(gpus / gpus_per_node) if gpus is not None else run.costs.nodes if run is not None else 0
    if not nodes:
        if may_be_unknown:
            return _Rate(0.0)
        raise CallerError("how often the job fails is unknown; give --mtbf, such as 3h, or --gpus, or --run")
    prior = prior_from_cluster(nodes, failures_per_node_day or FAILURES_PER_NODE_DAY)
    if run is None:
        return _Rate(prior.failures_per_second)
    return _learnt(prior, run)


def _learnt(prior: Prior, run: _Run) -> _Rate:
    rates = FailureRate(prior, ranks=run.costs.ranks)
    history = RunHistory(rates)
    history.take_all(run.entries)
    now = history.at(max((float(entry["at"]) for entry in run.entries), default=0.0))
    believed = rates.posterior(now)
    misses = MISSES_REPLICATED if run.costs.nodes > 1 else MISSES_ALONE
    missed = sum(misses[domain] * rates.posterior(now, domain).mean_per_second for domain in DOMAINS)
    return _Rate(believed.mean_per_second, missed / believed.mean_per_second, believed)


def _seconds(field: str, given: Duration, otherwise: float | None) -> float:
    return parse_duration(given, field=field, zero=True) if given is not None else otherwise or 0.0


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None
