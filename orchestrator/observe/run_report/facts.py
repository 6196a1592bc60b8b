"""What is reported of a run, as one JSON document (docs/report.md). Pure: the ledger's entries in, facts out."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.decide.cost import SaveCost
from orchestrator.observe import words
from orchestrator.observe.accounting import SILENT_SECONDS, Account, Accounting, FailureCost
from orchestrator.observe.costs import RunCosts, run_costs
from orchestrator.observe.run_report.hindsight import Hindsight, Stretch, hindsight, stretches_of
from orchestrator.observe.summary import Summary, summarize
from orchestrator.observe.timeline import Timeline

VERSION = 1
_CURVE_POINTS = 60

Point = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class Facts:
    """Everything that the report is made from. `document`: for `--json`. Series are (Unix time, value)."""

    document: dict[str, Any]
    timeline: Timeline
    until: float
    hindsights: dict[str, Hindsight]
    progress: list[Point]
    written: list[Point]
    durable: list[Point]
    stalls: list[Point]


def facts_of(run_dir: Path, entries: Sequence[Mapping[str, Any]], now: float) -> Facts:
    """At Unix time `now`. Of a run that may be dead, what is known ends with its last entry."""
    entries = [entry for entry in entries if _is_complete(entry)]
    summary = summarize(dict(entry) for entry in entries)
    timeline = Timeline().take_all(entries)
    accounting = Accounting().add_all(entries)
    costs = run_costs(entries)
    last_at = max((float(entry["at"]) for entry in entries), default=now)
    ended = timeline.ended_at is not None
    alive = not ended and now - last_at <= SILENT_SECONDS
    until = timeline.ended_at or (max(now, last_at) if alive else last_at)
    account = accounting.at(until)
    hindsights = _hindsights(entries, costs)
    traffic = _Traffic(entries)
    document = {
        "v": VERSION,
        "generated_at": now,
        "run": {
            "name": run_dir.name,
            "dir": str(run_dir),
            "state": summary.state if ended or alive else "silent",
            "started_at": timeline.started_at,
            "until": until,
            "ended": ended,
            "step": max(summary.step, 0),
            "generations": summary.generation,
            "drivers": len(summary.drivers),
            "ranks": summary.ranks,
            "nodes": costs.nodes,
            "committed_step": summary.committed_step,
            "checkpoint": summary.checkpoint,
            "stop_reason": summary.stop_reason and words.cut(summary.stop_reason),
        },
        "time": {
            "elapsed_seconds": account.elapsed_seconds,
            "goodput_ratio": account.goodput_ratio,
            "ettr_ratio": account.ettr_ratio,
            "save_overhead_ratio": account.save_overhead_ratio,
            "seconds": dict(account.seconds),
        },
        "failures": _failures(accounting.costs, entries),
        "cadence": {tier: _told(one) for tier, one in hindsights.items()},
        "saves": _saves(summary, costs, account),
        "storage": traffic.told(until - (timeline.started_at or until)),
    }
    return Facts(
        document=document,
        timeline=timeline,
        until=until,
        hindsights=hindsights,
        progress=_progress(entries),
        written=traffic.series,
        durable=[(float(e["at"]), float(e["durable_seconds"])) for e in entries if e["kind"] == "commit"],
        stalls=[(float(e["at"]), float(e["stall_seconds"])) for e in entries if e["kind"] == "commit"],
    )


def _is_complete(entry: Mapping[str, Any]) -> bool:
    """Whether it says what entries of its kind say here; those of another version may not."""
    try:
        summarize([dict(entry)])
        Timeline().take_all([entry])
        run_costs([entry])
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


# ------------------------------------------------------------ failures and saves


def _failures(costs: Iterable[FailureCost], entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    said = {(e["generation"], e["rank"]): e for e in entries if e["kind"] == "failure"}
    told = []
    for cost in costs:
        entry = said.get((cost.generation, cost.rank))
        told.append(
            {
                **{name: value for name, value in asdict(cost).items() if name != "seconds"},
                "lost_steps": cost.lost_steps,
                "lost_seconds": cost.lost_seconds,
                "seconds": dict(cost.seconds),
                "said": words.failure(entry) if entry else "the driver ended",
                "error": words.cut(entry["error"]) if entry and entry.get("error") else None,
            }
        )
    return told


def _saves(summary: Summary, costs: RunCosts, account: Account) -> dict[str, Any]:
    return {
        "committed": summary.commits,
        "skipped": summary.skipped,
        "failed": summary.failed_saves,
        "bytes": costs.bytes,
        "stall_seconds": _spread(costs.stall_seconds),
        "restorable_seconds": _spread(costs.durable_seconds),
        "interference_seconds": _spread(costs.interference_seconds),
        "stalled_seconds_total": account.seconds["save_stall"],
        "slowed_seconds_total": account.seconds["save_interference"],
        "quarantined": dict(summary.quarantined),
    }


def _spread(samples: Sequence[float]) -> dict[str, float] | None:
    return {"median": statistics.median(samples), "max": max(samples)} if samples else None


# ------------------------------------------------------------ cadence


def _hindsights(entries: Sequence[Mapping[str, Any]], costs: RunCosts) -> dict[str, Hindsight]:
    stretches = stretches_of(entries)
    step_seconds = costs.step_seconds or 0.0
    found = {
        "durable": hindsight(
            "durable",
            [Stretch(seconds, source is not None and source != "memory") for seconds, source in stretches],
            SaveCost(_median(costs.stall_seconds), _median(costs.durable_seconds), _median(costs.interference_seconds)),
            step_seconds=step_seconds,
            as_run_seconds=_trained_a_save(stretches, entries),
        )
    }
    memory = [entry for entry in entries if entry["kind"] == "cadence" and entry["tier"] == "memory"]
    if memory or any(source == "memory" for _, source in stretches):
        cost = memory[-1]["inputs"]["cost"] if memory else None
        found["memory"] = hindsight(
            "memory",
            [Stretch(seconds, source == "memory") for seconds, source in stretches],
            SaveCost(**cost) if cost else SaveCost(_median(costs.stall_seconds), _median(costs.copied_seconds)),
            step_seconds=step_seconds,
            # A checkpoint is a snapshot first, so both shorten what a failure costs here.
            as_run_seconds=_together(_decided(memory, float(entries[-1]["at"])), found["durable"]),
        )
    return {tier: one for tier, one in found.items() if one is not None}


def _told(one: Hindsight) -> dict[str, Any]:
    return {
        "failures": one.failures,
        "trained_seconds": one.trained_seconds,
        "save_cost_seconds": one.cost.cost_seconds,
        "restorable_seconds": one.cost.durable_seconds,
        "as_run_seconds": one.as_run_seconds,
        "as_run_waste_seconds": one.as_run_waste_seconds,
        "best_seconds": one.best_seconds,
        "best_waste_seconds": one.best_waste_seconds,
        "formula_seconds": one.formula_seconds,
        "formula_waste_seconds": one.formula_waste_seconds,
        "curve": [list(point) for point in one.curve[:: max(1, len(one.curve) // _CURVE_POINTS)]],
    }


def _trained_a_save(
    stretches: Iterable[tuple[float, str | None]], entries: Iterable[Mapping[str, Any]]
) -> float | None:
    """How long was trained for each save: what was trained before a failure that no save came before counts too."""
    saves = sum(entry["kind"] == "commit" for entry in entries)
    return sum(seconds for seconds, _ in stretches) / saves if saves else None


def _boundary(commit: Mapping[str, Any]) -> float:
    return float(commit["snapshot_at"] - commit["copy_seconds"])


def _decided(decisions: Sequence[Mapping[str, Any]], until: float) -> float | None:
    """The mean over time of the intervals that were decided: of how often was saved, so of their inverse."""
    spans = [
        (float(following["at"]) - float(one["at"]), float(one["interval_seconds"]))
        for one, following in zip(decisions, [*decisions[1:], {"at": until}], strict=True)
    ]
    time = sum(span for span, _ in spans)
    often = sum(span / interval for span, interval in spans if interval)
    return time / often if time > 0 and often > 0 else None


def _together(memory_seconds: float | None, durable: Hindsight | None) -> float | None:
    """Of two ways to take snapshots, each at an interval of its own, the interval of both."""
    seconds = [memory_seconds, durable.as_run_seconds if durable else None]
    often = sum(1.0 / one for one in seconds if one)
    return 1.0 / often if often else None


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else 0.0


# ------------------------------------------------------------ series


class _Traffic:
    """What went to and from the storage, as far as the ledger tells: writes that failed are not in it."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self.series: list[Point] = []
        self._written = self._read_back = self._restored = self._copied = 0.0
        sizes: dict[str, float] = {}
        ranks = 1
        for entry in entries:
            match entry["kind"]:
                case "generation":
                    ranks = max(1, int(entry["ranks"]))
                case "commit":
                    sizes[entry["checkpoint"]] = size = float(entry["bytes"])
                    self._written += size
                    if set(entry.get("verified_from", ())) - {"nothing"}:
                        self._read_back += size
                    self.series.append((float(entry["at"]), self._written))
                case "restored" if entry.get("checkpoint"):
                    self._restored += sizes.get(entry["checkpoint"], 0.0) / ranks
                case "replicated":
                    self._copied += float(entry["bytes"])

    def told(self, seconds: float) -> dict[str, Any]:
        return {
            "written_bytes": self._written,
            "read_back_bytes": self._read_back,
            "restored_bytes": self._restored,
            "copied_bytes_at_least": self._copied,
            "written_bytes_per_second": self._written / seconds if seconds > 0 else None,
        }


def _progress(entries: Iterable[Mapping[str, Any]]) -> list[Point]:
    """How far the run was when; back to what was restored at each failure."""
    points: list[Point] = []
    generation = 0
    for entry in entries:
        kind = entry["kind"]
        if kind == "generation":
            generation = entry["generation"]
            points.append((float(entry["at"]), float(entry["restored_step"])))
        elif entry.get("generation") != generation or not isinstance(entry.get("step"), int):
            continue
        elif kind == "first_step" or kind == "progress":
            points.append((float(entry["at_step"]), float(entry["step"])))
        elif kind == "commit":
            points.append((_boundary(entry), float(entry["step"])))
        elif kind == "failure":
            points.append((float(entry["failed_at"]), float(max(0, entry["step"]))))
        elif kind == "finished":
            points.append((float(entry["at"]), float(entry["step"])))
    return sorted(points, key=lambda point: point[0])
