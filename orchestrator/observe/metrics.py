"""The run's metrics, computed when they are asked for, from its ledger and from what its ranks said last.

Counters come from the ledger alone, and only of what no later entry changes: so a restarted coordinator, or the next
driver, goes on with them, and they never go back. Gauges also say what is going on now.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator.decide.failure_rate import RatePosterior
from orchestrator.observe.accounting import DRIVER, Account
from orchestrator.observe.live import Live
from orchestrator.observe.metric_table import LABELS, METRICS, RANKS_SHOWN_MAX, bounded
from orchestrator.observe.server import Response
from orchestrator.observe.summary import Summary
from orchestrator.observe.tally import BOUNDS, DETECTION_BUCKETS, RECOVERY_BUCKETS, Histogram, Tally

Value = float | Histogram
Reading = tuple[str, tuple[str, ...], Value]
"""Name without `lastgood_` and `_total`, label values in the table's order, and the value."""


@dataclass(slots=True, kw_only=True)
class ExporterFacts:
    """Of the exporter itself, since the coordinator was started."""

    scrapes: int = 0
    scrape_seconds: float = 0.0
    errors: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that metrics are made from, at one moment. `info`: labels of lastgood_run_info. `storage_bytes`: free and
    all; None if the storage did not answer."""

    now: float
    run: str
    info: Mapping[str, str]
    summary: Summary
    tally: Tally
    account: Account
    live: Live
    rate: RatePosterior | None
    healthy: bool
    snapshot_step: int | None
    storage_bytes: tuple[int, int] | None
    exporter: ExporterFacts = field(default_factory=ExporterFacts)


def readings(view: View) -> Iterator[Reading]:
    """Every sample, with names of the table."""
    yield from _run(view)
    yield from _time(view)
    yield from _training(view)
    yield from _failures(view)
    yield from _saves(view)
    yield from _cadence(view)
    yield from _exporter(view)


def _run(view: View) -> Iterator[Reading]:
    events = view.tally.events
    yield "run_info", tuple(view.info[label] for label in METRICS["lastgood_run_info"].labels), 1
    yield from (("state", (state,), float(state == view.account.state)) for state in LABELS["state"])
    yield "healthy", (), float(view.healthy)
    yield "generation", (), view.summary.generation
    yield "world_size", (), view.summary.ranks
    yield "nodes", (), view.tally.nodes
    yield "nodes_excluded", (), len(view.tally.excluded)
    yield "drivers", (), events["driver"]
    yield "coordinator_restarts", (), events["resumed"]


def _time(view: View) -> Iterator[Reading]:
    account, settled = view.account, view.summary.accounting.settled()
    yield from (("time_seconds", (kind,), seconds) for kind, seconds in settled.seconds.items())
    yield "elapsed_seconds", (), settled.elapsed_seconds
    for name in ("goodput_ratio", "ettr_ratio", "ettr_queueing_ratio", "save_overhead_ratio"):
        ratio = getattr(account, name)
        if ratio is not None:
            yield name, (), ratio


def _training(view: View) -> Iterator[Reading]:
    live, accounting = view.live, view.summary.accounting
    step = accounting.position if live.step is None else max(live.step, accounting.position)
    yield "step", (), step
    yield "steps", (), accounting.steps_done
    if (took := live.step_seconds()) is not None:
        yield from (("step_seconds", (ranks,), each) for ranks, each in zip(LABELS["ranks"], took, strict=True))
    elif view.tally.step_seconds is not None:
        yield "step_seconds", ("median",), view.tally.step_seconds
    if live.stepped_at is not None:
        yield "step_age_seconds", (), max(0.0, view.now - live.stepped_at)
    if live.loss is not None:
        yield "loss", (), live.loss
    yield "ranks_heard", (), live.heard(view.now)
    straggling = view.tally.straggling
    yield "stragglers", (), len(straggling)
    yield from _of_ranks("straggler_cost_ratio", straggling)
    yield from _of_ranks("rank_waited_for_ratio", live.waited_for)
    yield from _of_ranks("rank_memory_bytes", live.memory())
    yield "batches_skipped", (), view.summary.batches_skipped


def _of_ranks(name: str, values: Mapping[int, float]) -> Iterator[Reading]:
    most = sorted(values.items(), key=lambda item: (-item[1], item[0]))[:RANKS_SHOWN_MAX]
    yield from ((name, (str(rank),), value) for rank, value in most)


def _failures(view: View) -> Iterator[Reading]:
    costs, events = view.summary.accounting.costs, view.tally.events
    counted: dict[str, Counter[str]] = {"lost_steps": Counter(), "lost_samples": Counter(), "lost_seconds": Counter()}
    causes = Counter(bounded("cause", cause) for cause in view.summary.failures.elements())
    for cost in costs:
        cause = bounded("cause", cost.cause)
        for name, counter in counted.items():
            counter[cause] += getattr(cost, name)
    yield from (("failures", (cause,), causes[cause]) for cause in LABELS["cause"] if cause != DRIVER)
    for name, counter in counted.items():
        yield from ((name, (cause,), counter[cause]) for cause in LABELS["cause"])
    if view.rate is not None:
        rates = (view.rate.mean_per_second, view.rate.high_per_second, view.rate.low_per_second)
        for estimate, rate in zip(LABELS["estimate"], rates, strict=True):
            yield "mtbf_seconds", (estimate,), 1 / rate if rate > 0 else float("inf")
    failed = [cost for cost in costs if cost.cause != DRIVER]
    detection = Histogram(DETECTION_BUCKETS, (max(0.0, cost.noticed_at - cost.failed_at) for cost in failed))
    yield "detection_seconds", (), detection
    for until, ends in (
        ("first_step", ((cost.stepped_at, cost) for cost in failed)),
        ("regained", ((cost.regained_at, cost) for cost in failed)),
    ):
        took = (max(0.0, end - cost.failed_at) for end, cost in ends if end is not None)
        yield "recovery_seconds", (until,), Histogram(RECOVERY_BUCKETS, took)
    yield from (("restores", (rung,), view.tally.restores[rung]) for rung in LABELS["rung"])
    yield "suspicions", (), events["suspected"]
    yield "corruptions", (), events["corruption"]
    yield from (("notices", (reason,), view.tally.notices[reason]) for reason in LABELS["reason"])
    yield "nodes_lost", (), events["node_lost"]


def _saves(view: View) -> Iterator[Reading]:
    tally, events = view.tally, view.tally.events
    yield "saves_committed", (), view.summary.commits
    yield "saves_failed", (), events["save_failed_for_good"]
    yield "save_attempts_failed", (), events["save_failed"]
    yield "saves_skipped", (), events["save_skipped"]
    yield "saves_stalled", (), events["save_stalled"]
    yield "saved_bytes", (), tally.saved_bytes
    yield from ((f"save_{part}_seconds", (), histogram) for part, histogram in tally.saves.items())
    yield "unprotected", (), float(view.summary.unprotected_since is not None)
    verified = tally.verified
    yield "checkpoint_step", (), verified["step"] if verified else 0
    state_at = tally.began_at if verified is None else verified.get("snapshot_at", verified["at"])
    if state_at is not None:
        yield "checkpoint_age_seconds", (), max(0.0, view.now - state_at)
    yield "checkpoint_bytes", (), tally.newest_bytes
    if view.snapshot_step is not None:
        yield "snapshot_step", (), view.snapshot_step
    yield "quarantined", (), events["quarantine"] + events["memory_dropped"]
    if view.storage_bytes is not None:
        free, size = view.storage_bytes
        yield "storage_free_bytes", (), free
        yield "storage_size_bytes", (), size


def _cadence(view: View) -> Iterator[Reading]:
    for tier, decision in view.tally.intervals.items():
        yield "interval_seconds", (tier,), float(decision["interval_seconds"])
        if decision["interval_steps"] is not None:
            yield "interval_steps", (tier,), decision["interval_steps"]
        yield "interval_best_seconds", (tier,), float(decision["best_seconds"])
        bit = {bound["name"] for bound in decision["bounds"]}
        yield from (("interval_bound", (tier, bound), float(bound in bit)) for bound in BOUNDS)
        yield "interval_goodput_ratio", (tier,), float(decision["goodput_ratio"])


def _exporter(view: View) -> Iterator[Reading]:
    exporter = view.exporter
    yield "exporter_scrapes", (), exporter.scrapes
    yield "exporter_scrape_seconds", (), exporter.scrape_seconds
    yield "exporter_errors", (), exporter.errors
    yield "exporter_connections_refused", (), exporter.refused
    yield "ledger_entries", (), view.tally.entries
    yield "ledger_lines_lost", (), view.tally.lines_lost


def families(view: View) -> Iterable[Family]:
    """The readings as prometheus_client has them, in the order of the table; metrics without a sample are left out."""
    made: dict[str, Family] = {}
    tables = {name.removeprefix("lastgood_").removesuffix("_total"): name for name in METRICS}
    for short, values, value in readings(view):
        metric = METRICS[tables[short]]
        if metric.name not in made:
            labels = ("run", *metric.labels)
            kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
            made[metric.name] = kind[metric.type](metric.name, metric.help, labels=labels)
        family = made[metric.name]
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric((view.run, *values), value.buckets(), value.sum)
        else:
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric((view.run, *values), float(value))
    return [made[name] for name in METRICS if name in made]


class RunCollector(Collector):
    """Asks `view()` at each scrape."""

    def __init__(self, view: Callable[[], View], exporter: ExporterFacts) -> None:
        self._view = view
        self._exporter = exporter

    def describe(self) -> Iterable[Family]:
        """Nothing: registering would gather everything once."""
        return []

    def collect(self) -> Iterable[Family]:
        began = time.perf_counter()
        self._exporter.scrapes += 1
        found = families(self._view())
        self._exporter.scrape_seconds = time.perf_counter() - began
        return found


def metrics_route(view: Callable[[], View], exporter: ExporterFacts) -> Callable[[], Response]:
    """What answers /metrics."""
    registry = CollectorRegistry()
    registry.register(RunCollector(view, exporter))

    def answer() -> Response:
        return Response(body=generate_latest(registry), content_type=CONTENT_TYPE_PLAIN_0_0_4)

    return answer
