"""The demo's verdict is read from what the runs left behind, and every claim in it can fail."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_samples import RANKS, STEPS, FakeRun, edit_ledger, flip_last_bit, killed_twice, read, undisturbed

from chaos.demo.judge import judge
from workers.checkpoint.manifest import checkpoint_dir, checkpoint_name, read_manifest


@pytest.fixture
def reference(tmp_path: Path) -> FakeRun:
    return undisturbed(tmp_path / "reference")


@pytest.fixture
def attacked(tmp_path: Path) -> FakeRun:
    return killed_twice(tmp_path / "attacked")


def report_of(attacked: FakeRun, reference: FakeRun, planned_kills: int = 2) -> dict[str, Any]:
    report, rows = judge(attacked.directory, reference.directory, planned_kills=planned_kills, steps=STEPS)
    assert [holds for _, _, holds in rows] == list(report["claims"].values())
    return report


def broken(report: dict[str, Any]) -> set[str]:
    return {claim for claim, holds in report["claims"].items() if not holds}


def test_run_that_kept_every_promise_is_judged_so(attacked: FakeRun, reference: FakeRun) -> None:
    report = report_of(attacked, reference)
    assert broken(report) == set()
    assert report["bitwise_equal"]
    assert report["kills"] == 2
    assert report["killed_during"] == ["snapshot.copy"]
    assert (report["newest_committed_step"], report["restored_step"], report["lost_steps"]) == (4, 4, 4)
    assert (report["samples_missing"], report["samples_duplicated"], report["torn_restores"]) == (0, 0, 0)
    assert report["ray_workers_restarted"] == 0
    assert report["recoveries"][1]["lost_steps"] == 1


def test_recovery_time_ends_when_the_slowest_rank_has_done_its_step(attacked: FakeRun, reference: FakeRun) -> None:
    first_steps = [entry for entry in read(attacked) if entry["kind"] == "first_step" and entry["generation"] == 2]
    killed_at = json.loads((attacked.directory / "faults/kill-1.json").read_text())["at"]
    expected = max(entry["at_step"] for entry in first_steps) - killed_at
    assert report_of(attacked, reference)["recovery_seconds"] == expected > 0


def test_missing_kill_breaks_the_plan(attacked: FakeRun, reference: FakeRun) -> None:
    assert broken(report_of(attacked, reference, planned_kills=3)) == {"attacked_as_planned"}


def test_kill_that_the_ledger_does_not_confirm_does_not_count(attacked: FakeRun, reference: FakeRun) -> None:
    edit_ledger(attacked, lambda entry: entry["kind"] != "failure" or entry["generation"] != 2)
    report = report_of(attacked, reference)
    assert broken(report) == {"attacked_as_planned"}
    assert report["recoveries"][1]["exit_code"] is None


def test_kill_counts_also_if_a_peer_s_error_was_seen_before_it(attacked: FakeRun, reference: FakeRun) -> None:
    def peer_first(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "failure" and entry["generation"] == 1:
            entry["echoes"] = [{"rank": 1, "cause": "signal", "exit_code": -signal.SIGKILL, "at": entry["at"]}]
            entry |= {"rank": 0, "cause": "exception", "exit_code": 1}
        return True

    edit_ledger(attacked, peer_first)
    assert broken(report_of(attacked, reference)) == set()


def test_rank_that_ended_otherwise_was_not_killed(attacked: FakeRun, reference: FakeRun) -> None:
    def exited(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "failure" and entry["generation"] == 1:
            entry["exit_code"] = 1
        return True

    edit_ledger(attacked, exited)
    assert broken(report_of(attacked, reference)) == {"attacked_as_planned"}


def test_run_that_never_trained_again_did_not_recover(attacked: FakeRun, reference: FakeRun) -> None:
    edit_ledger(attacked, lambda entry: entry["kind"] != "first_step" or entry["generation"] < 3)
    assert broken(report_of(attacked, reference)) == {"recovered"}


def test_new_ray_worker_is_counted(attacked: FakeRun, reference: FakeRun) -> None:
    attacked.record("agent", agent="a2", rank=1, pid=999, node="n")
    report = report_of(attacked, reference)
    assert broken(report) == {"ray_workers_stayed"}
    assert report["ray_workers_restarted"] == 1


def test_ledger_without_ray_workers_proves_nothing_about_them(attacked: FakeRun, reference: FakeRun) -> None:
    edit_ledger(attacked, lambda entry: entry["kind"] != "agent")
    assert broken(report_of(attacked, reference)) == {"ray_workers_stayed"}


def test_restore_of_bytes_that_are_not_the_committed_ones_is_torn(attacked: FakeRun, reference: FakeRun) -> None:
    flip_last_bit(attacked, checkpoint_name(4, 1, 1))
    report = report_of(attacked, reference)
    assert broken(report) == {"never_torn"}
    assert report["torn_restores"] == RANKS


def test_restore_before_the_commit_is_torn(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(4, 1, 1)
    edit_ledger(attacked, lambda entry: entry.get("checkpoint") != name or entry["kind"] != "commit")
    manifest = read_manifest(attacked.store, name)
    path = attacked.directory / checkpoint_dir(name) / "manifest.json"
    path.write_bytes(replace(manifest, created_at=attacked.now).to_bytes())
    assert "never_torn" in broken(report_of(attacked, reference))


def test_restart_from_an_older_step_than_the_newest_is_noticed(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(6, 1, 1)

    def earlier_commit(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "commit" and entry["step"] == 4:
            entry |= {"step": 6, "checkpoint": name}
        return True

    edit_ledger(attacked, earlier_commit)
    assert "newest_restored" in broken(report_of(attacked, reference))


def test_sample_used_twice_and_another_missing_are_counted(attacked: FakeRun, reference: FakeRun) -> None:
    path = attacked.directory / "samples/g0003-rank-00001.jsonl"
    path.write_text(path.read_text().replace("[0,[111]]", "[0,[101]]"))
    report = report_of(attacked, reference)
    assert broken(report) == {"each_sample_once"}
    assert (report["samples_missing"], report["samples_duplicated"]) == (1, 1)


def test_samples_in_another_order_are_noticed(attacked: FakeRun, reference: FakeRun) -> None:
    path = attacked.directory / "samples/g0003-rank-00001.jsonl"
    swapped = path.read_text().replace("[111]", "[x]").replace("[101]", "[111]").replace("[x]", "[101]")
    path.write_text(swapped)
    report = report_of(attacked, reference)
    assert broken(report) == {"each_sample_once"}
    assert (report["samples_missing"], report["samples_duplicated"]) == (0, 0)


def test_runs_without_any_record_of_samples_prove_nothing(attacked: FakeRun, reference: FakeRun) -> None:
    for run in (attacked, reference):
        for path in (run.directory / "samples").iterdir():
            path.unlink()
    assert broken(report_of(attacked, reference)) == {"each_sample_once"}


def test_one_different_bit_in_the_final_state_is_noticed(attacked: FakeRun, reference: FakeRun) -> None:
    flip_last_bit(attacked, checkpoint_name(12, 3, 1))
    report = report_of(attacked, reference)
    assert broken(report) == {"bitwise_equal"}
    assert report["tensors_different"] == ["rank-00000-of-00002.safetensors: rank.00000.w"]


def test_run_that_stopped_early_is_neither_finished_nor_equal(attacked: FakeRun, reference: FakeRun) -> None:
    (attacked.directory / checkpoint_dir(checkpoint_name(12, 3, 1)) / "manifest.json").unlink()
    assert {"finished", "bitwise_equal"} <= broken(report_of(attacked, reference))


def test_run_that_was_not_attacked_does_not_pass(reference: FakeRun) -> None:
    assert broken(report_of(reference, reference)) == {"attacked_as_planned"}
