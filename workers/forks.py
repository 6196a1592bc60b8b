"""The agent's end of its zygote: forked ranks, one of them waiting as a standby, and word of each one's end.

Invariants: there is at most one standby; a rank's whole process group is killed once its leader is gone; what a rank
said before it ended is read before its end is told.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers import last_words, processes
from workers.heartbeat import HeartbeatPage
from workers.messages import RankError, StartRank
from workers.processes import ProcessId
from workers.wire import Channel, channel_pair

# The environment of whoever forks ranks, before it imports what they need.
ONE_THREAD = {
    # One OpenMP operation in the zygote would make every forked rank hang at its first.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The default allocator of pyarrow starts a thread when it is imported.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # Ask NVML whether there is a GPU: asking the driver would open it, and forked ranks could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_END_SECONDS = 5.0


@dataclass(slots=True)
class ForkedRank:
    """A forked rank; a standby until it has a generation. `stepped`: whether it has finished a step of that.
    `told_step`: the last one whose time was told."""

    token: int
    directory: Path
    channel: Channel
    heartbeat: HeartbeatPage
    last_words_fd: int
    process: ProcessId | None = None
    pidfd: int = -1
    ready: bool = False
    store_port: int = 0
    generation: int | None = None
    kill_ordered: bool = False
    ordered_at: float | None = None
    error: RankError | None = None
    stepped: bool = False
    told_step: int = 0
    killed: set[int] = field(default_factory=set)

    def may_start(self, command: StartRank) -> bool:
        """Whether it waits for orders, and is the one that the coordinator means: that may have died meanwhile. Ranks
        look for rank 0's store where the dead one had it, and would wait there for a minute."""
        is_meant = command.rank != 0 or self.store_port == command.store_port
        return self.process is not None and self.ready and is_meant

    def receive(self) -> dict[str, Any] | None:
        """One message, if there is one; the channel is closed at its end."""
        if self.channel.fileno() < 0:
            return None
        try:
            received = self.channel.receive(0.0)
        except TimeoutError:
            return None
        if received is None:
            self.channel.close()
            return None
        return received[0]

    def last_words(self) -> str:
        """Where native code crashed; empty if it did not."""
        return last_words.crashed_stack(last_words.read(self.last_words_fd))

    def kill_on_order(self) -> None:
        # One that is dead already, which is about to be told, died by itself: that may be the first cause.
        self.ordered_at = self.ordered_at or time.time()
        if self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]:
            self.kill_ordered = True
        self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.killed |= {member.pid for member in processes.group_members(self.process.pid)}
            processes.kill_group(self.process.pid)

    def close(self) -> None:
        processes.remove_torch_shared_memory(self.killed)
        processes.remove_temporary_dirs(self.directory)
        self.channel.close()
        self.heartbeat.close()
        os.close(self.last_words_fd)
        if self.pidfd >= 0:
            os.close(self.pidfd)


class ZygoteClient:
    """Starts the zygote and asks it for ranks. `payload`: the pickled loop, which every rank gets as a memfd.
    `directory`: for temporary files of the ranks."""

    def __init__(self, *, preload: Iterable[str], payload: bytes, inherited_fd: int, directory: Path) -> None:
        self._directory = directory
        self._payload_fd = _memfd("lastgood-loop", payload)
        self._next_token = 0
        self.channel, theirs = channel_pair()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "workers.zygote"),
                *(str(theirs.fileno()), ",".join(preload), str(os.getpid()), str(directory)),
            ],
            pass_fds=[theirs.fileno(), inherited_fd],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        theirs.close()

    def fork(self) -> ForkedRank:
        """Ask for a rank; its pid comes as a "forked" message with its token."""
        ours, theirs = channel_pair()
        heartbeat_fd = HeartbeatPage.create_fd()
        last_words_fd = last_words.create_fd()
        self._next_token += 1
        rank = ForkedRank(
            token=self._next_token,
            directory=self._directory,
            channel=ours,
            heartbeat=HeartbeatPage(heartbeat_fd),
            last_words_fd=last_words_fd,
        )
        try:
            fds = (theirs.fileno(), heartbeat_fd, self._payload_fd, last_words_fd)
            self.channel.send("fork", fds=fds, token=rank.token)
        finally:
            theirs.close()
            os.close(heartbeat_fd)
        return rank

    def close(self) -> int:
        """End the zygote, and its ranks with it; its exit code, negative for a signal. May be called again."""
        self.channel.close()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1
        return self._process.wait()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        **ONE_THREAD,
        # Memory in few pages makes each fork and each exit of a rank faster; see huge_pages.gather_private().
        "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"))),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _memfd(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return fd
