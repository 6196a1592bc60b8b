"""What is kept of the stacks that a native crash leaves."""

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import last_words

TEXT = """Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "queue.py", line 1 in wait

Current thread 0x00007f2 (most recent call first):
  File "inner.py", line 2 in inner
  File "outer.py", line 3 in outer

Thread 0x00007f3 (most recent call first):
  File "other.py", line 4 in other

Extension modules: numpy (total: 1)
"""


@pytest.fixture
def fd() -> Iterator[int]:
    fd = last_words.create_fd()
    yield fd
    os.close(fd)


def test_the_crashed_threads_frames_are_cut_out_of_all_the_others() -> None:
    assert last_words.crashed_stack(TEXT).splitlines() == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f2 (most recent call first):",
        '  File "inner.py", line 2 in inner',
        '  File "outer.py", line 3 in outer',
    ]


@pytest.mark.parametrize("end", range(len(TEXT)))
def test_a_text_cut_short_loses_no_frame_that_is_there(end: int) -> None:
    stack = last_words.crashed_stack(TEXT[:end])
    assert ("in inner" in stack) == ("in inner" in TEXT[:end])


def test_what_is_kept_is_bounded_and_valid_text() -> None:
    stack = last_words.crashed_stack("Fatal Python error: x\n\nCurrent thread 0x1:\n" + "  ä line\n" * 10_000)
    assert len(stack.encode()) <= 8192
    assert stack.startswith("Fatal Python error: x\nCurrent thread 0x1:\n  ä line\n")


def test_a_process_that_crashes_speaks_into_the_memfd_and_the_run_directory_keeps_it(fd: int, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        last_words.speak_into(fd)
        ctypes.string_at(0)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGSEGV
    facts = last_words.detail(fd, code, run_dir=tmp_path, generation=3, rank=1)
    assert facts["signal"] == "SIGSEGV"
    assert facts["stacks_file"] == "stacks/g0003-rank-00001-crash.txt"
    assert "in string_at" in facts["stack"]
    assert (tmp_path / facts["stacks_file"]).read_text(encoding="utf-8") == last_words.read(fd)


def test_a_process_that_was_killed_or_ended_by_itself_has_no_stack(fd: int, tmp_path: Path) -> None:
    assert last_words.detail(fd, -signal.SIGKILL, run_dir=tmp_path, generation=1, rank=0) == {"signal": "SIGKILL"}
    assert last_words.detail(fd, 1, run_dir=tmp_path, generation=1, rank=0) == {}
    assert last_words.detail(fd, -50, run_dir=tmp_path, generation=1, rank=0) == {"signal": "signal 50"}
    assert not list(tmp_path.iterdir())


def test_storage_that_refuses_the_file_leaves_the_excerpt_and_names_no_file(fd: int, tmp_path: Path) -> None:
    os.write(fd, TEXT.encode())
    (tmp_path / "stacks").write_text("in the way", encoding="ascii")
    facts = last_words.detail(fd, -signal.SIGSEGV, run_dir=tmp_path, generation=1, rank=0)
    assert facts.keys() == {"signal", "stack"}


def test_storage_that_does_not_answer_is_not_waited_for(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_words, "_WRITE_SECONDS", 0.01)
    os.write(fd, TEXT.encode())
    (tmp_path / "stacks").mkdir()
    os.mkfifo(tmp_path / "stacks" / "g0001-rank-00000-crash.txt")  # opening it waits for a reader
    facts = last_words.detail(fd, -signal.SIGSEGV, run_dir=tmp_path, generation=1, rank=0)
    assert facts.keys() == {"signal", "stack"}
