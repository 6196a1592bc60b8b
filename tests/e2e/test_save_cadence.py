"""How often a real run saves follows what it measures: a disk that turns slower, failures that come more often."""

import time
from pathlib import Path
from typing import Any

import cloudpickle
import hanging
import harness
import loop_kinds
import pytest
from harness import Run, entries, kill, wait_for

from workers import failpoint
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)
cloudpickle.register_pickle_by_value(hanging)

SLOW_FROM = (100, 130, 190)
SLOW_SECONDS = 2.0


def decisions(run_dir: Path) -> list[dict[str, Any]]:
    return [entry for entry in entries(run_dir, "cadence") if entry["tier"] == "durable"]


def test_when_the_disk_turns_ten_times_slower_the_next_save_but_one_already_comes_later(tmp_path: Path) -> None:
    arms = [
        Arm(id=f"slow-{step}", point="persist.fsync", action="pause", when={"step_min": step}) for step in SLOW_FROM
    ]
    run = Run(
        harness.trainer(
            tmp_path,
            "slower",
            loop_kinds.wide_loop,
            ranks=1,
            config={"steps": 500, "pace_seconds": 0.03},
            cadence="auto",
            save_overhead_max=None,
            snapshot_every_steps=None,
            failures_per_node_day=40_000.0,  # so that the disk alone bounds how often it pays to save
            failpoints=arms,
        )
    )
    run_dir = run.trainer.run_dir
    for arm in arms:
        fired = run_dir / "faults" / f"{arm.id}.json"
        wait_for(lambda fired=fired: fired.exists() or None, 120)  # type: ignore[misc]
        since = time.monotonic()
        wait_for(lambda since=since: time.monotonic() - since > SLOW_SECONDS or None, 60)  # type: ignore[misc]
        failpoint.release(arm.id, run_dir / "faults")
    run.result()
    commits = entries(run_dir, "commit")
    slow = [one for one in commits if one["commit_seconds"] >= SLOW_SECONDS]
    assert len(slow) >= 2
    fast = [one for one in decisions(run_dir) if one["seq"] < slow[0]["seq"]][-1]
    after_two = [one for one in decisions(run_dir) if one["seq"] < slow[1]["seq"] + 3][-1]
    assert fast["interval_seconds"] < SLOW_SECONDS / 3
    assert after_two["interval_seconds"] >= 0.9 * SLOW_SECONDS
    assert "bandwidth" in {bound["name"] for bound in after_two["bounds"]}
    assert {"inputs", "goodput_ratio", "goodput_ratio_half", "goodput_ratio_double", "failures"} <= after_two.keys()


@pytest.mark.slow
def test_when_failures_come_ten_times_as_often_saves_do_too(tmp_path: Path) -> None:
    """Each kill is more than a minute after the one before, for those within a minute count as one."""
    run = Run(
        harness.trainer(
            tmp_path,
            "oftener",
            hanging.until_loop,
            config={"seconds": 100.0, "pace_seconds": 0.05},  # of each generation
            cadence="auto",
            save_overhead_max=None,
            snapshot_every_steps=None,
            failures_per_node_day=5.0,
        )
    )
    run_dir = run.trainer.run_dir
    run.status_when(lambda status: status["step"] >= 15)
    wait_for(lambda: decisions(run_dir) or None, 120)
    before = decisions(run_dir)[-1]
    for number in range(1, 7):
        since = time.monotonic()
        wait_for(lambda since=since: time.monotonic() - since > 61 or None, 90)  # type: ignore[misc]
        kill(run.status_when(lambda status, number=number: status["generation"] == number)["ranks"][0]["pid"])  # type: ignore[misc]
        wait_for(lambda number=number: len(entries(run_dir, "failure")) == number or None, 60)  # type: ignore[misc]
    run.result(timeout_seconds=300)
    last = entries(run_dir, "failure")[-1]
    after = [one for one in decisions(run_dir) if one["seq"] > last["seq"]]
    assert after[0]["inputs"]["failures_per_second"] > 10 * before["inputs"]["failures_per_second"]
    assert min(one["interval_seconds"] for one in after) < before["interval_seconds"] / 2
