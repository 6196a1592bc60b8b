"""A run's history as a drawing: what each rank did over time, what struck it, and when it was restored."""

from chaos.history import Entry, History
from chaos.report import Lane, Mark, Span, Timeline

_RUN_LANE = "run"
_COMMITS_MAX = 200
"""More marks than that are no longer seen apart."""


def timeline(history: History) -> Timeline:
    """One lane a rank, and one for what concerns no single rank."""
    began = float(history.ledger[0]["at"]) if history.ledger else 0.0
    ended = float(history.ledger[-1]["at"]) - began if history.ledger else 0.0
    ranks = sorted({entry["rank"] for entry in history.entries("first_step")})
    lanes = [
        Lane(name=f"rank {rank}", spans=_spans(history, rank, began, ended), marks=_marks(history, rank, began))
        for rank in ranks
    ]
    return Timeline(title=str(history.run_dir), lanes=[*lanes, Lane(name=_RUN_LANE, marks=_run_marks(history, began))])


def _spans(history: History, rank: int, began: float, ended: float) -> list[Span]:
    spans: list[Span] = []
    training_since: float | None = None
    failed_at: float | None = None
    restored = {record.number: record.restored_step for record in history.generations}
    for entry in history.ledger:
        if entry["kind"] == "first_step" and entry["rank"] == rank:
            at = float(entry["at_step"]) - began
            if failed_at is not None and at > failed_at:
                label = f"generation {entry['generation']}, from step {restored.get(entry['generation'], 0)}"
                spans.append(Span(start_seconds=failed_at, end_seconds=at, kind="recovering", label=label))
            training_since, failed_at = at, None
        elif entry["kind"] == "failure":
            at = float(entry["failed_at"]) - began
            if training_since is not None:
                end = max(training_since, at)
                label = f"generation {entry['generation']}, to step {entry['step']}"
                spans.append(Span(start_seconds=training_since, end_seconds=end, kind="training", label=label))
            failed_at = at if failed_at is None else failed_at
            training_since = None
    if training_since is not None:
        spans.append(Span(start_seconds=training_since, end_seconds=max(training_since, ended), kind="training"))
    elif failed_at is not None:
        spans.append(Span(start_seconds=failed_at, end_seconds=max(failed_at, ended), kind="recovering"))
    return spans


def _marks(history: History, rank: int, began: float) -> list[Mark]:
    faults = [_fault(fault, began) for fault in history.faults if fault["context"].get("rank") == rank]
    noticed = [
        Mark(at_seconds=float(entry["noticed_at"] or entry["at"]) - began, kind="detection", label=str(entry["cause"]))
        for entry in history.entries("failure")
        if entry["rank"] == rank
    ]
    restored = [
        Mark(
            at_seconds=float(entry["at"]) - began,
            kind="restore",
            label=f"step {entry['step']} from {entry['checkpoint'] or 'memory or the start'}",
        )
        for entry in history.entries("restored")
        if entry["rank"] == rank and entry["generation"] > 1
    ]
    return [*faults, *noticed, *restored]


def _run_marks(history: History, began: float) -> list[Mark]:
    faults = [_fault(fault, began) for fault in history.faults if fault["context"].get("rank") is None]
    commits = [
        Mark(at_seconds=float(entry["at"]) - began, kind="commit", label=f"step {entry['step']}")
        for entry in history.entries("commit")
    ]
    return [*faults, *commits[:: max(1, len(commits) // _COMMITS_MAX)]]


def _fault(fault: Entry, began: float) -> Mark:
    return Mark(at_seconds=float(fault["at"]) - began, kind="fault", label=f"{fault['action']} at {fault['point']}")
