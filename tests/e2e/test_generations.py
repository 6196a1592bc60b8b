"""Whatever is killed, the run finishes with the bits and the samples of the run that nobody disturbed."""

import signal
from pathlib import Path

import harness
import loops
import psutil
import pytest
from harness import Run, entries, kill, wait_for

from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

PACE = {"pace_seconds": 0.02}


def test_ranks_killed_at_every_stage_are_replaced_while_rays_workers_stay(tmp_path: Path, reference: Path) -> None:
    arms = [
        Arm(id="own-copy", point="snapshot.copy", when={"rank": 1, "step": 10, "index_fraction": 0.5}),
        Arm(id="by-keeper", point="persist.block", when={"rank": 0, "step": 20}),
        Arm(id="between-saves", point="step.end", when={"rank": 1, "step": 27}),
        Arm(id="restoring", point="restore.begin", when={"rank": 0, "generation": 4}),
        Arm(id="restored", point="restore.done", when={"rank": 1, "generation": 5}),
        Arm(id="meeting", point="rendezvous.init", when={"rank": 1, "generation": 6}),
        Arm(id="met", point="rendezvous.done", when={"rank": 0, "generation": 7}),
        Arm(id="snapshot-done", point="snapshot.complete", when={"rank": 0, "step": 40}),
    ]
    result = harness.trainer(tmp_path, "points", loops.train_loop, failpoints=arms).fit()
    fired = {path.stem for path in (result.run_dir / "faults").iterdir()}
    assert fired == {arm.id for arm in arms}
    assert result.generation == 9
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 2
    assert {entry["cause"] for entry in entries(result.run_dir, "failure")} == {"signal"}
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_all_ranks_killed_at_once(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "all", loops.train_loop, config=PACE))
    status = run.status_when(lambda status: status["step"] >= 25)
    for rank in status["ranks"]:
        kill(rank["pid"])
    result = run.result()
    assert result.generation == 2
    assert entries(result.run_dir, "generation")[1]["source"] == "memory"
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_rank_dies_while_its_peer_is_stopped(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "stopped", loops.train_loop, config=PACE))
    status = run.status_when(lambda status: status["step"] >= 25)
    kill(status["ranks"][0]["pid"], signal.SIGSTOP)
    kill(status["ranks"][1]["pid"])
    result = run.result()
    (failure,) = entries(result.run_dir, "failure")
    assert failure["rank"] == 1
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_zygote_dies_with_its_rank_and_its_successor_before_it_is_ready(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "zygote", loops.train_loop, config=PACE))
    status = run.status_when(lambda status: status["step"] >= 25)
    agent = psutil.Process(status["ranks"][1]["agent_pid"])
    killed: set[int] = set()

    def another() -> int | None:
        found = [child.pid for child in agent.children() if "workers.zygote" in child.cmdline()]
        return next((pid for pid in found if pid not in killed), None)

    for _ in range(2):  # the second one while it still imports torch
        killed.add(pid := wait_for(another, 60))
        kill(pid)
    result = run.result()
    assert result.generation == 2
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 2
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_an_agent_dies_and_ray_replaces_its_group(tmp_path: Path, reference: Path) -> None:
    run = Run(harness.trainer(tmp_path, "agent", loops.train_loop, config=PACE))
    status = run.status_when(lambda status: status["step"] >= 25)
    kill(status["ranks"][1]["agent_pid"])
    result = run.result()
    assert len({entry["agent"] for entry in entries(result.run_dir, "agent")}) == 4
    (failure,) = entries(result.run_dir, "failure")
    assert (failure["rank"], failure["cause"]) == (1, "agent_lost"), "its peer's error is an echo"
    harness.assert_equal_runs(result.run_dir, reference)


def test_the_keeper_dies_in_the_middle_of_a_save(tmp_path: Path, reference: Path) -> None:
    arms = [Arm(id="keeper", point="persist.fsync", action="kill_self", when={"rank": 0, "step": 30})]
    result = harness.trainer(tmp_path, "keeper", loops.train_loop, config=PACE, failpoints=arms).fit()
    assert len({entry["pid"] for entry in entries(result.run_dir, "keeper")}) == 2
    assert result.generation == 1
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_the_keeper_dies_during_the_last_save(tmp_path: Path, reference: Path) -> None:
    arms = [Arm(id="keeper", point="persist.rename", action="kill_self", when={"rank": 1, "step": harness.STEPS})]
    result = harness.trainer(tmp_path, "keeper-last", loops.train_loop, config=PACE, failpoints=arms).fit()
    assert result.step == harness.STEPS
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.parametrize(
    "point",
    ["commit.rename", *(pytest.param(point, marks=pytest.mark.slow) for point in ("commit.write", "commit.done"))],
)
def test_the_coordinator_dies_while_it_commits_and_no_generation_ends(
    tmp_path: Path, reference: Path, point: str
) -> None:
    arms = [Arm(id="coordinator", point=point, action="kill_self", when={"step": 30})]
    run = harness.trainer(tmp_path, "coordinator", loops.train_loop, config=PACE, failpoints=arms, keep_last=1)
    result = run.fit()
    assert [entry["resumed"] for entry in entries(result.run_dir, "coordinator")] == [False, True]
    assert result.generation == 1
    assert not entries(result.run_dir, "save_failed"), "a checkpoint that retention had deleted came up again"
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_the_coordinator_and_a_rank_die_together(tmp_path: Path, reference: Path) -> None:
    arms = [Arm(id="coordinator", point="commit.done", action="kill_self", when={"step": 30})]
    run = Run(harness.trainer(tmp_path, "both", loops.train_loop, config={"pace_seconds": 0.05}, failpoints=arms))
    status = run.status_when(lambda status: status["step"] >= 22)
    harness.wait_for(lambda: (run.trainer.run_dir / "faults" / "coordinator.json").exists() or None, 30)
    kill(status["ranks"][1]["pid"])
    result = run.result()
    assert result.generation == 2
    harness.assert_equal_runs(result.run_dir, reference)
