"""Ranks on two nodes: each node has a keeper of its own, and each keeper saves its own rank."""

import subprocess
import sys
from pathlib import Path

import harness
import pytest


@pytest.mark.slow
def test_ranks_and_a_keeper_on_two_nodes_are_killed_and_the_run_finishes(tmp_path: Path, reference: Path) -> None:
    script = Path(__file__).parent / "two_nodes_script.py"
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "two"], capture_output=True, text=True, timeout=180, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert f"finished step {harness.STEPS} in generation 2" in finished.stdout
    harness.assert_equal_runs(tmp_path / "two", reference)
