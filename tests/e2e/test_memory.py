"""Hundreds of saves take no more memory than the first ones."""

from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loop_kinds
import psutil
import pytest
from harness import Run, entries

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)

STEPS = 400
EARLY = 60
GROWTH_BYTES_MAX = 25 * 2**20


def private_bytes(status: dict[str, Any]) -> dict[str, int]:
    """Of the processes that see every save. Slots are shared memory, and counted apart."""
    (rank,), (keeper,) = status["ranks"], status["keepers"]
    found = {}
    for what, pid in (("rank", rank["pid"]), ("agent", rank["agent_pid"]), ("keeper", keeper["pid"])):
        memory = psutil.Process(pid).memory_full_info()
        found[what] = memory.uss
        found[f"{what}, shared"] = memory.shared
    return found


@pytest.mark.slow
def test_memory_stays_flat_over_hundreds_of_saves(tmp_path: Path) -> None:
    run = Run(
        harness.trainer(
            tmp_path,
            "memory",
            loop_kinds.wide_loop,
            ranks=1,
            config={"steps": STEPS},
            cadence=None,
            keep_last=2,
        )
    )
    early = run.status_when(lambda status: (status["committed_step"] or 0) >= EARLY)
    before = private_bytes(early)
    late = run.status_when(lambda status: (status["committed_step"] or 0) >= STEPS - EARLY, timeout_seconds=180)
    after = private_bytes(late)
    result = run.result()
    saves = [entry for entry in entries(result.run_dir, "commit") if early["step"] <= entry["step"] <= late["step"]]
    image_bytes = saves[0]["bytes"]
    assert len(saves) * image_bytes > 20 * GROWTH_BYTES_MAX, "too little was saved for a leak to show"
    assert len(saves) >= 100
    grown = {what: after[what] - before[what] for what in before}
    assert all(growth < GROWTH_BYTES_MAX for growth in grown.values()), grown
    assert len(list((result.run_dir / "checkpoints").iterdir())) <= 3
