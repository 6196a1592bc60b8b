"""What a campaign sees of a run's processes, while it is on and after its end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.campaign import leak_watch
from chaos.campaign.leak_watch import LeakWatch
from chaos.judge.leaks import OBSERVATIONS_FILE
from orchestrator.driver import run_id
from workers.processes import node_dir, remove_node_dir

PARENT = """
import os, subprocess, sys
fd = os.memfd_create("lastgood-slot")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def family() -> Iterator["subprocess.Popen[str]"]:
    """A process with a child and a memory file; it ends, with its child, when its input does."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def looks(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / OBSERVATIONS_FILE).read_text().splitlines()]


def test_a_look_counts_processes_with_their_children_and_memory_files(
    tmp_path: Path, family: "subprocess.Popen[str]"
) -> None:
    status = {"ranks": [], "keepers": [{"node_id": "n", "pid": family.pid}]}
    LeakWatch(tmp_path).look(status, coordinator_pid=None)
    (look,) = looks(tmp_path)
    (process,) = look["processes"]
    assert (process["role"], process["pid"], process["memfds"]) == ("keeper", family.pid, 1)
    assert process["rss_bytes"] > 0
    assert process["descriptors"] >= 4
    assert look["descendants"] == 2


def test_files_that_the_run_has_left_on_the_node_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_watch, "_END_SECONDS", 0.0)
    left = node_dir(run_id(tmp_path)) / "1.tmp"
    left.mkdir()
    try:
        LeakWatch(tmp_path).end()
        assert looks(tmp_path)[-1]["files_left"] == [str(left)]
    finally:
        left.rmdir()
        remove_node_dir(left.parent)


def test_what_is_still_there_after_the_end_is_named(
    tmp_path: Path, family: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leak_watch, "_END_SECONDS", 0.0)
    watch = LeakWatch(tmp_path)
    watch.look({"ranks": [], "keepers": [{"node_id": "n", "pid": family.pid}]}, coordinator_pid=None)
    watch.end()
    assert len(looks(tmp_path)[-1]["left"]) == 2
    assert family.stdin is not None
    family.stdin.close()
    family.wait()
    watch.end()
    end = looks(tmp_path)[-1]
    assert end["after"]
    assert end["left"] == []
