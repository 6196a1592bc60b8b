"""How a failure is put into words: what the user has to see first comes first."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.decide.failure import Cause, Failure
from orchestrator.recovery import describe, stop_report
from workers.messages import RankError

MEMORY = {"rss_bytes": 3 << 30}
HANG = Cause(rank=-1, kind="hang", exit_code=None, at=5.0)


def failure(kind: str, exit_code: int | None, **fields: Any) -> Failure:
    first = Cause(rank=1, kind=kind, exit_code=exit_code, at=5.0, **fields)
    return Failure(generation=2, first=first, echoes=(), step=7)


def stop_message(failed: Failure) -> str:
    entry = {**describe(failed), "restore_failed": None}
    run_dir = Path("/runs/gpt")
    return stop_report(failed, "y", entry=entry, run_dir=run_dir, checkpoint=None, suspects={}).error(None)


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (failure("signal", -11, detail={"signal": "SIGSEGV"}), "rank 1 ended with SIGSEGV after step 7"),
        (failure("signal", -9), "rank 1 ended with signal 9 after"),
        (failure("exit", 3), "rank 1 ended with exit code 3 after"),
        (failure("agent_lost", None), "the loss of its agent or node"),
        (
            failure("oom", -9, detail={"killer": "kernel", "memory": MEMORY}),
            "rank 1 ended with its being killed by the kernel for lack of memory; it used 3072 MiB when last seen",
        ),
        (
            Failure(generation=2, first=HANG, echoes=(), step=7),
            "no single rank is to blame for its standing still after step 7",
        ),
        (failure("oom", None, detail={"killer": "ray"}), "killed by Ray's memory monitor for lack of memory after"),
    ],
)
def test_the_first_cause_is_said_in_plain_words(failed: Failure, words: str) -> None:
    assert words in stop_message(failed)


def test_a_native_crashs_stack_comes_first_as_a_traceback_does() -> None:
    crashed = failure("signal", -11, detail={"signal": "SIGSEGV", "stack": "Fatal Python error: x\n  File ..."})
    assert stop_message(crashed).startswith("Fatal Python error: x\n  File ...\n\n")
    error = RankError(type="ValueError", message="bad", traceback="Traceback ...\n", at=5.0, exit_code=1)
    raised = failure("exception", 1, error=error, detail={"stack": "of a loader worker"})
    assert stop_message(raised).startswith("Traceback ...\n\n")
    assert (
        "The run was stopped because y; first cause: rank 1 ended with ValueError: bad after step 7."
        in stop_message(raised)
    )


def test_the_ledger_gets_what_is_known_of_the_first_cause() -> None:
    fields = describe(failure("signal", -11, detail={"signal": "SIGSEGV"}))
    assert (fields["cause"], fields["exit_code"], fields["detail"]) == ("signal", -11, {"signal": "SIGSEGV"})
