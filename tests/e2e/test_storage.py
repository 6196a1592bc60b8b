"""Storage that is full, broken, read-only, stalled or gone for a while: training goes on, and saves work again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import loops
import mounts
import pytest
from harness import Run, entries, wait_for

from orchestrator.observe.ledger import read_ledger
from workers import failpoint
from workers.errors import EnvironmentProblem
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

PACE = {"pace_seconds": 0.05}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_disk(tmp_path / "disk", 24 * 1024 * 1024) as directory:
        yield directory


def wait_for_entry(run_dir: Path, kind: str, **fields: Any) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = entries(run_dir, kind) if (run_dir / "ledger.jsonl").exists() else []
        return next((entry for entry in found if fields.items() <= entry.items()), None)

    return wait_for(look, 60)


def assert_never_stopped(run_dir: Path) -> None:
    assert not entries(run_dir, "failure")
    assert len(entries(run_dir, "generation")) == 1


def test_on_a_full_disk_older_checkpoints_make_room_for_the_next(disk: Path, reference: Path) -> None:
    run = Run(harness.trainer(disk, "full", loops.train_loop, config=PACE))
    run_dir = run.trainer.run_dir
    # One checkpoint stays, and the next needs a little more room than another one gives: the ledger grows as well.
    wait_for_entry(run_dir, "commit", step=30)
    mounts.fill(disk)
    result = run.result()
    assert_never_stopped(run_dir)
    assert any(entry["no_space"] for entry in entries(run_dir, "persist_failed"))
    deleted = [entry["checkpoint"] for entry in entries(run_dir, "deleted") if entry["reason"].startswith("older")]
    assert deleted, "nothing made room"
    assert deleted == sorted(deleted), "the oldest go first"
    assert result.committed_checkpoint is not None
    assert result.committed_checkpoint.name.startswith("step-000000060-")
    assert harness.final_digests(run_dir) == harness.final_digests(reference)
    attempts = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert attempts.isdisjoint(deleted)
    assert all((run_dir / "checkpoints" / name / "manifest.json").exists() for name in attempts), "remains are left"


@pytest.mark.slow
def test_a_disk_that_fails_once_and_then_for_a_while_costs_saves_and_nothing_else(
    tmp_path: Path, reference: Path
) -> None:
    arms = [
        Arm(id="once", point="persist.fsync", action="eio", when={"rank": 1, "step": 10}),
        Arm(id="often", point="persist.fsync", action="eio", when={"rank": 0, "step": 30}, times=100),
    ]
    result = harness.trainer(tmp_path, "broken", loops.train_loop, config=PACE, failpoints=arms).fit()
    assert_never_stopped(result.run_dir)
    failed = {(entry["step"], entry["final"]) for entry in entries(result.run_dir, "save_failed")}
    assert (10, False) in failed
    assert (30, True) in failed
    committed = {entry["step"] for entry in entries(result.run_dir, "commit")}
    assert committed & {10, 20}, "made again, unless a newer one was complete by then"
    assert 60 in committed
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_storage_that_is_read_only_for_a_while(disk: Path, reference: Path) -> None:
    # Without journals of samples no file is open for writing, which would keep the file system from being remounted.
    run = Run(harness.trainer(disk, "read-only", loops.train_loop, config=PACE, record_samples=False))
    run_dir = run.trainer.run_dir
    wait_for_entry(run_dir, "commit", step=10)
    wait_for(lambda: mounts.remount(disk, "ro") or None, 30)
    step = run.trainer.status()["step"]
    run.status_when(lambda status: status["step"] >= step + 15)
    assert mounts.remount(disk, "rw")
    run.result()
    assert_never_stopped(run_dir)
    lost = sum(entry.get("lost", 0) for entry in read_ledger(run_dir / "ledger.jsonl"))
    assert lost, "the ledger could not be written either, and says how many lines are missing"
    assert harness.final_digests(run_dir) == harness.final_digests(reference)


@pytest.mark.slow
def test_a_write_that_stalls_holds_up_neither_training_nor_recovery(tmp_path: Path, reference: Path) -> None:
    arms = [
        Arm(id="stall", point="persist.fsync", action="pause", when={"rank": 1, "step": 20}),
        Arm(id="kill", point="step.end", when={"rank": 0, "step": 45}),
    ]
    run = Run(
        harness.trainer(tmp_path, "stalled", loops.train_loop, config=PACE, failpoints=arms, save_stalled_seconds=0.5)
    )
    run_dir = run.trainer.run_dir
    stalled = wait_for_entry(run_dir, "save_stalled")
    assert (stalled["step"], stalled["waiting_for"]) == (20, [1])
    wait_for_entry(run_dir, "failure")
    wait_for_entry(run_dir, "first_step", generation=2)
    failpoint.release("stall", run_dir / "faults")
    run.result()
    restored = entries(run_dir, "generation")[1]
    assert (restored["source"], restored["restored_step"] >= 20) == ("memory", True), "what could not be written"
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_run_directory_that_vanishes_for_a_while_is_not_made_anew(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "gone", loops.train_loop, config=PACE))
    run_dir = run.trainer.run_dir
    wait_for_entry(run_dir, "commit", step=10)
    away = tmp_path / "away"
    run_dir.rename(away)
    step = run.trainer.status()["step"]
    run.status_when(lambda status: status["step"] >= step + 20)
    assert not run_dir.exists(), "an empty directory would look like a run that never was"
    away.rename(run_dir)
    run.result()
    assert_never_stopped(run_dir)
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_run_whose_saves_fail_for_too_long_says_so_until_one_comes_through(tmp_path: Path, reference: Path) -> None:
    arms = [Arm(id="bad", point="persist.fsync", action="eio", when={"rank": 0}, times=1000)]
    run = Run(
        harness.trainer(
            tmp_path, "unprotected", loops.train_loop, config=PACE, failpoints=arms, unprotected_seconds_max=0.5
        )
    )
    run_dir = run.trainer.run_dir
    said = wait_for_entry(run_dir, "unprotected")
    assert said["seconds"] >= 0.5
    assert "injected at persist.fsync" in said["reason"]
    failpoint.release("bad", run_dir / "faults")
    run.result()
    assert entries(run_dir, "protected_again")[0]["since"] == said["since"]
    assert_never_stopped(run_dir)
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_run_that_is_to_stop_when_unprotected_stops_after_a_last_try(tmp_path: Path) -> None:
    arms = [Arm(id="bad", point="persist.fsync", action="eio", when={"rank": 0}, times=1000)]
    supervised = harness.trainer(
        tmp_path,
        "stop",
        loops.train_loop,
        config={"pace_seconds": 0.2},
        failpoints=arms,
        unprotected_seconds_max=0.5,
        on_unprotected="stop",
    )
    with pytest.raises(EnvironmentProblem, match=r"nothing was saved for .* s, and a last save did not come through"):
        supervised.fit()
    assert entries(supervised.run_dir, "unprotected")
    assert not entries(supervised.run_dir, "finished")
