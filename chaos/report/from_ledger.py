"""The timeline of a run, from what its run directory says: the ledger, and the records of the faults that fired."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.report.timeline import Lane, Mark, Span, Timeline
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger

Entry = Mapping[str, Any]

_COMMITS_MAX = 200
"""More marks than that are no longer seen apart."""


@dataclass(slots=True)
class _Generation:
    """One generation as the ledger has it. `trained_from`: when its first step was under way on all ranks."""

    number: int
    began_at: float
    restored_step: int
    source: str
    trained_from: float | None = None
    ended_at: float | None = None
    last_step: int = -1


def run_timeline(run_dir: Path, title: str) -> Timeline:
    """A strip for each rank, and one for keepers and coordinator with the faults that hit them."""
    ledger = read_ledger(run_dir / LEDGER_FILE)
    began = min((entry["at"] for entry in ledger), default=0.0)
    over = max((entry["at"] for entry in ledger), default=0.0)
    generations = _generations(ledger)
    ranks = max((entry["ranks"] for entry in ledger if entry["kind"] == "generation"), default=0)
    spans = _spans(generations, began, over)
    faults = [_fault(record, began) for record in _fired(run_dir / "faults")]
    lanes = [Lane(name=f"rank {rank}", spans=spans, marks=_marks(ledger, rank, began, faults)) for rank in range(ranks)]
    rest = [mark for rank, mark in faults if rank is None]
    commits = [
        Mark(at_seconds=entry["at"] - began, kind="commit", label=f"step {entry['step']}")
        for entry in ledger
        if entry["kind"] == "commit"
    ]
    shown = commits[:: max(1, len(commits) // _COMMITS_MAX)]
    return Timeline(title=title, lanes=[*lanes, Lane(name="coordinator, keepers", marks=[*shown, *rest])])


def _generations(ledger: Sequence[Entry]) -> list[_Generation]:
    found: dict[int, _Generation] = {}
    for entry in ledger:
        generation = found.get(entry.get("generation", -1))
        if entry["kind"] == "generation":
            found[entry["generation"]] = _Generation(
                entry["generation"], entry["at"], entry["restored_step"], entry["source"]
            )
        elif generation is None:
            continue
        elif entry["kind"] == "first_step":
            generation.trained_from = max(generation.trained_from or 0.0, entry["at_step"])
        elif entry["kind"] == "failure":
            generation.ended_at, generation.last_step = entry["failed_at"], entry["step"]
        elif entry["kind"] == "finished":
            generation.ended_at, generation.last_step = entry["at"], entry["step"]
    return sorted(found.values(), key=lambda one: one.number)


def _spans(generations: Sequence[_Generation], began: float, over: float) -> list[Span]:
    """Ranks move together, so they have the same."""
    spans: list[Span] = []
    at = began
    for index, one in enumerate(generations):
        following = generations[index + 1] if index + 1 < len(generations) else None
        ended = one.ended_at or (following.began_at if following else over)
        trained = min(one.trained_from if one.trained_from is not None else ended, ended)
        restored = f"step {one.restored_step} from {one.source}" if one.source != "fresh" else "starting"
        spans.append(Span(start_seconds=at - began, end_seconds=trained - began, kind="recovering", label=restored))
        lost_from = ended
        if following is not None and one.last_step > max(following.restored_step, one.restored_step - 1):
            done = one.last_step - one.restored_step
            kept = max(0, following.restored_step - one.restored_step)
            # Steps take about as long as each other.
            lost_from = trained + (ended - trained) * (kept / done if done else 1.0)
        label = f"generation {one.number}"
        spans.append(Span(start_seconds=trained - began, end_seconds=lost_from - began, kind="training", label=label))
        if lost_from < ended and following is not None:
            lost = f"steps {following.restored_step + 1} to {one.last_step}"
            spans.append(Span(start_seconds=lost_from - began, end_seconds=ended - began, kind="lost", label=lost))
        at = ended
    return [span for span in spans if span.end_seconds > span.start_seconds]


def _marks(ledger: Sequence[Entry], rank: int, began: float, faults: Sequence[tuple[int | None, Mark]]) -> list[Mark]:
    marks = [mark for hit, mark in faults if hit == rank]
    for entry in ledger:
        if entry.get("rank") != rank:
            continue
        if entry["kind"] == "failure":
            at = entry.get("noticed_at") or entry["at"]
            marks.append(Mark(at_seconds=at - began, kind="detection", label=f"{entry['cause']}"))
        elif entry["kind"] == "restored" and entry["source"] != "fresh":
            label = f"step {entry['step']} from {entry['source']}"
            marks.append(Mark(at_seconds=entry["at"] - began, kind="restore", label=label))
    return marks


def _fault(record: Mapping[str, Any], began: float) -> tuple[int | None, Mark]:
    rank = record["context"].get("rank")
    label = f"{record['action']} at {record['point']}"
    return rank, Mark(at_seconds=max(0.0, record["at"] - began), kind="fault", label=label)


def _fired(directory: Path) -> list[dict[str, Any]]:
    records = []
    for path in sorted(directory.glob("*.json")):
        try:
            records.append(json.loads(path.read_bytes()))
        except ValueError:
            continue  # its writer was killed meanwhile
    return [record for record in records if isinstance(record, dict) and "point" in record]
