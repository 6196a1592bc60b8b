"""Counts and histograms of a run, from its ledger. Pure: entries in. Where time went is in accounting.py, how the run
stands in summary.py."""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# From a hundredth of a second, a kill that is noticed, to an hour, a job that has to queue.
RECOVERY_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
DETECTION_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
# From a copy that hides beside a step to a slow store.
SAVE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

SAVE_PARTS = ("stall", "copy", "durable", "verify", "commit")
RUNGS = ("fresh", "memory", "copies", "checkpoint")
TIERS = ("memory", "durable")
BOUNDS = ("overhead", "bandwidth", "disk", "memory", "prudence")
NOTICES = ("drain", "sigterm")


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float], values: Iterable[float] = ()) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many lie at or below it; the last bound is infinite."""
        counts, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            counts.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return counts


@dataclass(slots=True)
class Tally:
    """`events`: entries by kind, and what some of them say: "driver", "resumed", "save_failed_for_good".

    `straggling`: ranks that others wait for in this generation, with the part of the time. `intervals`: the newest
    decision of each tier. `verified`: the newest commit that was read back.
    """

    entries: int = 0
    events: Counter[str] = field(default_factory=Counter)
    saves: dict[str, Histogram] = field(
        default_factory=lambda: {part: Histogram(SAVE_BUCKETS) for part in SAVE_PARTS},
    )
    saved_bytes: int = 0
    newest_bytes: int = 0
    restores: Counter[str] = field(default_factory=Counter)
    notices: Counter[str] = field(default_factory=Counter)
    straggling: dict[int, float] = field(default_factory=dict)
    intervals: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    verified: Mapping[str, Any] | None = None
    excluded: set[str] = field(default_factory=set)
    lines_lost: int = 0
    nodes: int = 0
    step_seconds: float | None = None
    began_at: float | None = None
    driver: str = ""

    def add(self, entry: Mapping[str, Any]) -> None:
        kind = entry["kind"]
        self.began_at = entry["at"] if self.began_at is None else self.began_at
        self.entries += 1
        self.events[kind] += 1
        self.lines_lost += entry.get("lost", 0)
        if kind == "coordinator":
            self.events["resumed" if entry["resumed"] else "driver"] += 1
            if not entry["resumed"]:
                self.intervals.clear()  # it may save by another rule
            self.driver = entry["driver"]
        elif kind == "generation":
            self.restores[self._rung(entry)] += 1
            self.straggling.clear()
            self.nodes = entry.get("nodes", 1)
        elif kind == "commit":
            self._commit(entry)
        elif kind == "save_failed":
            self.events["save_failed_for_good"] += bool(entry["final"])
        elif kind == "straggler":
            self.straggling[entry["rank"]] = entry["cost_fraction"]
        elif kind == "cadence":
            self.intervals[entry["tier"]] = entry
            self.step_seconds = entry["inputs"].get("step_seconds") or self.step_seconds
        elif kind == "progress":
            self.step_seconds = entry.get("step_seconds") or self.step_seconds
        elif kind == "notice":
            self.notices[entry["reason"]] += 1
        elif kind == "node_excluded" and entry["left_out"]:
            self.excluded.add(entry["node"])
        elif kind == "nodes_taken_back":
            self.excluded.difference_update(entry["nodes"])

    def _rung(self, entry: Mapping[str, Any]) -> str:
        source = entry.get("source") or "fresh"
        return "copies" if source == "memory" and entry.get("from_copies") else str(source)

    def _commit(self, entry: Mapping[str, Any]) -> None:
        for part, histogram in self.saves.items():
            histogram.add(float(entry.get(f"{part}_seconds", 0.0)))
        self.saved_bytes += entry["bytes"]
        self.newest_bytes = entry["bytes"]
        if "nothing" not in entry.get("verified_from", ()):
            self.verified = entry
