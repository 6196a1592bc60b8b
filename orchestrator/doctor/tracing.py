"""Whether the stacks of a process can be taken from outside, as is done when a rank hangs; else, whether it answers.

The process is a child of this one, and py-spy another: neither is above the other, as in a run. Kernels that allow
tracing of one's own children only (ptrace_scope 1) refuse it then.
"""

import os
import subprocess
import sys
from pathlib import Path

from orchestrator.doctor.facts import Tracing
from workers import last_words, stacks
from workers.processes import identify

_CHILD = """
import sys, time
from workers import last_words
last_words.speak_into(int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
_TRACE_SECONDS = 10.0
_ANSWER_SECONDS = 2.0


def try_tracing() -> Tracing:
    """Starts a process, takes its stack both ways, and ends it."""
    words = last_words.create_fd()
    try:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, str(words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(words,),
        ) as child:
            try:
                return _take_both(child, words)
            finally:
                child.kill()
    finally:
        os.close(words)


def _take_both(child: subprocess.Popen[bytes], words: int) -> Tracing:
    assert child.stdout is not None
    child.stdout.readline()
    process = identify(child.pid)
    problem = ""
    if process is None:
        return Tracing(
            traced=False, problem="the process to trace did not start", answered=False, ptrace_scope=_scope()
        )
    try:
        stacks.trace(process.pid, _TRACE_SECONDS)
    except OSError as error:
        problem = str(error)
    answer = last_words.ask(process, words, timeout_seconds=_ANSWER_SECONDS)
    return Tracing(traced=not problem, problem=problem, answered=bool(answer), ptrace_scope=_scope())


def _scope() -> int | None:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
