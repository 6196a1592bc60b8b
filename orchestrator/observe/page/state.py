"""How a run is doing, as one JSON document: the ledger folded, and what only its coordinator knows at the moment.

Invariants:
- All that the page shows is in the document; the page is drawn from nothing else.
- An entry that cannot be understood changes nothing; it never raises, since the coordinator calls this as it writes.
- What is kept is bounded, however long the run.

docs/status.md lists the fields.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.observe import words
from orchestrator.observe.accounting import Account, FailureCost
from orchestrator.observe.summary import Summary
from orchestrator.observe.timeline import Timeline

logger = logging.getLogger("lastgood")

VERSION = 1
_QUIET_SECONDS = 10.0
"""Ranks are heard of twice a second; after so long without a word one is shown as silent."""
_PACE_STEPS_MIN = 3
_HAPPENINGS_SHOWN = 60
_CADENCE_WORDS = {
    "overhead": "saves may take no larger part of the time than is allowed",
    "bandwidth": "the next save has to wait until the storage has taken this one",
    "disk": "little room is left on the disk",
    "memory": "a snapshot needs some steps",
    "prudence": "there are few measurements yet",
}


class RunView:
    """Takes ledger entries one by one, in their order. Not thread-safe: who shares it, locks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.summary = Summary()
        self.timeline = Timeline()
        self._agents: dict[int, dict[str, Any]] = {}
        self._dead: set[int] = set()
        self._suspected: set[int] = set()
        self._slow: set[int] = set()
        self._cadence: dict[str, dict[str, Any]] = {}
        self._last_failure: dict[str, Any] | None = None
        self._total_steps: int | None = None
        self._state_since: float | None = None
        self._began: tuple[float, int] | None = None
        self._known: tuple[float, int] | None = None
        self._pace_seconds: float | None = None
        self._report: str | None = None
        self._bytes = 0

    def take(self, entry: Mapping[str, Any]) -> None:
        state = self.summary.state
        for fold in (self.summary.add, self.timeline.take, self._take):
            try:
                fold(dict(entry))
            except (KeyError, TypeError, ValueError, AttributeError):
                logger.debug("lastgood: the status page cannot read a ledger entry: %s", entry, exc_info=True)
        if self.summary.state != state or self._state_since is None:
            at = entry.get("failed_at" if entry.get("kind") == "failure" else "at")
            self._state_since = at if isinstance(at, int | float) else None

    def take_all(self, entries: Iterable[Mapping[str, Any]]) -> "RunView":
        for entry in entries:
            self.take(entry)
        return self

    def document(self, now: float, live: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """At Unix time `now`. `live`: what `Coordinator.status` returns, and the `problems` that /healthz names; None
        if no coordinator is asked."""
        summary, live = self.summary, live or {}
        # Not the highest that the run has done: after a failure it is taken back, and its end is so much farther.
        step = max(summary.accounting.position, int(live.get("step") or 0))
        account = summary.accounting.at(now if self.timeline.ended_at is None else self.timeline.ended_at)
        return {
            "v": VERSION,
            "now": now,
            "live": bool(live),
            "run": {
                "name": self.run_dir.name,
                "dir": str(self.run_dir),
                "started_at": self.timeline.started_at,
                "ended_at": self.timeline.ended_at,
                "drivers": len(summary.drivers),
            },
            "state": {
                "name": summary.state,
                "since": self._state_since,
                "generation": summary.generation,
                "ranks": summary.ranks,
                "source": summary.source,
                "reason": summary.stop_reason and words.cut(summary.stop_reason),
                "report": self._report,
                "suspected": sorted(self._suspected),
            },
            "problems": [words.cut(one) for one in live.get("problems", ())],
            "progress": self._progress(step, now),
            "protection": self._protection(step, live),
            "account": _account(account, summary.accounting.costs),
            "failures": {
                "count": summary.failures.total(),
                "by_cause": dict(summary.failures.most_common()),
                "recovery_seconds_median": summary.recovery_seconds_median,
                "last": self._last_failure,
            },
            "saves": {
                "commits": summary.commits,
                "skipped": summary.skipped,
                "failed": summary.failed_saves,
                "durable_seconds_median": summary.durable_seconds_median,
                "bytes": self._bytes,
            },
            "cadence": dict(sorted(self._cadence.items())),
            "ranks": self._ranks(live, now),
            "quarantined": dict(summary.quarantined),
            "loss": live.get("loss"),
            "happenings": [asdict(one) for one in list(self.timeline.happenings)[-_HAPPENINGS_SHOWN:]][::-1],
        }

    # ------------------------------------------------------------ entries

    def _take(self, entry: Mapping[str, Any]) -> None:
        match entry["kind"]:
            case "coordinator":
                self._total_steps = entry.get("total_steps") or self._total_steps
            case "agent":
                self._agents[entry["rank"]] = {"rank": entry["rank"], "node": entry["node"], "pid": entry.get("pid")}
            case "generation":
                self._began = self._known = None
                self._dead, self._suspected, self._slow = set(), set(), set()
                self._agents = {rank: agent for rank, agent in self._agents.items() if rank < entry["ranks"]}
            case "first_step":
                self._began = (float(entry["at_step"]), int(entry["step"]))
            case "progress":
                self._seen(float(entry["at_step"]), int(entry["step"]), int(entry["generation"]))
            case "commit":
                self._bytes = int(entry["bytes"])
                self._seen(float(entry["snapshot_at"]), int(entry["step"]), int(entry["generation"]))
            case "failure":
                self._dead = {entry["rank"], *(echo["rank"] for echo in entry["echoes"])} - {-1}
                self._suspected = set()
                self._last_failure = _failure(entry)
                self._seen(float(entry["failed_at"]), int(entry["step"]), int(entry["generation"]))
            case "suspected":
                self._suspected = set(entry["ranks"])
            case "cleared":
                self._suspected = set()
            case "straggler":
                self._slow.add(entry["rank"])
            case "coordinator" if not entry.get("resumed"):
                self._cadence.clear()  # this driver may save by another rule
            case "cadence":
                self._cadence[entry["tier"]] = _cadence(entry)
            case "stopped":
                self._report = entry.get("report")

    def _seen(self, at: float, step: int, generation: int) -> None:
        """A step was done by then, in this generation."""
        if self._began is None or generation != self.summary.generation:
            return
        self._known = (at, step)
        done = step - self._began[1]
        if done >= _PACE_STEPS_MIN and at > self._began[0]:
            self._pace_seconds = (at - self._began[0]) / done

    # ------------------------------------------------------------ parts of the document

    def _progress(self, step: int, now: float) -> dict[str, Any]:
        pace = self._pace_seconds
        if self._began is not None and self.summary.state == "training" and step - self._began[1] >= _PACE_STEPS_MIN:
            known_at = now if self._known is None or step > self._known[1] else self._known[0]
            pace = max(0.0, known_at - self._began[0]) / (step - self._began[1])
        total = self._total_steps
        left = None if total is None or self.timeline.ended_at is not None else max(0, total - step)
        return {
            "step": step,
            "regaining_step": self.summary.accounting.step if step < self.summary.accounting.step else None,
            "total_steps": total,
            "step_seconds": pace,
            "eta_seconds": None if left is None or pace is None else left * pace,
        }

    def _protection(self, step: int, live: Mapping[str, Any]) -> dict[str, Any]:
        summary = self.summary
        committed = summary.committed_step
        copied = live.get("copied_step")
        if summary.unprotected_since is not None:
            level = "unprotected"
        elif committed is None and not (summary.source == "checkpoint" and summary.generation):
            level = "nothing"
        else:
            level = "protected"
        return {
            "level": level,
            "committed_step": committed,
            "committed_at": summary.committed_at,
            "checkpoint": summary.checkpoint,
            "memory_step": copied if isinstance(copied, int) and copied >= 0 else None,
            "steps_at_risk": max(0, step - (committed or 0)),
            "unprotected_since": summary.unprotected_since,
        }

    def _ranks(self, live: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
        told = {one["rank"]: one for one in live.get("ranks", ())}
        ranks = []
        for rank in sorted({*self._agents, *told}):
            agent, one = self._agents.get(rank, {}), told.get(rank, {})
            heard_at = one.get("heard_at") or None
            ranks.append(
                {
                    "rank": rank,
                    "node": one.get("node_id") or agent.get("node"),
                    "pid": one.get("pid"),
                    "step": one["step"] if one.get("step", -1) >= 0 else None,
                    "heard_at": heard_at,
                    "condition": self._condition(rank, bool(live), heard_at, now),
                }
            )
        return ranks

    def _condition(self, rank: int, live: bool, heard_at: float | None, now: float) -> str:
        """What is the matter with it: the worst that is known."""
        if self.summary.state in ("finished", "stopped"):
            return "ended"
        if rank in self._dead and self.summary.state == "recovering":
            return "dead"
        if rank in self._suspected:
            return "suspected"
        if live and heard_at is not None and now - heard_at > _QUIET_SECONDS:
            return "silent"
        return "slow" if rank in self._slow else "ok"


def _account(account: Account, costs: Iterable[FailureCost]) -> dict[str, Any]:
    lost: dict[str, dict[str, Any]] = {}
    for cost in costs:
        one = lost.setdefault(cost.cause, {"failures": 0, "steps": 0, "seconds": 0.0})
        one["failures"] += 1
        one["steps"] += cost.lost_steps
        one["seconds"] += cost.lost_seconds
    return {
        "elapsed_seconds": account.elapsed_seconds,
        "goodput_ratio": account.goodput_ratio,
        "ettr_ratio": account.ettr_ratio,
        "save_overhead_ratio": account.save_overhead_ratio,
        "seconds": dict(account.seconds),
        "lost": dict(sorted(lost.items(), key=lambda item: -item[1]["seconds"])),
    }


def _failure(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": entry["failed_at"],
        "rank": entry["rank"],
        "cause": entry["cause"],
        "step": max(0, entry["step"]),
        "error": None if entry.get("error") is None else words.cut(entry["error"]),
        "said": words.failure(entry),
    }


def _cadence(entry: Mapping[str, Any]) -> dict[str, Any]:
    """How often, and why, in words."""
    inputs = entry["inputs"]
    cost, rate = inputs["cost"], inputs["failures_per_second"]
    slowdown = cost.get("interference_seconds", 0.0)
    why = [
        f"a save costs {words.duration(cost['stall_seconds'] + slowdown)} of training",
        f"a failure that needs it is expected every {words.duration(1 / rate)}" if rate else "no failure is expected",
        f"best would be every {words.duration(float(entry['best_seconds']))}",
    ]
    bounds = [_CADENCE_WORDS.get(bound["name"], bound["name"]) for bound in entry["bounds"]]
    if bounds:
        why.append(f"held back because {bounds[0]}")
    return {
        "at": entry["at"],
        "interval_seconds": entry["interval_seconds"],
        "interval_steps": entry["interval_steps"],
        "best_seconds": entry["best_seconds"],
        "goodput_ratio": entry["goodput_ratio"],
        "bounds": [bound["name"] for bound in entry["bounds"]],
        "why": "; ".join(why),
    }
