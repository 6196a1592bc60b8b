"""Stacks of a rank and its loader workers, taken from outside: the only word that a process gives when it hangs.

py-spy reads Python and native frames of all threads without the process's help. A stopped process cannot be suspended
for it, so native frames are missing there. Where tracing is not allowed at all, the rank is asked for its Python frames
by a signal (workers.last_words), and the reason is written beside them.
"""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers import last_words, processes
from workers.messages import StacksDumped
from workers.processes import ProcessId

_PY_SPY = Path(sysconfig.get_path("scripts")) / "py-spy"
_TRIES = (("--native",), ("--nonblocking",))
_PROCESSES_MAX = 9
_TIMEOUT_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
_COLLECTIVE_LIBRARIES = ("c10d", "gloo", "nccl", "ProcessGroup")
_NOT_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """`text`: all threads of all processes, innermost frame first. For `where` and `in_collective` see StacksDumped."""

    text: str
    where: str
    in_collective: bool | None


def dump_stacks(
    rank: ProcessId, last_words_fd: int, run_dir: Path, file: str, *, agent: str, generation: int
) -> StacksDumped:
    """Take the stacks of a rank and write them to `file`, below the run directory; what fails is told.

    `last_words_fd` is where the rank answers; it is closed.
    """
    event = StacksDumped(agent=agent, generation=generation, file=None)
    try:
        stacks = take_stacks(rank, last_words_fd)
        event = replace(event, where=stacks.where, in_collective=stacks.in_collective)
        (run_dir / last_words.STACKS_DIR).mkdir(exist_ok=True)
        (run_dir / file).write_text(stacks.text)
        return replace(event, file=file)
    except OSError as error:
        return replace(event, problem=str(error))
    finally:
        os.close(last_words_fd)


def take_stacks(rank: ProcessId, last_words_fd: int, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Stacks:
    """Of a rank and its process group. Raises OSError, with the reason, if nothing can be learnt of the rank."""
    leader = rank.pid
    try:
        threads = trace(leader, timeout_seconds)
    except OSError as error:
        answer = last_words.ask(rank, last_words_fd, timeout_seconds=_ANSWER_SECONDS)
        if not answer:
            raise
        return Stacks(text=f"{error}; what the rank itself says:\n{answer}", where="", in_collective=None)
    texts = [f"process {leader}, the rank", *map(_thread_text, threads)]
    others = [member.pid for member in processes.group_members(leader) if member.pid != leader]
    for pid in others[: _PROCESSES_MAX - 1]:
        texts.append(f"process {pid}, of the rank's group")
        try:
            texts += map(_thread_text, trace(pid, timeout_seconds))
        except OSError as error:
            texts.append(f"  {error}\n")
    loop: list[dict[str, Any]] = next((thread["frames"] for thread in threads if thread["os_thread_id"] == leader), [])
    return Stacks(text="\n".join(texts), where=_users_place(loop), in_collective=_in_collective(loop))


def trace(pid: int, timeout_seconds: float) -> list[dict[str, Any]]:
    """The threads of one process, as py-spy describes them. Raises OSError, with the reason, if it cannot."""
    problem = ""
    for options in _TRIES:
        try:
            done = subprocess.run(
                [str(_PY_SPY), "dump", "--json", "--pid", str(pid), *options],
                capture_output=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"py-spy took longer than {timeout_seconds:.0f} s"
            continue
        if done.returncode == 0:
            threads: list[dict[str, Any]] = json.loads(done.stdout)
            return threads
        problem = " ".join(done.stderr.decode(errors="replace").split("Stack backtrace")[0].split())
    raise OSError(f"no stack of process {pid}: {problem}")


def _thread_text(thread: dict[str, Any]) -> str:
    name = f' "{thread["thread_name"]}"' if thread["thread_name"] else ""
    gil = ", holds the interpreter" if thread["owns_gil"] else ""
    frames = "".join(f"    {_place(frame)}\n" for frame in thread["frames"])
    return f"  thread {thread['os_thread_id']}{name}{gil}\n{frames}"


def _place(frame: dict[str, Any]) -> str:
    line = f":{frame['line']}" if frame["line"] else ""
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}{line})"


def _python_frames(frames: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (frame for frame in frames if frame["module"] is None)


def _users_place(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost Python frame that is neither a library's nor ours; the innermost one if there is no such."""
    python = list(_python_frames(frames))
    ours = str(Path(__file__).parent)
    users = [
        frame
        for frame in python
        if not frame["filename"].startswith(ours) and not any(part in frame["filename"] for part in _NOT_USERS)
    ]
    return next((_place(frame) for frame in users + python), "")


def _in_collective(frames: Sequence[dict[str, Any]]) -> bool | None:
    """Whether the thread is within torch's communication: by its native frames, or by its innermost Python frame."""
    if not frames:
        return None
    for frame in frames:
        if frame["module"] is None:
            return "torch/distributed/" in frame["filename"]
        if any(library in frame["name"] or library in frame["module"] for library in _COLLECTIVE_LIBRARIES):
            return True
    return False
