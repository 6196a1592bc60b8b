"""What a rank says when native code takes it down: the stacks that faulthandler writes, kept for the ledger.

A rank writes them into a memfd that its agent reads when the rank is gone, so they survive every way to die that runs
a signal handler (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT). The whole text lands in the run directory's `stacks`
folder; what travels to the coordinator is bounded. Faults survived: storage that does not answer (the text then stays
in the worker's log, and in part in the ledger); a text cut short.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from workers.processes import ProcessId

logger = logging.getLogger("lastgood")

STACKS_DIR = "stacks"
_TEXT_BYTES_MAX = 1 << 20
_EXCERPT_BYTES_MAX = 8 << 10
_WRITE_SECONDS = 1.0
_CRASHED = "Fatal Python error"
_POLL_SECONDS = 0.05
# Users' programs, schedulers and libraries use the named signals.
_STACKS_SIGNAL = signal.SIGRTMIN + 11
_CRASHED_THREAD = "Current thread "


def create_fd() -> int:
    return os.memfd_create("lastgood-last-words", os.MFD_CLOEXEC)


def speak_into(fd: int) -> None:
    """In the rank: a fatal signal writes the stacks of all threads there, and so does one that only asks for them."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(_STACKS_SIGNAL, file=fd, all_threads=True)


def read(fd: int) -> str:
    """What was said when the process crashed, up to 1 MiB; empty if it did not crash."""
    text = os.pread(fd, _TEXT_BYTES_MAX, 0).decode(errors="replace")
    return text[text.find(_CRASHED) :] if _CRASHED in text else ""


def ask(process: ProcessId, fd: int, *, timeout_seconds: float) -> str:
    """Have a process that runs write the Python stacks of its threads; empty if it does not answer in time.

    A process that is stopped, or blocked in the kernel for good, does not answer.
    """
    before = os.fstat(fd).st_size
    if not process.alive():
        return ""
    os.kill(process.pid, _STACKS_SIGNAL)
    deadline, size = time.monotonic() + timeout_seconds, before
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        last, size = size, os.fstat(fd).st_size
        if last == size > before:  # it has ended: nothing more came for a while
            break
    return os.pread(fd, _TEXT_BYTES_MAX, before).decode(errors="replace")


def crashed_stack(text: str) -> str:
    """The headline and the frames, innermost first, of the thread that crashed; at most 8 KiB."""
    headline, _, rest = text.partition("\n")
    _, found, after = rest.partition(_CRASHED_THREAD)
    frames = after.partition("\n\n")[0]
    stack = f"{headline}\n{found}{frames}" if found else text
    return stack.encode()[:_EXCERPT_BYTES_MAX].decode(errors="ignore").rstrip()


def stacks_file(generation: int, rank: int, why: str) -> str:
    """Where the stacks of a rank lie, relative to the run directory."""
    return f"{STACKS_DIR}/g{generation:04d}-rank-{rank:05d}-{why}.txt"


def detail(fd: int, exit_code: int, *, run_dir: Path, generation: int, rank: int) -> dict[str, Any]:
    """The ledger's facts about how a rank ended: its signal's name; where native code crashed, the stack and its file.

    Takes at most a second, however slow the storage is: then no file is named.
    """
    facts: dict[str, Any] = {"signal": _signal_name(-exit_code)} if exit_code < 0 else {}
    text = read(fd)
    if text:
        sys.stderr.write(text)
        facts["stack"] = crashed_stack(text)
        file = stacks_file(generation, rank, "crash")
        if _write_in_time(run_dir / file, text):
            facts["stacks_file"] = file
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _write_in_time(path: Path, text: str) -> bool:
    done = threading.Event()

    def write() -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            done.set()
        except OSError as error:
            logger.warning("lastgood: %s could not be written: %s", path, error)

    writer = threading.Thread(target=write, name="lastgood-stacks", daemon=True)
    writer.start()
    writer.join(_WRITE_SECONDS)
    return done.is_set()
