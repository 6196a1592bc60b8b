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
from pathlib import Path
from typing import Any

logger = logging.getLogger("lastgood")

STACKS_DIR = "stacks"
_TEXT_BYTES_MAX = 1 << 20
_EXCERPT_BYTES_MAX = 8 << 10
_WRITE_SECONDS = 1.0
_CRASHED_THREAD = "Current thread "


def create_fd() -> int:
    return os.memfd_create("lastgood-last-words", os.MFD_CLOEXEC)


def speak_into(fd: int) -> None:
    """In the rank: a fatal signal writes the stacks of all threads there."""
    faulthandler.enable(file=fd, all_threads=True)


def read(fd: int) -> str:
    """All that was said, up to 1 MiB; empty if the process did not crash."""
    return os.pread(fd, _TEXT_BYTES_MAX, 0).decode(errors="replace")


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
