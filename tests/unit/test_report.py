"""What a person is told about a run that was stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.decide.causes import CAUSES, UNCHARGED
from orchestrator.observe.report import StopReport, advice

FAILURE: dict[str, Any] = {
    "kind": "failure",
    "generation": 3,
    "rank": 1,
    "cause": "exception",
    "exit_code": 1,
    "failed_at": 1_700_000_000.25,
    "step": 57,
    "error": "ZeroDivisionError: the user's mistake",
    "echoes": [{"rank": 0, "cause": "signal", "exit_code": -6, "at": 1_700_000_000.5}],
    "detail": {"stacks": "stacks/g3.txt"},
    "restore_failed": None,
}
ENTRIES = [
    {"kind": "agent", "rank": 1, "node": "node-b"},
    *({**FAILURE, "generation": number} for number in (1, 2, 3)),
    {**FAILURE, "cause": "signal", "step": 12},
]


def report(run_dir: Path, **changes: Any) -> StopReport:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "reason": "the training loop failed 3 times in a row after step 57",
        "failure": FAILURE,
        "ending": "ZeroDivisionError: the user's mistake",
        "traceback": "Traceback (most recent call last):\n  in loop\nZeroDivisionError: the user's mistake\n",
        "pid": 4242,
        "log": ("step 56", "step 57"),
        "checkpoint": "step-000000050-g0001-a01",
        "suspects": {"step-000000050-g0001-a01": "on probation: the run failed 2 times after it"},
    }
    return StopReport(**{**values, **changes})


def test_the_report_says_what_where_how_often_the_last_lines_the_checkpoint_and_what_to_try(tmp_path: Path) -> None:
    text = report(tmp_path).text(ENTRIES)
    for words in (
        "was stopped because the training loop failed 3 times in a row after step 57.",
        "first cause: exception: rank 1 (pid 4242, node node-b) ended with ZeroDivisionError: the user's mistake",
        "where: generation 3, after step 57",
        "when: 2023-11-14T22:13:20.250+00:00",
        "stacks: stacks/g3.txt",
        "with it went rank 0: signal, signal 6 (SIGABRT)",
        "Traceback (most recent call last):",
        "   3 x exception of rank 1 after step 57",
        "   1 x signal of rank 1 after step 12",
        "## last lines of rank 1\nstep 56\nstep 57",
        "Another fit() would go on from step-000000050-g0001-a01.",
        "is on probation: the run failed 2 times after it.",
        "Correct the training loop",
    ):
        assert words in text


def test_the_error_begins_with_the_users_traceback_and_is_short_and_names_the_report(tmp_path: Path) -> None:
    path = report(tmp_path).write(ENTRIES, "driver1")
    assert path == str(tmp_path / "report-g0003-driver1.txt")
    assert Path(path).read_text() == report(tmp_path).text(ENTRIES)
    error = report(tmp_path, log=("line",) * 50).error(path)
    assert error.startswith("Traceback (most recent call last):")
    assert error.endswith(f"The report: {path}")
    after_traceback = error.partition("the user's mistake\n")[2]
    assert len(after_traceback.splitlines()) < 10


def test_without_a_traceback_the_error_begins_with_the_last_lines(tmp_path: Path) -> None:
    error = report(tmp_path, traceback=None, log=[f"line {number}" for number in range(50)]).error("r.txt")
    assert error.splitlines()[:15] == [f"line {number}" for number in range(35, 50)]
    assert error.splitlines()[-1].startswith("The run was stopped because the training loop failed 3 times")
    assert len(error.splitlines()) < 40


def test_storage_that_refuses_the_report_leaves_the_error_without_a_path(tmp_path: Path) -> None:
    gone = report(tmp_path / "gone")
    assert gone.write(ENTRIES, "d") is None
    assert "The report" not in gone.error(None)


def test_a_ledger_that_cannot_be_read_leaves_the_error_without_a_path(tmp_path: Path) -> None:
    def unreadable() -> Iterator[dict[str, Any]]:
        raise OSError(5, "Input/output error")
        yield

    assert report(tmp_path).write(unreadable(), "d") is None


@pytest.mark.parametrize("cause", sorted(set(CAUSES) - UNCHARGED))
def test_there_is_advice_for_every_cause(cause: str) -> None:
    failed = "the bytes differ" if cause == "restore_failed" else None
    assert advice({**FAILURE, "cause": "exception" if failed else cause, "restore_failed": failed})


def test_a_checkpoint_that_cannot_be_read_is_the_news_and_not_the_exception_that_says_so(tmp_path: Path) -> None:
    failed = {**FAILURE, "restore_failed": "shard 1 is short"}
    assert "restore: shard 1 is short" in report(tmp_path, failure=failed).text([])
    assert "checkpoints verify" in advice(failed)


def test_the_error_of_a_hang_says_where_the_ranks_stood_and_where_their_stacks_are(tmp_path: Path) -> None:
    detail = {
        "ranks": [1],
        "where": {"0": "all_gather (comm.py:3)", "1": "sleep (train.py:7)"},
        "stacks": {"1": "stacks/g0003-rank-00001-hang-0.txt"},
    }
    failure = {**FAILURE, "cause": "hang", "exit_code": None, "error": None, "detail": detail}
    lines = report(tmp_path, failure=failure, traceback=None, ending="its standing still").error(None).splitlines()
    told = [line for line in lines if line.startswith("Rank ")]
    assert told == [
        "Rank 1 was at sleep (train.py:7); all its stacks: stacks/g0003-rank-00001-hang-0.txt",
        "Rank 0 was at all_gather (comm.py:3)",
    ]
