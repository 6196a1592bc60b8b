"""A rank that stands still is found, named and replaced; one that is merely slow, or says what it does, is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import hanging
import harness
import loops
import pytest
from harness import Run, entries

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(hanging)


HANGS = [
    ("sleep", 1, 17, "behind in collectives", "sleep ("),
    ("spin", 0, 27, "behind in collectives", "spin ("),
    ("stop", 1, 37, "stopped", "stop ("),
    ("loader", 0, -1, "behind in collectives", "train ("),
]


def test_a_rank_that_sleeps_spins_is_stopped_or_waits_for_its_data_is_named_and_replaced(
    tmp_path: Path, reference: Path
) -> None:
    config = {"ways": [(way, rank, step) for way, rank, step, _, _ in HANGS], "pace_seconds": 0.02}
    run_dir = harness.trainer(tmp_path, "hangs", hanging.hanging_loop, config=config).fit().run_dir
    failures = entries(run_dir, "failure")
    assert len(failures) == len(HANGS)
    for failure, (_, rank, _, evidence, place) in zip(failures, HANGS, strict=True):
        assert (failure["cause"], failure["rank"]) == ("hang", rank)
        detail = failure["detail"]
        assert evidence in detail["evidence"]
        assert place in detail["where"][str(rank)]
        assert place in (run_dir / detail["stacks"][str(rank)]).read_text()
        assert detail["quiet_seconds"] < 2 * detail["limit_seconds"] + 2
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_collective_of_its_own_is_replaced(tmp_path: Path, reference: Path) -> None:
    config = {"ways": [("lone_collective", 0, 27)], "pace_seconds": 0.02}
    run_dir = harness.trainer(tmp_path, "lone", hanging.hanging_loop, config=config).fit().run_dir
    (failure,) = entries(run_dir, "failure")
    assert failure["cause"] == "hang"
    assert "lone_collective (" in (run_dir / failure["detail"]["stacks"]["0"]).read_text()
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_phase_that_the_loop_declares_may_take_its_time(tmp_path: Path) -> None:
    config = {"validation_seconds": 7.0}
    result = harness.trainer(tmp_path, "declared", hanging.validating_loop, config=config).fit()
    assert result.generation == 1
    assert not entries(result.run_dir, "suspected")


@pytest.mark.slow
def test_a_stopped_agent_is_ended_by_its_keeper_and_ray_replaces_it(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "agent", loops.train_loop, config={"pace_seconds": 0.05}))
    status = run.status_when(lambda status: status["step"] >= 25)
    harness.kill(status["ranks"][1]["agent_pid"], signal.SIGSTOP)
    result = run.result()
    assert entries(result.run_dir, "silent")[0]["rank"] == 1
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_slow_rank_is_reported_with_what_it_costs(tmp_path: Path) -> None:
    result = harness.trainer(tmp_path, "slow", hanging.slow_rank_loop, config={"steps": 200}, cadence=100).fit()
    found = entries(result.run_dir, "straggler")[0]
    assert found["rank"] == 1
    assert 0.3 < found["cost_fraction"] < 0.9
    assert result.generation == 1


@pytest.mark.slow
def test_ten_minutes_on_a_machine_that_is_too_busy_condemn_nobody(tmp_path: Path) -> None:
    """From the first steps on twice as many processes compute as there are processors; Ray starts without them."""
    run = Run(harness.trainer(tmp_path, "busy", hanging.until_loop, config={"seconds": 620.0}, cadence=50))
    run.status_when(lambda status: status["step"] >= 5)
    began = time.monotonic()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        result = run.result(timeout_seconds=900)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert time.monotonic() - began >= 600
    assert not entries(result.run_dir, "failure")
    assert result.generation == 1
