"""`lastgood checkpoints` on a real run, as a user runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import damage
import harness
import pytest

from workers.checkpoint.manifest import checkpoint_name

LASTGOOD = Path(sys.executable).with_name("lastgood")
TIMEOUT_SECONDS = 60
NEWEST = checkpoint_name(harness.STEPS, 1, 1)


@pytest.fixture
def run_dir(reference: Path, tmp_path: Path) -> Path:
    """A copy of the undisturbed run, to damage."""
    return shutil.copytree(reference, tmp_path / "run")


def inspect(*arguments: str | Path, code: int = 0) -> str:
    """What the command prints on standard output; it has to end with `code`, and without a traceback."""
    done = subprocess.run(
        [LASTGOOD, "checkpoints", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def inspect_json(*arguments: str | Path, code: int = 0) -> Any:
    """The one JSON object that is all of standard output."""
    content = json.loads(inspect(*arguments, "--json", code=code))
    assert isinstance(content, dict)
    return content


def test_a_good_run_is_listed_shown_and_verified(run_dir: Path) -> None:
    before = damage.contents(run_dir)
    steps = list(range(harness.STEPS, 0, -harness.SAVE_EVERY))
    listed = inspect_json("list", run_dir)["checkpoints"]
    assert [row["step"] for row in listed] == steps
    assert [row["status"] for row in listed] == ["newest"] + ["older"] * (len(steps) - 1)
    shown = inspect_json("show", run_dir)
    assert (shown["step"], shown["world_size"], len(shown["shards"])) == (harness.STEPS, 2, 2)
    verified = inspect_json("verify", run_dir)
    assert verified["ok"] is True
    assert [checked["name"] for checked in verified["checkpoints"]] == [row["name"] for row in listed]
    for command in ("list", "show", "verify"):
        assert NEWEST in inspect(command, run_dir)
    assert damage.contents(run_dir) == before, "looking changed something"


def test_verify_exits_with_3_after_one_flipped_bit_and_names_file_and_tensor(run_dir: Path) -> None:
    damage.flip_a_bit_of_a_tensor(run_dir, NEWEST)
    verified = inspect_json("verify", run_dir, code=3)
    assert verified["ok"] is False
    bad = {checked["name"]: checked["problems"] for checked in verified["checkpoints"] if not checked["ok"]}
    assert bad.keys() == {NEWEST}
    (problem,) = bad[NEWEST]
    assert problem["file"] == "rank-00001-of-00002.safetensors"
    tensors = {tensor["name"] for tensor in inspect_json("show", run_dir, NEWEST)["shards"][1]["tensors"]}
    assert problem["tensor"] in tensors
    printed = inspect("verify", run_dir, code=3)
    assert f"{problem['file']}: tensor {problem['tensor']}" in printed
    assert inspect_json("verify", run_dir, checkpoint_name(50, 1, 1))["ok"] is True
