"""One cell's run: the parent of all its processes, which attacks where fault points alone cannot.

Invariants: one thread, since it forks; every process dies with it, and none is left when `run` returns. Coordinator and
keepers that die are started again at once, as Ray does. A fault that is armed to pause at a point is the host's cue:
it kills who the cell says, and lets the point go on.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.matrix.agents import Agents
from chaos.matrix.cells import Cell, Scenario
from chaos.matrix.wires import SocketLink, serve
from orchestrator import nodes as ray_nodes
from orchestrator.config import RecoveryConfig
from orchestrator.coordinator import Coordinator
from orchestrator.outcome import CoordinatorConfig
from workers import failpoint, keeper, processes
from workers import rank as rank_process
from workers.checkpoint.persist import ReadBack
from workers.failpoint import Arm
from workers.orders import LoopSettings
from workers.replication.exchange import ExchangeSettings
from workers.wire import Channel, channel_pair

RUN_DIR = "run"
DEADLINE_SECONDS = 60.0
_POLL_MILLISECONDS = 10
_SECRET = b"of nobody's interest: one machine, one run, some milliseconds"


@dataclass(slots=True, kw_only=True)
class Ran:
    """How a cell's run ended. `error`: why it was not in order, empty if it finished."""

    error: str
    seconds: float


class Host:
    """Runs `cell` in `directory`, which is empty. `sabotage` is called in each process before it begins: a test breaks
    the production code with it. `undisturbed`: nothing is
    attacked, for a run to compare with."""

    def __init__(
        self,
        cell: Cell,
        directory: Path,
        *,
        seed: int,
        undisturbed: bool = False,
        sabotage: Callable[[], None] = lambda: None,
    ) -> None:
        self._cell = cell
        self._directory = directory
        self._run_dir = directory / RUN_DIR
        self._faults = self._run_dir / "faults"
        self._seed = seed
        self._undisturbed = undisturbed
        self._sabotage = sabotage
        self._run = uuid.uuid4().hex[:12]
        self._children: dict[int, tuple[str, Callable[[], None] | None]] = {}
        self._ranks: dict[int, int] = {}
        self._over: dict[str, Any] | None = None
        self._agents: Channel | None = None

    def run(self) -> Ran:
        """Until the run has ended, or its deadline."""
        for name in ("generations", "checkpoints", "faults"):
            (self._run_dir / name).mkdir(parents=True)
        began = time.monotonic()
        handled: set[str] = set()
        try:
            self._start_driver(() if self._undisturbed else self._cell.arms(first=True))
            while self._over is None:
                if time.monotonic() - began > DEADLINE_SECONDS:
                    return Ran(error=f"it did not finish within {DEADLINE_SECONDS:.0f} s", seconds=DEADLINE_SECONDS)
                self._wait()
                self._attack(handled)
        finally:
            self._end_all()
        return Ran(error=str(self._over["error"] or ""), seconds=time.monotonic() - began)

    # ------------------------------------------------------------ attacks

    def _attack(self, handled: set[str]) -> None:
        """Do what the points that were reached are the cue for."""
        if "host" not in handled and (self._faults / "host.json").exists():
            handled.add("host")
            if self._cell.victim_rank is not None:
                self._kill_rank(self._cell.victim_rank)
            failpoint.release("host", self._faults)
        if "driver" not in handled and (self._faults / "driver.json").exists():
            handled.add("driver")
            self._end_all()
            failpoint.release("driver", self._faults)
            if self._cell.scenario is Scenario.DAMAGE:
                _cut_newest(self._run_dir)
            self._start_driver(self._cell.arms(first=False))

    def _kill_rank(self, rank: int) -> None:
        for pid, number in list(self._ranks.items()):
            if number == rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------ processes

    def _start_driver(self, arms: tuple[Arm, ...]) -> None:
        driver = uuid.uuid4().hex[:8]
        address = f"\0lastgood-matrix-{self._run}-{driver}"
        recovery = RecoveryConfig(
            cadence=None,
            snapshot_every_steps=None,
            keep_last=self._cell.keep_last,
            replicate_snapshots=False,
            hang_seconds_min=None,
            save_timeout_seconds=DEADLINE_SECONDS / 2,
            takeover_seconds=1.0,
            failpoints=arms,
        )
        config = CoordinatorConfig(
            run=self._run, driver=driver, run_dir=self._run_dir, recovery=recovery, needed={}, can_exclude=False
        )
        nodes = self._cell.nodes
        self._keep("coordinator", lambda: _coordinator(config, address, nodes))
        for node in sorted(set(nodes)):
            self._keep(f"keeper of {node}", lambda node=node: _keeper(config, address, node))  # type: ignore[misc]
        ours, theirs = channel_pair()
        settings = _settings(config)
        agents = self._fork(
            "agents",
            lambda: Agents(
                host=theirs, address=address, driver=driver, settings=settings, nodes=nodes, seed=self._seed
            ).serve(),
        )
        self._children[agents] = ("agents", None)
        theirs.close()
        self._agents = ours

    def _keep(self, name: str, body: Callable[[], None]) -> None:
        self._children[self._fork(name, body)] = (name, body)

    def _fork(self, name: str, body: Callable[[], None]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)
            return pid
        try:
            os.setpgid(0, 0)
            processes.die_with_parent(parent)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            log = os.open(self._directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            tempfile.tempdir = str(self._directory)
            self._sabotage()
            body()
        except BaseException as error:
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
        finally:
            os._exit(1)

    def _wait(self) -> None:
        poller = select.poll()
        assert self._agents is not None
        poller.register(self._agents, select.POLLIN)
        for fd, _ in poller.poll(_POLL_MILLISECONDS):
            if fd == self._agents.fileno():
                received = self._agents.receive()
                if received is None:
                    raise RuntimeError(f"the agents' process has ended; see {self._directory}/log.txt")
                self._from_agents(*received)
        for pid, code in _ended():
            name, body = self._children.pop(pid, ("", None))
            if body is not None:
                self._keep(name, body)
            elif self._ranks.pop(pid, None) is not None:
                self._agents.send("exited", pid=pid, code=code)

    def _from_agents(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["kind"] == "over":
            self._over = message
            return
        token = message["token"]
        own = self._agents

        def body() -> None:
            assert own is not None
            own.close()
            rank_process._warm_up = lambda: None
            rank_process.main(Channel(socket.socket(fileno=fds[0])), *fds[1:])

        pid = self._fork(f"rank {message['rank']}", body)
        for fd in fds:
            os.close(fd)
        self._children[pid] = (f"rank {message['rank']}", None)
        self._ranks[pid] = message["rank"]
        pidfd = os.pidfd_open(pid)
        assert own is not None
        own.send("forked", fds=(pidfd,), token=token, pid=pid, start_ticks=processes.start_ticks(pid) or 0)
        os.close(pidfd)

    def _end_all(self) -> None:
        """Everything at once, as when a machine is switched off and on again."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._children.clear()
        self._ranks.clear()
        if self._agents is not None:
            self._agents.close()


def _ended() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _coordinator(config: CoordinatorConfig, address: str, nodes: tuple[str, ...]) -> None:
    ray_nodes._alive = lambda: {node: {} for node in nodes}

    async def run() -> None:
        await serve(Coordinator(config), address)

    asyncio.run(run())


def _keeper(config: CoordinatorConfig, address: str, node: str) -> None:
    vars(keeper).update(Link=SocketLink)
    keeper.Keeper(
        run=config.run,
        driver=config.driver,
        node=node,
        run_dir=str(config.run_dir),
        coordinator=address,
        takeover_seconds=config.recovery.takeover_seconds,
        read_back=ReadBack(),
        exchange=ExchangeSettings(host="127.0.0.1", secret=_SECRET, bytes_per_second_max=None, memory_fraction_max=1.0),
        failpoints=config.recovery.failpoints,
    )
    while True:
        signal.pause()


def _settings(config: CoordinatorConfig) -> LoopSettings:
    recovery = config.recovery
    return LoopSettings(
        run=config.run,
        run_dir=config.run_dir,
        checkpoint_storage=None,
        save_every_steps=None,
        save_at_end=True,
        snapshot_slots=recovery.snapshot_slots,
        memory_fraction_max=1.0,
        save_timeout_seconds=recovery.save_timeout_seconds,
        collective_timeout_seconds=recovery.collective_timeout_seconds,
        record_samples=True,
        check_replicas=True,
        failpoints=recovery.failpoints,
    )


def _cut_newest(run_dir: Path) -> None:
    """The newest checkpoint loses the end of a shard, while nobody looks."""
    newest = max(path.parent for path in (run_dir / "checkpoints").glob("*/manifest.json"))
    shard = min(newest.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)


def fired(directory: Path, fault: str) -> dict[str, Any] | None:
    """The record of a fault that was fired; None if it was not."""
    try:
        record: dict[str, Any] = json.loads((directory / RUN_DIR / "faults" / f"{fault}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record
