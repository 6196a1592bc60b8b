"""Word that a process or a node will be taken away: the newest step is saved, nothing is trained twice, no budget is
charged."""

import signal
from pathlib import Path
from typing import Any

import harness
import loops
import pytest
from harness import Run, entries, kill
from stories import tell

PACE = {"pace_seconds": 0.05}


def the_notice(run_dir: Path) -> dict[str, Any]:
    """The one notice of a run that saves nothing by itself, after checking that a save was ordered, and that the next
    generation went on from it."""
    (notice,) = entries(run_dir, "notice")
    (failure,) = entries(run_dir, "failure")
    assert failure["cause"] == "drain"
    assert failure["detail"]["reason"] == notice["reason"]
    saved = failure["detail"]["saved_step"]
    assert saved in {order["step"] for order in entries(run_dir, "save_ordered")}
    committed = [commit["step"] for commit in entries(run_dir, "commit")]
    assert (committed[0], committed[-1]) == (saved, harness.STEPS)
    restored = entries(run_dir, "generation")[1]["restored_step"]
    assert restored >= saved, "a newer snapshot may have stayed in memory"
    assert set(committed[1:-1]) <= {restored}
    return notice


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_gets_sigterm_saves_at_once_and_is_replaced_on_the_same_worker(
    tmp_path: Path, reference: Path
) -> None:
    run = Run(harness.trainer(tmp_path, "rank", loops.train_loop, config=PACE, cadence=None, max_failures=0))
    status = run.status_when(lambda status: status["step"] >= 12)
    kill(status["ranks"][1]["pid"], signal.SIGTERM)
    result = run.result()
    assert the_notice(result.run_dir)["ranks"] == [1]
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 2
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_that_gets_sigterm_saves_at_once_and_ray_replaces_it(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "worker", loops.train_loop, config=PACE, cadence=None, max_failures=0))
    status = run.status_when(lambda status: status["step"] >= 12)
    kill(status["ranks"][1]["agent_pid"], signal.SIGTERM)
    result = run.result()
    assert the_notice(result.run_dir)["ranks"] == [1]
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 4
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_drained_node_is_used_until_there_is_another(tmp_path: Path, reference: Path) -> None:
    run_dir = tell("drained-without-a-spare", tmp_path)
    first, *_, last = entries(run_dir, "save_ordered")
    assert last["step"] >= first["step"] + 8
    (failure,) = entries(run_dir, "failure")
    assert (failure["cause"], failure["detail"]["saved_step"]) == ("drain", last["step"])
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_drained_node_is_left_after_a_save(tmp_path: Path, reference: Path) -> None:
    run_dir = tell("drained", tmp_path)
    notice = the_notice(run_dir)
    assert notice["reason"] == "drain"
    assert 0 < notice["deadline_at"] - notice["at"] <= 60
    harness.assert_equal_runs(run_dir, reference)
