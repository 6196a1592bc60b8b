"""The ledger and the final error name what came first, with what is known of it, and not what followed from it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import death_loops
import harness
import pytest
from harness import entries

from workers.errors import TrainingFailed

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(death_loops)

MIB = 2**20
CGROUP_BYTES_MAX = 300 * MIB


def test_a_native_crash_is_named_with_its_stack_and_the_run_recovers_exactly(tmp_path: Path, reference: Path) -> None:
    config = {"misdeed_step": 25, "marker": str(tmp_path / "crashed")}
    result = harness.trainer(tmp_path, "segfault", death_loops.segfault_loop, config=config).fit()
    (failure,) = entries(result.run_dir, "failure")
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "signal", -signal.SIGSEGV)
    assert failure["detail"]["signal"] == "SIGSEGV"
    stack = failure["detail"]["stack"]
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert stack.index("in read_address_zero") < stack.index("in train_loop")
    whole = (result.run_dir / failure["detail"]["stacks_file"]).read_text(encoding="utf-8")
    assert failure["detail"]["stacks_file"] == "stacks/g0001-rank-00001-crash.txt"
    assert "in read_address_zero" in whole
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_loop_that_crashes_natively_again_and_again_stops_with_its_stack_on_top(tmp_path: Path) -> None:
    supervised = harness.trainer(tmp_path, "hopeless", death_loops.hopeless_segfault_loop, max_failures=1)
    with pytest.raises(TrainingFailed) as raised:
        supervised.fit()
    message = str(raised.value)
    assert message.startswith("Fatal Python error: Segmentation fault")
    assert "in read_address_zero" in message
    assert "first cause: rank 1 ended with SIGSEGV" in message


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory control group with little room; needs root and control groups of version 1."""
    path = Path("/sys/fs/cgroup/memory") / f"lastgood-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(CGROUP_BYTES_MAX), encoding="ascii")
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield path
    path.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_from_a_crash(
    tmp_path: Path, reference: Path, small_cgroup: Path
) -> None:
    config = {"misdeed_step": 25, "marker": str(tmp_path / "greedy"), "cgroup": str(small_cgroup)}
    result = harness.trainer(tmp_path, "oom", death_loops.greedy_loop, config=config).fit()
    (failure,) = entries(result.run_dir, "failure")
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "oom", -signal.SIGKILL)
    assert failure["detail"]["killer"] == "kernel"
    memory = failure["detail"]["memory"]
    assert memory["limit_bytes"] == CGROUP_BYTES_MAX
    assert memory["rss_bytes"] > CGROUP_BYTES_MAX // 3
    assert memory["peak_bytes"] >= memory["rss_bytes"]
    assert memory["group_peak_bytes"] >= memory["group_rss_bytes"] > memory["rss_bytes"]
    assert memory["available_bytes"] > 0
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_rank_whose_agent_rays_memory_monitor_kills_is_named_and_the_run_goes_on(
    tmp_path: Path, reference: Path
) -> None:
    script = Path(__file__).parent / "oom_script.py"
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "ray-oom"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert f"finished step {harness.STEPS} in generation 2" in finished.stdout
    (failure,) = entries(tmp_path / "ray-oom", "failure")
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "oom", None)
    assert failure["detail"]["killer"] == "ray"
    assert "low on memory" in failure["detail"]["ray"]
    assert failure["detail"]["memory"]["rss_bytes"] > 1000 * MIB
    harness.assert_equal_runs(tmp_path / "ray-oom", reference)
