"""How a run is doing, as its ledger tells."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.observe.ledger import Ledger
from orchestrator.observe.summary import summarize


def story() -> list[dict[str, Any]]:
    """Two ranks; rank 1 dies after step 27, when step 20 is committed."""
    return [
        {"kind": "coordinator", "at": 0.0, "driver": "d", "resumed": False},
        generation(1, 0),
        *(first_step(1, rank, 1, 2.0) for rank in (0, 1)),
        commit(10, 3.0),
        commit(20, 4.0),
        {"kind": "save_skipped", "at": 4.5, "generation": 1, "step": 25, "reason": "r"},
        {
            "kind": "failure",
            "at": 5.1,
            "generation": 1,
            "rank": 1,
            "cause": "signal",
            "exit_code": -9,
            "failed_at": 5.0,
            "step": 27,
            "error": None,
            "echoes": [],
            "restore_failed": None,
        },
        generation(2, 20),
        first_step(2, 0, 21, 5.4),
    ]


def generation(number: int, restored_step: int) -> dict[str, Any]:
    return {"kind": "generation", "at": 1.0, "generation": number, "restored_step": restored_step, "ranks": 2}


def first_step(number: int, rank: int, step: int, at: float) -> dict[str, Any]:
    return {"kind": "first_step", "at": at, "generation": number, "rank": rank, "step": step, "at_step": at}


def commit(step: int, at: float) -> dict[str, Any]:
    return {"kind": "commit", "at": at, "generation": 1, "step": step, "checkpoint": f"c{step}", "durable_seconds": 0.5}


def test_lost_steps_count_from_the_failure_back_to_what_was_restored() -> None:
    summary = summarize(story())
    assert (summary.lost_steps, summary.committed_step, summary.step) == (7, 20, 27)
    assert summary.failures == {"signal": 1}
    assert (summary.commits, summary.skipped) == (2, 1)


def test_batches_left_out_after_bad_losses_are_counted_over_all_rollbacks() -> None:
    skips = [{"kind": "skip", "at": 6.0, "batches": batches} for batches in ([[0, 3]], [[0, 4], [0, 5]])]
    assert summarize([*story(), *skips]).batches_skipped == 3


def test_a_recovery_ends_when_the_last_rank_has_done_a_new_step() -> None:
    assert summarize(story()).recovery_seconds == []
    summary = summarize([*story(), first_step(2, 1, 21, 5.5)])
    assert summary.recovery_seconds == [0.5]
    assert summary.state == "training"


def test_the_state_follows_the_run() -> None:
    assert summarize([]).state == "starting"
    assert summarize(story()[:8]).state == "recovering"
    assert summarize([*story(), {"kind": "finished", "at": 9.0, "step": 60}]).state == "finished"
    stopped = summarize([*story(), {"kind": "stopped", "at": 9.0, "reason": "no\nprogress", "error_type": "x"}])
    assert (stopped.state, stopped.stop_reason) == ("stopped", "no\nprogress")
    assert summarize([*story(), {"kind": "from a later version", "at": 9.0}]).state == "training"


def test_a_commit_of_a_driver_that_was_overtaken_protects_nothing() -> None:
    entries = [generation(1, 0), commit(20, 1.0), generation(2, 20), commit(30, 2.0), commit(40, 3.0)]
    entries[3]["generation"], entries[4]["generation"] = 1, 2
    late = summarize(entries[:4])
    assert (late.committed_step, late.commits) == (20, 1)
    assert summarize(entries).committed_step == 40


def test_a_driver_that_was_refused_has_not_stopped_the_run() -> None:
    refused = {"kind": "stopped", "at": 2.0, "driver": "d", "reason": "pids 1, 2", "error_type": "EnvironmentProblem"}
    summary = summarize([generation(1, 0), first_step(1, 0, 1, 1.0), refused, commit(20, 3.0)])
    assert (summary.state, summary.stop_reason) == ("training", None)


def test_a_run_that_is_begun_again_starts_until_it_trains() -> None:
    again = {"kind": "coordinator", "at": 9.0, "driver": "e", "resumed": False}
    ended = {"kind": "finished", "at": 8.0, "step": 30}
    assert summarize([*story(), ended, again]).state == "starting"
    assert summarize([*story(), {**again, "resumed": True}]).state == "training"
    refused = [*story(), again, {"kind": "progress", "at": 60.0, "generation": 2, "step": 40, "at_step": 59.9}]
    assert summarize(refused).state == "training"


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "from orchestrator.cli.app import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def write(run_dir: Path) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl")
    for entry in story():
        ledger.append(**entry)


def test_status_and_events_read_a_run_directory(tmp_path: Path) -> None:
    write(tmp_path)
    status = run_command("status", str(tmp_path), "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["lost_steps"] == 7
    words = run_command("status", str(tmp_path)).stdout
    assert "protected   up to step 20" in words
    assert "rank 1 after step 27: signal -9" in words
    events = run_command("events", str(tmp_path), "--json")
    assert [json.loads(line)["kind"] for line in events.stdout.splitlines()] == [one["kind"] for one in story()]


def test_a_run_that_was_killed_is_not_told_as_if_it_trained_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("coordinator", at=time.time() - 1000, driver="d", resumed=False, pid=1)
    assert "SILENT" in run_command("status", str(tmp_path)).stdout
    ledger.append("agent", agent="a", rank=0, pid=1, node="n")
    assert "SILENT" not in run_command("status", str(tmp_path)).stdout


def test_an_entry_that_lacks_what_its_kind_says_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"seq": 90, "kind": "coordinator"}\n{"seq": 91, "at": 6, "kind": "commit", "step": 1}\n')
    for command in (("status",), ("events",), ("report",)):
        found = run_command(*command, str(tmp_path))
        assert found.returncode == 0, found.stderr


def test_a_directory_without_a_ledger_is_an_error_that_names_it(tmp_path: Path) -> None:
    refused = run_command("events", str(tmp_path))
    assert refused.returncode == 2
    assert str(tmp_path) in refused.stderr
