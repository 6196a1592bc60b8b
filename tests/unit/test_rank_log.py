"""The last lines that a rank printed, read from the files behind its output."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.rank_log import LINES_MAX, RankLog


class Output:
    """Two log files as Ray gives them to a worker: opened for writing only."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.paths = [directory / "worker.out", directory / "worker.err"]
        self.fds = [os.open(path, flags) for path in self.paths]

    def print(self, which: int, *lines: str) -> None:
        os.write(self.fds[which], "".join(f"{line}\n" for line in lines).encode())


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    subject = Output(tmp_path)
    yield subject
    for fd in subject.fds:
        os.close(fd)


def test_the_last_lines_are_those_since_the_rank_began(output: Output) -> None:
    output.print(0, "an earlier rank's")
    log = RankLog(output.fds)
    log.rank_begins()
    output.print(0, ":actor_name:TrainWorker", "step 1", "step 2")
    output.print(1, "a warning")
    assert log.last_lines() == ("step 1", "step 2", "a warning")


def test_much_output_is_cut_to_the_end_of_each_file(output: Output) -> None:
    log = RankLog(output.fds)
    log.rank_begins()
    output.print(0, *(f"out {number} " + "x" * 100 for number in range(5000)))
    output.print(1, "y" * 5000, "the last words")
    lines = log.last_lines()
    assert len(lines) == LINES_MAX
    assert lines[-1] == "the last words"
    assert lines[-3].startswith("out 4999 ")
    assert max(map(len, lines)) <= 500


def test_both_files_get_half_if_both_are_long(output: Output) -> None:
    log = RankLog(output.fds)
    log.rank_begins()
    for which in (0, 1):
        output.print(which, *(f"{which}" for _ in range(100)))
    assert log.last_lines() == ("0",) * (LINES_MAX // 2) + ("1",) * (LINES_MAX // 2)


def test_a_log_that_was_renamed_meanwhile_is_read_all_the_same(output: Output) -> None:
    log = RankLog(output.fds)
    log.rank_begins()
    output.paths[0].rename(output.paths[0].with_suffix(".1"))
    output.print(0, "still here")
    assert log.last_lines() == ("still here",)


def test_output_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    log = RankLog((write_end, 10_000))
    log.rank_begins()
    os.write(write_end, b"for whoever reads the pipe\n")
    assert log.last_lines() == ()
    assert os.read(read_end, 100) == b"for whoever reads the pipe\n"
    os.close(read_end)
    os.close(write_end)
