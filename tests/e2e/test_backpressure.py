"""A disk that is much slower than the training: saves are skipped, and nothing queues up, grows or waits."""

import contextlib
import os
from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loop_kinds
import psutil
import pytest
from harness import Run, entries, wait_for

from orchestrator.observe.ledger import read_ledger
from workers import failpoint
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)

STEPS = 400
SAVE_EVERY = 5
SLOTS = 2
WRITES = 4
GAP = 30  # steps that pass while each of these writes stands still, and from one of them to the next at least
GROWTH_BYTES_MAX = 25 * 2**20


def memory_of(status: dict[str, Any]) -> dict[str, int]:
    """Private bytes of the processes that see every save, and how many slots each holds."""
    (rank,), (keeper,) = status["ranks"], status["keepers"]
    found = {}
    for what, pid in (("rank", rank["pid"]), ("keeper", keeper["pid"])):
        found[f"{what}, bytes"] = psutil.Process(pid).memory_full_info().uss
        found[f"{what}, slots"] = len(slots_of(pid))
    return found


def slots_of(pid: int) -> set[int]:
    """Inodes of the slots that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:lastgood-slot" in os.readlink(descriptor):
                found.add(os.stat(descriptor).st_ino)
    return found


@pytest.mark.slow
def test_with_a_slow_disk_saves_are_skipped_and_nothing_queues_up_grows_or_waits(tmp_path: Path) -> None:
    arms = [
        Arm(id=f"slow-{number}", point="persist.fsync", action="pause", when={"step_min": number * GAP})
        for number in range(1, WRITES + 1)
    ]
    run = Run(
        harness.trainer(
            tmp_path,
            "slow",
            loop_kinds.wide_loop,
            ranks=1,
            config={"steps": STEPS, "pace_seconds": 0.03},
            cadence=SAVE_EVERY,
            snapshot_every_steps=None,
            snapshot_slots=SLOTS,
            failpoints=arms,
        )
    )
    run_dir = run.trainer.run_dir
    faults = run_dir / "faults"
    seen = []
    for arm in arms:
        wait_for(lambda arm=arm: (faults / f"{arm.id}.json").exists() or None, 180)
        step = run.trainer.status()["step"]
        status = run.status_when(lambda status, step=step: status["step"] >= step + GAP, 180)
        seen.append(memory_of(status))
        directories = list((run_dir / "checkpoints").iterdir())
        unfinished = [path for path in directories if not (path / "manifest.json").exists()]
        assert len(unfinished) == 1, "one save is being written, however many became due"
        failpoint.release(arm.id, faults)
    run.result()

    assert {found["rank, slots"] for found in seen} == {found["keeper, slots"] for found in seen} == {SLOTS}
    for what in ("rank, bytes", "keeper, bytes"):
        assert seen[-1][what] - seen[0][what] < GROWTH_BYTES_MAX, seen

    due = set(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
    committed = [entry["step"] for entry in entries(run_dir, "commit")]
    skipped = [entry["step"] for entry in entries(run_dir, "save_skipped")]
    assert sorted([*committed, *skipped]) == sorted(due), "each save that was due is committed, or said to be skipped"
    assert len(skipped) >= WRITES * (GAP // SAVE_EVERY - 3)
    assert committed[-1] == STEPS
    in_flight = 0
    for entry in read_ledger(run_dir / "ledger.jsonl"):
        in_flight += {"snapshot": 1, "commit": -1}.get(entry["kind"], 0)
        assert in_flight in (0, 1)
    assert not entries(run_dir, "failure")
