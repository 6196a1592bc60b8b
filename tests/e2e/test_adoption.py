"""A driver is killed; the next `fit()` of the same run directory goes on from what is committed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import loops
import pytest
import ray
from harness import entries

from orchestrator.driver import run_id

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def doomed_driver(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    script = Path(__file__).parent / "driver_script.py"
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, str(script), address, str(tmp_path), "adopted"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield driver
    driver.kill()
    driver.wait()


def test_a_second_driver_adopts_the_run_of_one_that_was_killed(
    tmp_path: Path, reference: Path, doomed_driver: "subprocess.Popen[bytes]"
) -> None:
    run_dir = tmp_path / "adopted"

    def committed() -> bool | None:
        assert doomed_driver.poll() is None, "the driver ended by itself"
        return True if (run_dir / "ledger.jsonl").exists() and len(entries(run_dir, "commit")) >= 2 else None

    harness.wait_for(committed, 90)
    doomed_driver.kill()
    doomed_driver.wait()
    result = harness.trainer(tmp_path, "adopted", loops.train_loop).fit()
    drivers = {entry["driver"] for entry in entries(run_dir, "coordinator")}
    assert len(drivers) == 2
    restored = entries(run_dir, "generation")[-1]
    assert restored["restored_step"] >= 2 * harness.SAVE_EVERY
    assert result.generation == 2
    harness.assert_equal_runs(result.run_dir, reference)
    left = Path(tempfile.gettempdir()) / f"lastgood-{os.getuid()}" / run_id(run_dir)
    assert not left.exists(), "locks were left behind"


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_trains_no_further(tmp_path: Path) -> None:
    harness.trainer(tmp_path, "twice", loops.train_loop).fit()
    again = harness.trainer(tmp_path, "twice", loops.train_loop).fit()
    assert again.step == harness.STEPS
    assert again.generation == 2
    assert len(entries(again.run_dir, "commit")) == harness.STEPS // harness.SAVE_EVERY


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_when_the_loop_allows_it(tmp_path: Path, reference: Path) -> None:
    harness.trainer(tmp_path, "longer", loops.train_loop, config={"steps": 25}).fit()
    longer = harness.trainer(tmp_path, "longer", loops.train_loop).fit()
    assert entries(longer.run_dir, "generation")[-1]["restored_step"] == 25
    harness.assert_equal_runs(longer.run_dir, reference)
