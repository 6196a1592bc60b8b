"""Snapshots between saves stay in the keepers' memory: what is restored from them, and what when they are no good."""

import os
import signal
from pathlib import Path
from typing import Any

import harness
import loops
import pytest
from harness import Run, entries, kill, wait_for

from orchestrator import SupervisedTrainer
from workers import failpoint
from workers.checkpoint.slots import HEADER_BYTES, Slot, SlotState
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

SAVED, NEWEST, KILLED = 20, 32, 33


def trainer(storage: Path, name: str, *arms: Arm, **recovery: Any) -> SupervisedTrainer:
    """Saves at 20 and 40; snapshots after every second step."""
    return harness.trainer(
        storage,
        name,
        loops.train_loop,
        config={"pace_seconds": 0.1},
        failpoints=arms,
        **{"cadence": SAVED, "snapshot_every_steps": 2, "snapshot_slots": 4} | recovery,
    )


def origins(run_dir: Path) -> list[tuple[str, int]]:
    return [(entry["source"], entry["restored_step"]) for entry in entries(run_dir, "generation")]


def commits_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [entry for entry in entries(run_dir, "commit") if (entry["generation"], entry["step"]) == (1, step)]


def test_a_rank_that_is_killed_between_saves_goes_on_from_memory_and_that_state_is_committed_once(
    tmp_path: Path, reference: Path
) -> None:
    run = Run(
        trainer(
            tmp_path,
            "killed",
            Arm(id="kill", point="step.end", when={"rank": 1, "step": KILLED}),
            Arm(id="slow", point="persist.create", action="pause", when={"rank": 0, "step": NEWEST, "generation": 1}),
        )
    )
    run_dir = run.trainer.run_dir
    try:
        run.status_when(lambda status: status["generation"] == 2 and status["step"] > KILLED, 120)
        assert origins(run_dir) == [("fresh", 0), ("memory", NEWEST)]
        assert {entry["step"] for entry in entries(run_dir, "restored") if entry["source"] == "memory"} == {NEWEST}
        assert not commits_of(run_dir, NEWEST)
    finally:
        failpoint.release("slow", run_dir / "faults")
    run.result()
    (commit,) = commits_of(run_dir, NEWEST)
    assert commit["seq"] > entries(run_dir, "first_step")[-1]["seq"], "the next generation was running"
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_the_coordinator_dies_right_after_the_failure(tmp_path: Path, reference: Path) -> None:
    result = trainer(
        tmp_path,
        "coordinator",
        Arm(id="kill", point="step.end", when={"rank": 0, "step": KILLED}),
        Arm(id="coordinator", point="generation.create", action="kill_self", when={"generation": 2}),
    ).fit()
    assert [entry["resumed"] for entry in entries(result.run_dir, "coordinator")] == [False, True]
    assert origins(result.run_dir) == [("fresh", 0), ("memory", NEWEST)]
    assert len(commits_of(result.run_dir, NEWEST)) == 1
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_with_the_keeper_and_all_ranks_dead_the_newest_checkpoint_is_restored(tmp_path: Path, reference: Path) -> None:
    run = Run(trainer(tmp_path, "keeper"))
    status = run.status_when(lambda status: status["step"] >= KILLED, 120)
    (keeper,) = status["keepers"]
    for rank in status["ranks"]:
        kill(rank["pid"], signal.SIGSTOP)  # so that none hands its slots to the next keeper
    kill(keeper["pid"])
    for rank in status["ranks"]:
        kill(rank["pid"])
    result = run.result()
    assert origins(result.run_dir) == [("fresh", 0), ("checkpoint", SAVED)]
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_bit_that_flips_in_memory_is_noticed_and_the_newest_checkpoint_restored(
    tmp_path: Path, reference: Path
) -> None:
    run = Run(trainer(tmp_path, "flipped", hang_seconds_min=None))
    run_dir = run.trainer.run_dir
    status = run.status_when(lambda status: status["step"] >= KILLED, 120)
    for rank in status["ranks"]:
        kill(rank["pid"], signal.SIGSTOP)
    (keeper,) = status["keepers"]
    assert wait_for(lambda: flip_a_bit_of_each_snapshot(keeper["pid"], rank=1) or None, 30)
    kill(status["ranks"][0]["pid"])
    result = run.result()
    (dropped,) = entries(run_dir, "memory_dropped")
    assert dropped["generation"] == 1
    assert dropped["step"] > SAVED
    assert f"rank 1's snapshot in memory of step {dropped['step']}, generation 1, is damaged" in dropped["reason"]
    assert origins(run_dir) == [("fresh", 0), ("memory", dropped["step"]), ("checkpoint", SAVED)]
    assert not commits_of(run_dir, dropped["step"])
    assert result.generation == 3
    harness.assert_equal_runs(run_dir, reference)


def flip_a_bit_of_each_snapshot(keeper_pid: int, rank: int) -> int:
    """In the memory of that rank's complete snapshots, once all of them are digested; how many there were."""
    found = {}  # by inode: a mapping holds a descriptor of its own
    for link in Path(f"/proc/{keeper_pid}/fd").iterdir():
        if "lastgood-slot" in os.readlink(link):
            slot = Slot.from_fd(os.open(link, os.O_RDWR), populate=False)
            if slot.state is SlotState.COMPLETE and slot.rank == rank:
                found[os.stat(link).st_ino] = (link, slot.image_bytes, slot.digest)
            slot.close()
    if not all(digest for _, _, digest in found.values()):
        return 0
    for link, image_bytes, _ in found.values():
        with open(link, "r+b", buffering=0) as memory:
            memory.seek(HEADER_BYTES + image_bytes - 1)
            (byte,) = memory.read(1)
            memory.seek(HEADER_BYTES + image_bytes - 1)
            memory.write(bytes([byte ^ 1]))
    return len(found)
