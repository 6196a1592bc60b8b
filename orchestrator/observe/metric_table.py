"""All metrics of a run: what each is called, and what it means. docs/metrics.md is written from this table.

Names follow Prometheus' conventions: base units, `_total` for what only grows, `_ratio` from 0 to 1, `_info` for facts.
Every label has few values by design: those named here, or, for `rank`, at most `RANKS_SHOWN_MAX` at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.decide.causes import CAUSES
from orchestrator.observe.accounting import DRIVER, KINDS
from orchestrator.observe.tally import BOUNDS, NOTICES, RUNGS, TIERS

RANKS_SHOWN_MAX = 16
OTHER = "other"

Type = Literal["counter", "gauge", "histogram"]

LABELS: Mapping[str, tuple[str, ...]] = {
    "kind": tuple(KINDS),
    "cause": (*CAUSES, DRIVER, OTHER),
    "state": ("empty", "starting", "training", "recovering", "finished", "stopped"),
    "tier": TIERS,
    "bound": BOUNDS,
    "rung": RUNGS,
    "reason": NOTICES,
    "until": ("first_step", "regained"),
    "estimate": ("mean", "low", "high"),
    "ranks": ("fastest", "median", "slowest"),
}
"""The values of each label; `rank` and the labels of `lastgood_run_info` have no fixed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`name` is how it is scraped; of a histogram, without _bucket, _sum and _count. All have the label `run` too.

    `live`: known only while ranks are heard of. `ray`: also reported through Ray."""

    name: str
    type: Type
    help: str
    labels: tuple[str, ...] = ()
    live: bool = False
    ray: bool = False


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"lastgood_{name}_total", type="counter", help=help, labels=labels)


def _gauge(name: str, help: str, *labels: str, live: bool = False, ray: bool = False) -> Metric:
    return Metric(name=f"lastgood_{name}", type="gauge", help=help, labels=labels, live=live, ray=ray)


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"lastgood_{name}", type="histogram", help=help, labels=labels)


GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "The run": (
        _gauge("run_info", "Always 1; facts about the run as labels.", "run_id", "run_dir", "driver", "version"),
        _gauge("state", "1 for the state that the run is in, 0 for all others.", "state"),
        _gauge("healthy", "1 if /healthz answers 200: protected, and getting on or finished.", ray=True),
        _gauge("generation", "Number of the newest generation: how often ranks were started.", ray=True),
        _gauge("world_size", "Ranks of the newest generation.", ray=True),
        _gauge("nodes", "Nodes of the newest generation."),
        _gauge("nodes_excluded", "Nodes that this driver uses no more, since ranks failed there again and again."),
        _counter("drivers", "Calls of fit() for this run."),
        _counter("coordinator_restarts", "How often the coordinator was restarted in the middle of a run."),
    ),
    "Where time goes": (
        _counter(
            "time_seconds", "Time since the run began, by what it was spent on; the kinds add up to all of it.", "kind"
        ),
        _counter("elapsed_seconds", "Time since the run began, as far as it is known what it was spent on."),
        _gauge("goodput_ratio", "Part of all time that went into steps that were not done before.", ray=True),
        _gauge(
            "ettr_ratio",
            "Effective training time: without starts, recoveries and what was trained again, over the time with a "
            "driver.",
            ray=True,
        ),
        _gauge("ettr_queueing_ratio", "The same over all time, that between drivers included."),
        _gauge("save_overhead_ratio", "Part of the training time that saving took: stall and interference.", ray=True),
    ),
    "Training": (
        _gauge("step", "The last finished step; lower again after a failure.", ray=True),
        _counter("steps", "Steps done, as far as the ledger tells, those that were done again included."),
        _gauge("step_seconds", "How long a step takes, on the fastest, the median and the slowest rank.", "ranks"),
        _gauge("step_age_seconds", "Time since a step was finished.", live=True),
        _gauge("loss", "The loss that the loop gave last.", live=True),
        _gauge("ranks_heard", "Ranks that were heard of in the last ten seconds.", live=True),
        _gauge("stragglers", "Ranks that all others were found to wait for, in this generation.", ray=True),
        _gauge("straggler_cost_ratio", "Part of the time that the others wait for a straggler.", "rank"),
        _gauge(
            "rank_waited_for_ratio",
            "Part of the last two minutes in which the others waited for this rank alone; the worst ranks only.",
            "rank",
            live=True,
        ),
        _gauge(
            "rank_memory_bytes",
            "Memory of a rank and its loader workers; the largest only.",
            "rank",
            live=True,
        ),
        _counter("batches_skipped", "Batches that are passed over after a bad loss."),
    ),
    "Failures": (
        _counter("failures", "Generations that ended other than by finishing.", "cause"),
        _counter("lost_steps", "Steps that failures took back.", "cause"),
        _counter("lost_samples", "Samples in these steps, where the loader is lastgood's.", "cause"),
        _counter(
            "lost_seconds", "Time that failures cost: detection, recovery, restoring, and training again.", "cause"
        ),
        _gauge("mtbf_seconds", "Believed mean time between failures, with the bounds of 90 % probability.", "estimate"),
        _histogram("detection_seconds", "From when a failure struck until the coordinator knew."),
        _histogram(
            "recovery_seconds",
            "From when a failure struck until all ranks had done a step, or the lost step again.",
            "until",
        ),
        _counter("restores", "Generations, by where their state came from.", "rung"),
        _counter("suspicions", "How often ranks were suspected to hang."),
        _counter("corruptions", "Saves that ranks did not hold alike."),
        _counter("notices", "Nodes and processes that were announced to go.", "reason"),
        _counter("nodes_lost", "Nodes that went."),
    ),
    "Saves": (
        _counter("saves_committed", "Checkpoints that were committed."),
        _counter("saves_failed", "Saves that were given up."),
        _counter("save_attempts_failed", "Attempts at saves that failed; most are made again."),
        _counter("saves_skipped", "Snapshots that were not written, mostly since a newer one was complete."),
        _counter("saves_stalled", "Saves that took longer than save_stalled_seconds."),
        _counter("saved_bytes", "Bytes of all committed checkpoints."),
        _histogram("save_stall_seconds", "How long the loop stood still for a save, on the slowest rank."),
        _histogram("save_copy_seconds", "Until the snapshot was complete in memory, on the slowest rank."),
        _histogram("save_durable_seconds", "How long writing and syncing took, on the slowest rank."),
        _histogram("save_verify_seconds", "How long reading back took, on the slowest rank."),
        _histogram("save_commit_seconds", "From the complete snapshot to the commit."),
        _gauge(
            "unprotected", "1 while saves fail, and the newest state is older than unprotected_seconds_max.", ray=True
        ),
        _gauge("checkpoint_step", "Step of the newest verified checkpoint; 0 without one.", ray=True),
        _gauge(
            "checkpoint_age_seconds",
            "How long ago the run had the state of its newest verified checkpoint; without one, how long ago it began.",
            ray=True,
        ),
        _gauge("checkpoint_bytes", "Size of the newest checkpoint."),
        _gauge("snapshot_step", "Newest step of which all snapshots have copies on other nodes.", live=True),
        _counter("quarantined", "Checkpoints, and sets in memory, that could not be trusted and were set aside."),
        _gauge("storage_free_bytes", "What can still be written to the run's storage."),
        _gauge("storage_size_bytes", "Size of the file system that the run's storage is on."),
    ),
    "Cadence": (
        _gauge("interval_seconds", "Chosen time between saves.", "tier"),
        _gauge("interval_steps", "The same in steps.", "tier"),
        _gauge("interval_best_seconds", "What would pay best without bounds.", "tier"),
        _gauge("interval_bound", "1 if this bound made the interval another one than the best.", "tier", "bound"),
        _gauge("interval_goodput_ratio", "Expected goodput with the chosen interval, of this tier alone.", "tier"),
    ),
    "The exporter": (
        _counter("exporter_scrapes", "Scrapes since the coordinator was started."),
        _gauge("exporter_scrape_seconds", "How long it took to gather the metrics of the scrape before."),
        _counter("exporter_errors", "Requests that failed, since the coordinator was started."),
        _counter("exporter_connections_refused", "Connections that were too many, since the coordinator was started."),
        _counter("ledger_entries", "Entries of the ledger."),
        _counter("ledger_lines_lost", "Entries that the storage refused."),
    ),
}
METRICS: Mapping[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}


def bounded(label: str, value: str) -> str:
    """The value, or `OTHER` for one that the table does not know."""
    return value if value in LABELS[label] else OTHER
