"""The timeline of a run is what its ledger says: when ranks trained, recovered, and trained for nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.report import Mark, run_timeline


def write(run_dir: Path, entries: list[dict[str, Any]]) -> None:
    lines = [{"v": 1, "seq": number, **entry} for number, entry in enumerate(entries, 1)]
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def generation(number: int, at: float, restored_step: int, source: str) -> dict[str, Any]:
    return {
        "kind": "generation",
        "at": at,
        "generation": number,
        "restored_step": restored_step,
        "source": source,
        "ranks": 2,
    }


def first_step(number: int, rank: int, at: float) -> dict[str, Any]:
    return {"kind": "first_step", "at": at, "at_step": at, "generation": number, "rank": rank, "step": 1}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    failure = {"kind": "failure", "at": 120.4, "generation": 1, "rank": 1, "cause": "signal"}
    write(
        tmp_path,
        [
            {"kind": "coordinator", "at": 100.0},
            generation(1, 101.0, 0, "fresh"),
            first_step(1, 0, 102.0),
            first_step(1, 1, 103.0),
            {"kind": "commit", "at": 112.0, "generation": 1, "step": 10},
            failure | {"failed_at": 120.0, "noticed_at": 120.2, "step": 20},
            generation(2, 121.0, 10, "checkpoint"),
            {"kind": "restored", "at": 122.0, "generation": 2, "rank": 1, "source": "checkpoint", "step": 10},
            first_step(2, 1, 123.0),
            {"kind": "finished", "at": 140.0, "generation": 2, "step": 30},
        ],
    )
    (tmp_path / "faults").mkdir()
    fault = {"point": "step.end", "action": "kill_rank", "at": 120.0, "context": {"rank": 1}}
    (tmp_path / "faults" / "a.json").write_text(json.dumps(fault))
    other = {"point": "commit.fsync", "action": "kill_self", "at": 112.5, "context": {"step": 10}}
    (tmp_path / "faults" / "b.json").write_text(json.dumps(other))
    (tmp_path / "faults" / "c.json").write_text('{"point": "comm')
    return tmp_path


def test_each_rank_trains_recovers_and_loses_what_was_not_restored(run_dir: Path) -> None:
    timeline = run_timeline(run_dir, "a run")
    assert [lane.name for lane in timeline.lanes] == ["rank 0", "rank 1", "coordinator, keepers"]
    spans = [(span.kind, span.start_seconds, span.end_seconds, span.label) for span in timeline.lanes[1].spans]
    assert spans == [
        ("recovering", 0.0, 3.0, "starting"),
        ("training", 3.0, pytest.approx(11.5), "generation 1"),  # half of its steps
        ("lost", pytest.approx(11.5), 20.0, "steps 11 to 20"),
        ("recovering", 20.0, 23.0, "step 10 from checkpoint"),
        ("training", 23.0, 40.0, "generation 2"),
    ]
    assert timeline.lanes[0].spans == timeline.lanes[1].spans


def test_faults_detections_and_restores_are_on_the_strip_that_they_hit(run_dir: Path) -> None:
    rank_0, rank_1, rest = run_timeline(run_dir, "a run").lanes
    assert rank_0.marks == []
    assert [(mark.kind, round(mark.at_seconds, 1), mark.label) for mark in rank_1.marks] == [
        ("fault", 20.0, "kill_rank at step.end"),
        ("detection", 20.2, "signal"),
        ("restore", 22.0, "step 10 from checkpoint"),
    ]
    assert rest.marks == [
        Mark(at_seconds=12.0, kind="commit", label="step 10"),
        Mark(at_seconds=12.5, kind="fault", label="kill_self at commit.fsync"),
    ]


def test_a_run_that_never_began_has_no_strips_of_ranks(tmp_path: Path) -> None:
    write(tmp_path, [{"kind": "coordinator", "at": 1.0}])
    assert [lane.name for lane in run_timeline(tmp_path, "none").lanes] == ["coordinator, keepers"]
