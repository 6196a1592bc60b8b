"""SIGTERM as a notice: the process goes on, says so, and has a while to save.

An agent works in a thread, which cannot have signals of its own: `watch` is called in its process's main thread
(workers.backend). A rank's main thread is ours. Faults survived: a signal in the middle of a message to the agent
(messages are single packets); a child that a rank has forked and that inherits the handler (it dies of the signal, as
it would have).
"""

import contextlib
import os
import signal
import time
from types import FrameType

from workers.wire import Channel

_pipe: tuple[int, int] | None = None


def watch() -> None:
    """Have SIGTERM wake whoever polls `fd()`, and nothing else."""
    global _pipe
    if _pipe is None:
        _pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, _noop)
        signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def fd() -> int | None:
    """What becomes readable when the process is sent a signal; None in a process that is no Ray Train worker."""
    return _pipe[0] if _pipe is not None else None


def received() -> bool:
    """Whether one of the signals since the last call was SIGTERM."""
    if _pipe is None:
        return False
    with contextlib.suppress(BlockingIOError):
        return signal.SIGTERM in os.read(_pipe[0], 4096)
    return False


def tell_on_sigterm(agent: Channel) -> None:
    """For a rank: tell the agent of each SIGTERM."""
    owner = os.getpid()

    def tell(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        with contextlib.suppress(OSError):  # the agent is gone, and this process with it
            agent.send("terminated", at=time.time())

    signal.signal(signal.SIGTERM, tell)


def _noop(_number: int, _frame: FrameType | None) -> None:
    """A handler has to exist for the pipe to be written."""
