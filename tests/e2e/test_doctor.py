"""`lastgood doctor` as users run it: on a good storage, a full one, one that is read-only, and interrupted."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mounts import fill, remount, small_disk

COMMAND = [str(Path(sys.executable).parent / "lastgood"), "doctor"]
DEADLINE_SECONDS = 120.0


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON that was printed, with findings by id added)."""
    done = subprocess.run(
        [*COMMAND, "--json", "--sample", "4MiB", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    return done.returncode, found | {"by_id": {finding["id"]: finding for finding in found["findings"]}}


def problems(found: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in found["findings"] if finding["level"] == "problem"]


def test_a_good_storage_is_examined_and_says_what_to_expect(tmp_path: Path) -> None:
    code, found = doctor("--storage", str(tmp_path), "--state", "64MB", "--ranks", "4", "--ranks-per-node", "2")
    assert (code, found["v"], found["ok"], problems(found)) == (0, 1, True, [])
    assert found["scale"] == {"state_bytes": 64_000_000, "ranks": 4, "ranks_per_node": 2, "slots": 3}
    expected = found["expected"]
    assert (expected["nodes"], expected["rank_bytes"], expected["memory_bytes"]) == (2, 16_000_000, 96_000_000)
    durable, verified = expected["durable_seconds"], expected["verified_seconds"]
    assert 0 < expected["stall_seconds"] < durable["least"] < durable["most"] < verified["most"]
    facts = found["facts"]
    assert {package["name"] for package in facts["software"]["packages"]} >= {"ray", "torch"}
    assert [each["problem"] for each in facts["software"]["imports"]] == [""] * 4
    assert facts["memory"]["copy"]["median"] > facts["storage"]["speeds"]["write_buffered"]["slowest"] / 100
    assert facts["tracing"]["answered"]
    assert found["by_id"]["storage.checks"]["seen"].startswith("create, exclusive, link, race, rename")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_storage_is_a_problem_and_all_else_is_still_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as storage:
        fill(storage)
        code, found = doctor("--storage", str(storage), "--state", "64MB", "--ranks", "4")
        assert [path.name for path in storage.iterdir()] == ["ballast"]
    assert (code, found["ok"], found["expected"]) == (5, False, None)
    assert "storage.create" in problems(found)
    assert "No space left" in found["by_id"]["storage.create"]["seen"]
    assert "0 MiB are free" in found["by_id"]["storage.speed"]["seen"]
    assert found["facts"]["memory"]["copy"]["median"] > 0


@pytest.mark.slow
def test_a_small_memory_file_system_is_not_filled_by_measuring_and_told_for_what_it_is(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 6 << 20) as storage:
        code, found = doctor("--storage", str(storage))
    assert (code, problems(found)) == (5, ["storage.speed"])
    assert "6 MiB are free, and measuring the speed needs 8" in found["by_id"]["storage.speed"]["seen"]
    assert found["by_id"]["storage.kind"]["level"] == "advice"
    assert found["by_id"]["storage.kind"]["seen"] == "tmpfs on tmpfs (memory)"


@pytest.mark.slow
def test_a_storage_that_is_read_only_is_a_problem(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 64 << 20) as storage:
        assert remount(storage, "ro")
        code, found = doctor("--storage", str(storage))
    assert (code, problems(found)) == (5, ["storage.create"])
    assert "Read-only file system" in found["by_id"]["storage.create"]["seen"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_what_is_interrupted_removes_its_files(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--json", "--sample", "256MiB", "--storage", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not list(tmp_path.glob(".lastgood-doctor-*/trial")):
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            running.send_signal(number)
            stdout, _ = running.communicate(timeout=DEADLINE_SECONDS)
        finally:
            running.kill()
    assert (running.returncode != 0, stdout) == (True, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_people_read_what_was_measured_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--sample", "4MiB", "--storage", str(tmp_path), "--state", "500TB", "--ranks", "8"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(line.startswith("copy memory, one thread") for line in lines)
    assert any(line.startswith("saved durably after") for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("problem  memory for snapshots on a node"))
    assert lines[at + 1].startswith("         why: ")
    assert lines[at + 2].startswith("         do:  ")
    assert any(line.startswith("problem  room for checkpoints") for line in lines)
    assert lines[-1].startswith("2 problems to solve before a run")
