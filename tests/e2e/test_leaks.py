"""Many generations in a row leave nothing behind."""

import os
from pathlib import Path
from typing import Any

import harness
import loops
import psutil
import pytest
from harness import Run, entries

from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

EARLY = 6


def open_files(pid: int) -> dict[str, int]:
    """Open descriptors of a process, by what they are."""
    counts: dict[str, int] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        kind = target.split(":")[0] if not target.startswith("/") else target
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def measure(status: dict[str, Any]) -> dict[str, Any]:
    agents = [rank["agent_pid"] for rank in status["ranks"]]
    keepers = [keeper["pid"] for keeper in status["keepers"]]
    zygotes = [
        child for pid in agents for child in psutil.Process(pid).children() if "zygote" in " ".join(child.cmdline())
    ]
    pids = agents + keepers + [zygote.pid for zygote in zygotes]
    return {
        "descriptors": {pid: sum(open_files(pid).values()) for pid in pids},
        "memfds": {pid: open_files(pid).get("/memfd", 0) for pid in pids},
        "memory": {
            pid: psutil.Process(pid).memory_info().rss - psutil.Process(pid).memory_info().shared for pid in pids
        },
        "children": sum(len(psutil.Process(pid).children(recursive=True)) for pid in agents),
    }


@pytest.mark.slow
@pytest.mark.parametrize("generations", [14, 50])
def test_many_generations_leave_no_process_descriptor_memfd_or_memory_behind(
    tmp_path: Path, reference: Path, generations: int
) -> None:
    # One kill a generation, of alternating ranks, each after at least one more step than the one before.
    arms = [
        Arm(id=f"kill-{n:02d}", point="step.end", when={"rank": n % 2, "generation": n, "step_min": n})
        for n in range(1, generations + 1)
    ]
    run = Run(harness.trainer(tmp_path, "many", loops.train_loop, failpoints=arms, cadence=1, keep_last=100))
    early = measure(run.status_when(lambda status: status["generation"] == EARLY and status["step"] >= EARLY - 1))
    late = measure(run.status_when(lambda status: status["generation"] == generations, timeout_seconds=600))
    result = run.result()
    assert result.generation == generations + 1
    noise = min(8, (generations - EARLY) // 2)  # fewer than one a generation
    for pid, count in early["descriptors"].items():
        assert late["descriptors"][pid] <= count + noise, "descriptors leak"
    for pid, count in early["memfds"].items():
        assert late["memfds"][pid] <= count + noise // 2, "memfds leak"
    for pid, size in early["memory"].items():
        assert late["memory"][pid] <= size + 40 * 2**20, "memory leaks"
    assert late["children"] <= early["children"] + noise, "processes leak"
    harness.assert_equal_runs(result.run_dir, reference)
    assert entries(result.run_dir, "finished")
