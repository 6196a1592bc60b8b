"""Ray Train's controller dies, and its workers with it: `fit()` starts it again, and the run goes on."""

from pathlib import Path

import harness
import loops
import psutil
import pytest
from harness import Run, entries, kill

PACE = {"pace_seconds": 0.05}


def controller_of(cluster: Path) -> int:
    """The process of Ray Train's controller that is at work in this cluster; the machine may have other clusters."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = str(cluster) in " ".join(process.parent().cmdline()) if process.parent() else False
            if mine and process.cmdline()[:1] == ["ray::TrainController.run"]:
                found.append(process.pid)
        except psutil.Error:
            continue
    (pid,) = found
    return pid


@pytest.mark.slow
def test_rays_controller_dies_and_fit_starts_it_again(ray_cluster: Path, tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "controller", loops.train_loop, config=PACE, max_failures=0))
    run.status_when(lambda status: status["step"] >= 25)
    kill(controller_of(ray_cluster))
    result = run.result()
    (ended,) = entries(result.run_dir, "controller")
    assert ended["ends"] == 1
    (failure,) = entries(result.run_dir, "failure")
    assert failure["cause"] == "controller"
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 4
    assert len(entries(result.run_dir, "coordinator")) == 1
    assert len({entry["pid"] for entry in entries(result.run_dir, "keeper")}) == 1
    harness.assert_equal_runs(result.run_dir, reference)
