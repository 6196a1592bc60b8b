"""The zygote: a small process that has torch imported and forks ranks on command.

Invariants: it runs one thread and has opened no CUDA context (a forked child could use neither OpenMP nor CUDA
otherwise), and both are checked after each module that it preloads. It ends when its agent closes the channel or
dies; its ranks die with it. A rank leads its own process group before its pid is told, so a kill of the group can't
miss it.

Protocol (workers.wire), agent to zygote: fork(token) + [rank's channel, heartbeat page, payload, last
words].
Zygote to agent: ready(seconds), forked(token, pid, start_ticks) + [pidfd], exited(pid, code, at), failed(message).
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from workers import processes
from workers.checkpoint import huge_pages
from workers.wire import Channel

# What a training step would otherwise import lazily: half a second of every recovery.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.data",
    "torch.optim",
    "torch._dynamo",
    "workers.rank",
)


def preload(modules: tuple[str, ...]) -> str | None:
    """Import the modules; the message of the first one that must not be preloaded, else None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return (
                f"preload module {name!r} cannot be imported ({type(error).__name__}: {error}); "
                f"correct RecoveryConfig.preload, or install it on every node"
            )
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return (
                f"preload module {name!r} started a thread ({threads} run now); ranks forked afterwards would hang. "
                f"Remove it from RecoveryConfig.preload"
            )
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return (
                f"preload module {name!r} opened CUDA while it was imported; forked ranks could not use the GPU. "
                f"Remove it from RecoveryConfig.preload"
            )
    return None


def serve(channel: Channel) -> None:
    started = time.monotonic()
    problem = preload(PRELOAD + tuple(sys.argv[2].split(",") if sys.argv[2] else ()))
    if problem is not None:
        channel.send("failed", message=problem)
        return
    gc.collect()
    gc.freeze()  # keeps the collector of the children from copying the pages of what was preloaded
    huge_pages.gather_private()  # a fork or an exit of a rank, or of a loader worker, takes a quarter of the time
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, _noop)
    channel.send("ready", seconds=time.monotonic() - started)
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wakeup_read, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == wakeup_read:
                _drain(wakeup_read)
                _report_exits(channel)
            elif (message := channel.receive()) is None:
                return
            else:
                _fork(channel, message[0]["token"], message[1], (wakeup_read, wakeup_write))


def _fork(channel: Channel, token: int, fds: list[int], own_fds: tuple[int, int]) -> None:
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        processes.die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        for fd in own_fds:
            os.close(fd)
        from workers import rank

        processes.use_temporary_dir(Path(sys.argv[4]))
        rank.main(Channel(socket.socket(fileno=fds[0])), *fds[1:])
    with contextlib.suppress(ProcessLookupError):
        os.setpgid(pid, pid)  # in both processes: whichever runs first
    for fd in fds:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    channel.send("forked", fds=(pidfd,), token=token, pid=pid, start_ticks=processes.start_ticks(pid) or 0)
    os.close(pidfd)


def _report_exits(channel: Channel) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send("exited", pid=pid, code=os.waitstatus_to_exitcode(status), at=time.time())


def _drain(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return


def _noop(_number: int, _frame: FrameType | None) -> None:
    """A handler has to exist for the wake-up pipe to be written."""


if __name__ == "__main__":
    # Those who end a whole job send SIGTERM to all its processes; this one ends with its agent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.die_with_parent(int(sys.argv[3]))
    with contextlib.suppress(BrokenPipeError):  # the agent is gone
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
