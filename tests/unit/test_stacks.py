"""Stacks of a process, taken from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.stacks import dump_stacks, stacks_file, take_stacks

SCRIPT = """
import os, sys, threading
def wait_in_a_thread(): threading.Event().wait()
def users_function(): print("ready", flush=True); threading.Event().wait()
threading.Thread(target=wait_in_a_thread, daemon=True).start()
if os.fork():
    users_function()
threading.Event().wait()
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[int]:
    """The pid of a process that waits in `users_function`, in a group with a child of its."""
    script = tmp_path / "waiting.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_all_threads_of_the_whole_group_and_the_users_place_are_shown(waiting: int) -> None:
    stacks = take_stacks(waiting)
    assert stacks.where == "users_function (waiting.py:4)"
    assert stacks.in_collective is False
    assert "wait_in_a_thread" in stacks.text
    assert stacks.text.count("of the rank's group") == 1
    assert "libc" in stacks.text or "futex" in stacks.text or "sem_" in stacks.text, "no native frames"


def test_a_stopped_process_shows_its_python_frames(waiting: int) -> None:
    os.kill(waiting, signal.SIGSTOP)
    assert take_stacks(waiting).where == "users_function (waiting.py:4)"


def test_what_cannot_be_read_is_told_with_the_reason(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    told = dump_stacks(gone.pid, tmp_path, stacks_file(3, 1, "hang-0"), agent="a", generation=3)
    assert told.file is None
    assert f"no stack of process {gone.pid}" in told.problem


def test_stacks_are_written_below_the_run_directory(tmp_path: Path, waiting: int) -> None:
    told = dump_stacks(waiting, tmp_path, stacks_file(3, 1, "hang-0"), agent="a", generation=3)
    assert told.file == "stacks/g0003-rank-00001-hang-0.txt"
    assert "users_function (waiting.py:4)" in (tmp_path / told.file).read_text()
