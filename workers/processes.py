"""Process groups, parents and locks: what makes sure that nothing outlives the run.

Faults survived: a parent killed before its child asked to die with it (the parent is checked afterwards); a process
group whose leader is gone (its members are killed all the same); a pid that was given to another process meanwhile
(start times are compared); a driver killed with SIGKILL (every process of the run holds a shared lock that it
inherited, so the next driver can tell when the last one is gone).
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that created it ends; exit if it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, told apart from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may contain spaces and parentheses: fields start after the last ')'.
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none (a zombie counts as none)."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """`cpu_seconds`: processor time used by all its threads. `state`: R, S, D, T, ..., of its main thread."""

    cpu_seconds: float
    state: str


def usage(pid: int) -> Usage | None:
    """What a process has used; None if there is none."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Usage(cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"), state=fields[0])


def identify(pid: int) -> ProcessId | None:
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessId(pid=pid, start_ticks=ticks)


def group_members(group: int) -> list[ProcessId]:
    """The living processes of a process group."""
    members = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        # Asked first, since it costs a fiftieth of reading a file: every recovery waits for this.
        if _group_of(pid) == group and (fields := _stat_fields(pid)) is not None and fields[0] not in ("Z", "X"):
            members.append(ProcessId(pid=pid, start_ticks=int(fields[19])))
    return members


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it is gone
        return None


def kill(process: ProcessId) -> None:
    """SIGKILL one process, unless it is gone."""
    if process.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """SIGKILL a process group; one that is gone is no error."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def remove_torch_shared_memory(pids: Iterable[int]) -> None:
    """Remove the shared memory that these processes, which are dead, had created and not yet unlinked.

    A loader worker passes batches through files that live for microseconds; one that is killed just then leaves one.
    """
    for pid in pids:
        if start_ticks(pid) is None:
            for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
                path.unlink(missing_ok=True)


def use_temporary_dir(directory: Path) -> None:
    """Have multiprocessing put its sockets, also its children's, where `remove_temporary_dirs` finds them: a process
    that is killed leaves them. If it cannot be made, they go where they otherwise would."""
    path = directory / f"{os.getpid()}.sockets"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # a full temporary directory, say, which is to end no run
        return
    # There is no public way to choose it that leaves the user's own temporary files where they were.
    multiprocessing.current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined]


def remove_temporary_dirs(directory: Path) -> None:
    """Those of processes that are dead."""
    for path in directory.glob("*.sockets"):
        if start_ticks(int(path.stem)) is None:
            shutil.rmtree(path, ignore_errors=True)


def kill_leftover_group(leader: ProcessId) -> None:
    """Kill what is left of a recorded group, unless its number now belongs to processes that are older or newer.

    The leader may be gone while its children live on; a member that started before the recorded leader cannot be its
    child.
    """
    current = start_ticks(leader.pid)
    if current is not None and current != leader.start_ticks:
        return
    for member in group_members(leader.pid):
        if member.start_ticks >= leader.start_ticks:
            kill(member)


def node_dir(run: str) -> Path:
    """Where the processes of a run keep what belongs to one node: its locks, the groups to kill, temporary files."""
    path = node_dir_path(run)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def node_dir_path(run: str) -> Path:
    """`node_dir`, whether or not it is there."""
    return Path(tempfile.gettempdir()) / f"lastgood-{os.getuid()}" / run


def remove_node_dir(path: Path) -> None:
    """Remove it, and the one that all runs share, unless somebody still has something there."""
    with contextlib.suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


class RunLock:
    """A shared lock that a process of the run holds and its children inherit; one file a driver and node."""

    def __init__(self, run: str, driver: str) -> None:
        self.path = node_dir(run) / f"{driver}.lock"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self.fd)


def lock_holders(path: Path) -> list[int]:
    """The pids that keep a driver's lock file open; empty once nobody holds the lock, and the file is removed then."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _processes_with_open_file(path) or [0]
        path.unlink(missing_ok=True)
        return []
    finally:
        os.close(fd)


def _processes_with_open_file(path: Path) -> list[int]:
    wanted = os.stat(path)
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            fds = os.listdir(f"/proc/{entry}/fd")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any(_is_file(f"/proc/{entry}/fd/{fd}", wanted) for fd in fds):
            pids.append(int(entry))
    return pids


def _is_file(path: str, wanted: os.stat_result) -> bool:
    try:
        status = os.stat(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # closed since it was listed, which says nothing about the process's other files
    return (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino)
