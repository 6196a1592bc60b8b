"""What `lastgood simulate` is given, as docs/cadence.md describes it: a scenario (TOML), or a trace of failures (CSV).

A trace's run ends with its last failure: nobody knows what came then.
"""

import csv
import itertools
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos.simulator.draws import NOTHING
from chaos.simulator.failures import (
    Exponential,
    Failure,
    Failures,
    FailureSource,
    MarkovModulated,
    Periodic,
    RateSteps,
    Trace,
    Weibull,
    failures,
)
from chaos.simulator.job import Job, SaveCosts
from chaos.simulator.tables import Table
from orchestrator.decide.causes import CAUSES
from orchestrator.decide.failure_rate import DOMAINS, FAILURES_PER_NODE_DAY, prior_from_cluster
from orchestrator.decide.hazard import Prior
from orchestrator.decide.tuner import MISSES_ALONE, MISSES_REPLICATED, Limits
from workers.errors import CallerError

TRACE_COLUMN = "seconds_since_previous_failure"
HORIZON_SECONDS = 365 * 86400.0
_KINDS = ("exponential", "weibull", "markov", "steps", "periodic", "trace")
_POLICIES = ("auto", "young", "overhead", "30min", "best-fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`prior`: what the tuner believes of the failure rate at first. `replicated`: whether nodes keep copies of each
    other's snapshots. `policies`: those to compare, by name."""

    job: Job
    sources: tuple[Failures, ...]
    prior: Prior
    limits: Limits = field(default_factory=Limits)
    replicated: bool = False
    policies: tuple[str, ...] = _POLICIES

    def failures(self, seed: int) -> Iterator[Failure]:
        return failures(self.sources, seed)

    @property
    def ends_after_seconds(self) -> float:
        """Where the first trace ends; infinite without one."""
        lengths = (one.source.length_seconds for one in self.sources if isinstance(one.source, Trace))
        return min(lengths, default=math.inf)

    @property
    def failures_per_second(self) -> float:
        """All of them, over the whole run."""
        return sum(one.source.failures_per_second(self.job.horizon_seconds) for one in self.sources)

    @property
    def missed_per_second(self) -> float:
        """Those after which memory has nothing to restore."""
        if self.job.memory is None:
            return self.failures_per_second
        run_seconds = self.job.horizon_seconds
        return sum((1.0 - one.memory_survives) * one.source.failures_per_second(run_seconds) for one in self.sources)


def read_file(path: Path) -> tuple[Scenario, bool]:
    """A scenario; and whether the file is a trace, so that it does not say what saves cost."""
    if not path.is_file():
        raise CallerError(f"FILE is {str(path)!r}; it has to be a scenario (.toml) or a trace (.csv) that exists")
    is_trace = path.suffix.lower() != ".toml"
    return (trace_scenario(path) if is_trace else read_scenario(path)), is_trace


def read_scenario(path: Path) -> Scenario:
    """Raises CallerError for what is missing or wrong in it, with the field's name."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CallerError(f"{path} cannot be read as a scenario: {error}") from None
    table = Table(content, path.name)
    gpus, on_node = table.count("gpus", 8), table.count("gpus_per_node", 8)
    nodes = math.ceil(gpus / on_node)
    memory = table.table("memory")
    replicated = memory.flag("replicated", nodes > 1) if memory is not None else False
    sources = tuple(_failures(one, nodes, replicated, path.parent) for one in table.tables("failures"))
    traces = [one.source.length_seconds for one in sources if isinstance(one.source, Trace)]
    horizon = table.duration("horizon", min(traces, default=HORIZON_SECONDS))
    if traces and horizon > min(traces):
        raise CallerError(
            f"{path.name}.horizon is {horizon:.0f} s, and a trace ends after {min(traces):.0f} s; "
            "it has to be shorter, or left out"
        )
    durable = table.table("durable")
    if durable is None:
        raise CallerError(f"{path.name} has no table [durable]; it says what a save costs, such as stall = '30s'")
    job = Job(
        durable=_costs(durable),
        memory=_costs(memory) if memory is not None else None,
        step_seconds=table.duration("step", 1.0),
        horizon_seconds=horizon,
        state_bytes=table.size("state", 0),
        keep_last=table.count("keep_last", 3),
        damaged=table.number("damaged", 0.0, least=0.0, most=1.0),
        max_failures=table.count("max_failures", None, least=0),
    )
    believed = table.number("failures_per_node_day", FAILURES_PER_NODE_DAY, least=1e-12)
    limits = table.table("limits")
    scenario = Scenario(
        job=job,
        sources=sources,
        prior=prior_from_cluster(nodes, believed),
        limits=_limits(limits) if limits is not None else Limits(),
        replicated=replicated,
        policies=table.texts("policies", _POLICIES),
    )
    table.done()
    return scenario


def trace_scenario(path: Path) -> Scenario:
    """A job that ends with the trace's last failure, and whose saves cost nothing yet."""
    trace = read_trace(path)
    return Scenario(
        job=Job(durable=SaveCosts(stall=NOTHING), horizon_seconds=trace.length_seconds),
        sources=(Failures(source=trace),),
        prior=prior_from_cluster(1),
    )


def read_trace(path: Path) -> Trace:
    """The gaps in the column `seconds_since_previous_failure`; raises CallerError if there are none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CallerError(f"{path} cannot be read as a trace: {error}") from None
    if not rows or TRACE_COLUMN not in rows[0]:
        raise CallerError(f"{path} holds no failures; it has to be a CSV file with the column {TRACE_COLUMN}")
    gaps = []
    for number, row in enumerate(rows, start=2):
        text = row[TRACE_COLUMN]
        try:
            gap = float(text)
        except (TypeError, ValueError):
            gap = math.nan
        if not 0 <= gap < math.inf:
            raise CallerError(f"{path}, line {number}: {TRACE_COLUMN} is {text!r}; it has to be a number, at least 0")
        gaps.append(gap)
    if not sum(gaps):
        raise CallerError(f"{path}: all of {TRACE_COLUMN} is 0; a run needs some time to train")
    return Trace(seconds_since_previous_failure=tuple(gaps))


def _failures(table: Table, nodes: int, replicated: bool, folder: Path) -> Failures:
    source = _source(table, table.text("kind", among=_KINDS), nodes, folder)
    domain = DOMAINS[DOMAINS.index(table.text("domain", "process", among=DOMAINS))]
    misses = (MISSES_REPLICATED if replicated else MISSES_ALONE)[domain]
    found = Failures(
        source=source,
        cause=table.text("cause", "signal", among=CAUSES),
        domain=domain,
        memory_survives=table.number("memory_survives", 1.0 - misses, least=0.0, most=1.0),
    )
    table.done()
    return found


def _source(table: Table, kind: str, nodes: int, folder: Path) -> FailureSource:
    match kind:
        case "exponential":
            return Exponential(mtbf_seconds=_mtbf(table, nodes))
        case "weibull":
            return Weibull(mtbf_seconds=_mtbf(table, nodes), shape=table.number("shape", least=0.1, most=10.0))
        case "markov":
            mtbf, stay = table.durations("mtbf"), table.durations("stay")
            _require_as_many(table, "stay", stay, mtbf)
            return MarkovModulated(mtbf_seconds=mtbf, stay_seconds=stay)
        case "steps":
            begins, mtbf = table.durations("from", zero=True), table.durations("mtbf")
            _require_as_many(table, "from", begins, mtbf)
            if begins[0] != 0 or any(one >= other for one, other in itertools.pairwise(begins)):
                raise CallerError(f"{table.where}.from is {list(begins)} s; it has to ascend from 0s")
            return RateSteps(from_seconds=begins, mtbf_seconds=mtbf)
        case "periodic":
            return Periodic(
                every_seconds=table.duration("every"), jitter_seconds=table.duration("jitter", 0.0, zero=True)
            )
        case _:
            return read_trace(folder / table.text("file"))


def _mtbf(table: Table, nodes: int) -> float:
    """Of the job; from its size, if the rate of each node is given instead."""
    rate = table.number("failures_per_node_day", 0.0, least=1e-12)
    return 86400.0 / (rate * nodes) if rate else table.duration("mtbf")


def _require_as_many(table: Table, name: str, found: tuple[float, ...], others: tuple[float, ...]) -> None:
    if len(found) != len(others):
        raise CallerError(f"{table.where}.{name} has {len(found)} entries; it has to have {len(others)}, like mtbf")


def _costs(table: Table) -> SaveCosts:
    costs = SaveCosts(
        stall=table.cost("stall"),
        interference=table.cost("interference", NOTHING),
        durable=table.cost("durable", NOTHING),
        restart=table.cost("restart", NOTHING),
    )
    table.done()
    return costs


def _limits(table: Table) -> Limits:
    usual = Limits()
    limits = Limits(
        durable_overhead_max=table.number(
            "durable_overhead_max", usual.durable_overhead_max or 1.0, least=1e-6, most=1.0
        ),
        memory_overhead_max=table.number("memory_overhead_max", usual.memory_overhead_max or 1.0, least=1e-6, most=1.0),
        memory_steps_min=table.count("memory_steps_min", usual.memory_steps_min),
    )
    table.done()
    return limits
