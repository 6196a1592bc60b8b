"""The driver's side: groups of ranks that do what they are asked, and how much memory they use."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Protocol

import psutil

START_SECONDS_MAX = 300.0
ANSWER_SECONDS_MAX = 300.0
ECHO_SECONDS_MAX = 10.0
SAMPLE_SECONDS = 0.02
POLL_SECONDS = 0.2


class RanksFailed(Exception):
    """What was asked was not done. `broken`: these ranks are not to be asked again."""

    def __init__(self, reason: str, *, broken: bool = True) -> None:
        super().__init__(reason)
        self.broken = broken


class Ranks:
    """Connections to one group's ranks, by rank."""

    def __init__(self, listener: Listener, group: str, number: int, problem: Callable[[], str | None]) -> None:
        """Waits until all have connected; RanksFailed if one does not in time, or `problem` says why none will."""
        self.connections: dict[int, Connection] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        while len(self.connections) < number:
            connection = _accept(listener, problem)
            hello = connection.recv()
            if hello["group"] != group:
                raise RanksFailed(f"a rank of {hello['group']} came while {group} was waited for")
            self.connections[hello["rank"]] = connection
            self.hellos[hello["rank"]] = hello

    @property
    def pids(self) -> list[int]:
        return [hello["pid"] for hello in self.hellos.values()]

    @property
    def state_bytes(self) -> int:
        return max(hello["state_bytes"] for hello in self.hellos.values())

    def ask(self, **command: Any) -> list[Any]:
        """Every rank's answer. RanksFailed with the reason if one fails, ends or does not answer."""
        for rank in self.connections:
            self.tell(rank, **command)
        answers: dict[int, dict[str, Any]] = {}
        problem = ""
        while waiting := {rank: one for rank, one in self.connections.items() if rank not in answers}:
            # A rank whose peer has failed waits for it, perhaps for ever.
            ready = wait(list(waiting.values()), ECHO_SECONDS_MAX if problem else ANSWER_SECONDS_MAX)
            if not ready:
                raise RanksFailed(problem or f"no answer in {ANSWER_SECONDS_MAX:.0f} s")
            for rank, connection in waiting.items():
                if connection in ready:
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, OSError):
                        raise RanksFailed(problem or f"rank {rank} ended") from None
                    problem = problem or answers[rank].get("error", "")
        if problem:
            raise RanksFailed(problem, broken=False)
        return [answers[rank]["answer"] for rank in sorted(answers)]

    def tell(self, rank: int, **command: Any) -> None:
        try:
            self.connections[rank].send(command)
        except OSError:
            raise RanksFailed(f"rank {rank} ended") from None

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def _accept(listener: Listener, problem: Callable[[], str | None]) -> Connection:
    """`accept` with a deadline."""
    accepted: list[Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        thread.join(POLL_SECONDS)
        if accepted:
            return accepted[0]
        if (why := problem()) is not None:
            raise RanksFailed(why)
    raise RanksFailed(f"a rank did not start in {START_SECONDS_MAX:.0f} s")


class Group(Protocol):
    """Ranks that are there for some arms."""

    ranks: Ranks

    def pids(self) -> list[int]:
        """Of ranks and helpers; their children count too."""

    def close(self) -> None:
        """End them."""


class PlainGroup:
    """Ranks without lastgood, for peers and floors."""

    def __init__(self, scratch: Path, state_mib: int, number: int) -> None:
        rendezvous = scratch / f"rendezvous-{os.urandom(4).hex()}"
        address = str(rendezvous.with_suffix(".s"))
        program = Path(__file__).with_name("saves_peers.py")
        with Listener(address) as listener:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, program, address, rendezvous, str(rank), str(state_mib)],
                    stdout=sys.stderr,
                    start_new_session=True,
                )
                for rank in range(number)
            ]
            try:
                self.ranks = Ranks(listener, "plain", number, self._problem)
            except RanksFailed:
                self._kill()
                raise

    def pids(self) -> list[int]:
        return self.ranks.pids

    def _problem(self) -> str | None:
        codes = [process.poll() for process in self._processes]
        return None if codes == [None] * len(codes) else f"ranks ended while they started: exit codes {codes}"

    def close(self) -> None:
        self._kill()
        self.ranks.close()

    def _kill(self) -> None:
        """With what peers have left running; Python's resource tracker ends by itself, when it has removed what they
        shared."""
        for process in self._processes:
            for member in group_members(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if not any("resource_tracker" in word for word in member.cmdline()):
                        member.kill()
            process.wait()


def group_members(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found


def pss_bytes(pids: list[int]) -> int:
    """The memory of these processes and their children; what several share counts once."""
    every: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            every |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return sum(_pss(pid) for pid in every)


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def with_peak(pids: list[int], action: Callable[[], Any]) -> int:
    """The most memory that these processes used during the action."""
    peak = 0
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while True:
            peak = max(peak, pss_bytes(pids))
            if over.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        action()
    finally:
        over.set()
        thread.join()
    return peak
