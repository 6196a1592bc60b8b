"""Stacks of a process, taken from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import last_words, processes, stacks
from workers.last_words import stacks_file
from workers.processes import ProcessId
from workers.stacks import dump_stacks, take_stacks

SCRIPT = """
import os, sys, threading
def wait_in_a_thread(): threading.Event().wait()
def users_function(): print("ready", flush=True); threading.Event().wait()
from workers import last_words
last_words.speak_into(int(sys.argv[1]))
threading.Thread(target=wait_in_a_thread, daemon=True).start()
if os.fork():
    users_function()
threading.Event().wait()
"""


@pytest.fixture
def words() -> Iterator[int]:
    fd = last_words.create_fd()
    yield fd
    os.close(fd)


@pytest.fixture
def waiting(tmp_path: Path, words: int) -> Iterator[ProcessId]:
    """A process that waits in `users_function`, in a group with a child of its."""
    script = tmp_path / "waiting.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(words)], stdout=subprocess.PIPE, start_new_session=True, pass_fds=[words]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    found = processes.identify(process.pid)
    assert found is not None
    yield found
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_all_threads_of_the_whole_group_and_the_users_place_are_shown(waiting: ProcessId, words: int) -> None:
    taken = take_stacks(waiting, words)
    assert taken.where == "users_function (waiting.py:4)"
    assert taken.in_collective is False
    assert "wait_in_a_thread" in taken.text
    assert taken.text.count("of the rank's group") == 1
    assert "libc" in taken.text or "futex" in taken.text or "sem_" in taken.text, "no native frames"


def test_a_stopped_process_shows_its_python_frames(waiting: ProcessId, words: int) -> None:
    os.kill(waiting.pid, signal.SIGSTOP)
    assert take_stacks(waiting, words).where == "users_function (waiting.py:4)"


def test_where_tracing_is_not_allowed_the_rank_itself_is_asked(
    waiting: ProcessId, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_PY_SPY", "/bin/false")
    text = take_stacks(waiting, words).text
    assert f"no stack of process {waiting.pid}" in text
    assert "in users_function" in text
    assert "in wait_in_a_thread" in text
    assert waiting.alive()
    assert last_words.read(words) == "", "an answer is no crash"


def test_what_cannot_be_read_is_told_with_the_reason(tmp_path: Path, words: int) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    process = ProcessId(pid=gone.pid, start_ticks=1)
    told = dump_stacks(process, os.dup(words), tmp_path, stacks_file(3, 1, "hang-0"), agent="a", generation=3)
    assert told.file is None
    assert f"no stack of process {gone.pid}" in told.problem


def test_stacks_are_written_below_the_run_directory(tmp_path: Path, waiting: ProcessId, words: int) -> None:
    told = dump_stacks(waiting, os.dup(words), tmp_path, stacks_file(3, 1, "hang-0"), agent="a", generation=3)
    assert told.file == "stacks/g0003-rank-00001-hang-0.txt"
    assert "users_function (waiting.py:4)" in (tmp_path / told.file).read_text()
