"""`lastgood demo`, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.demo.plan import HALF_COPIED_BY_RANK, HALF_WRITTEN_BY_KEEPER

LASTGOOD = Path(sys.executable).with_name("lastgood")
TIMEOUT_SECONDS = 400


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [LASTGOOD, "demo", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment
    )


def test_demo_survives_both_kinds_of_kills_inside_saves_and_prints_one_json_object(tmp_path: Path) -> None:
    done = run_demo("--json", "--steps", "24", "--storage", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bitwise_equal"] is True
    assert report["kills"] == 3
    assert set(report["killed_during"]) == {HALF_COPIED_BY_RANK, HALF_WRITTEN_BY_KEEPER}
    assert report["newest_committed_step"] <= report["restored_step"]
    assert 0 <= report["lost_steps"] <= 2
    assert report["recovery_seconds"] > 0
    for name in ("ray_workers_restarted", "samples_missing", "samples_duplicated", "torn_restores"):
        assert report[name] == 0
    assert Path(report["run_dir"]).parent == tmp_path
    assert all(report["claims"].values())
    assert "SIGKILL to rank" in done.stderr


@pytest.mark.parametrize("as_json", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_demo_that_cannot_run_says_what_is_missing_and_exits_with_5(tmp_path: Path, as_json: bool) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    done = run_demo("--storage", str(occupied), *(["--json"] if as_json else []))
    assert done.returncode == 5
    assert str(occupied) in done.stderr
    assert (str(occupied) in json.loads(done.stdout)["error"]) if as_json else done.stdout == ""
