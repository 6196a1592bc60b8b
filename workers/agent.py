"""The agent: the Ray Train worker itself, one a rank. It holds the rank's resources and does what the coordinator says.

It never imports torch, never raises, and stays while ranks come and go: a rank is forked from its zygote, ahead of time, and
waits for orders. Faults survived: the rank dies or exits in any way (told with its exit status, at once); the coordinator is
restarted (the agent introduces itself again); the zygote dies (told as the end of the agent, which Ray then replaces). An error that
must end the run is returned, not raised, since Ray would retry what is raised.
"""

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
import ray.train

from workers import processes
from workers.heartbeat import HeartbeatPage
from workers.keeper import keeper_address
from workers.link import Link
from workers.messages import (
    AgentFailed,
    AgentJoined,
    Command,
    Finish,
    KillRank,
    RankError,
    RankExited,
    RankFinished,
    RankProgress,
    RankReady,
    RankReport,
    RankRestored,
    RankStarted,
    Report,
    RestoreFailed,
    SaveOutcome,
    StartRank,
)
from workers.orders import LoopSettings, RankOrders
from workers.processes import ProcessId
from workers.reporter import Reporter
from workers.wire import Channel, channel_pair

logger = logging.getLogger("lastgood")

_PROGRESS_SECONDS = 0.2
_LOST_AFTER_SECONDS = 60.0
_FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the driver gives every agent. `payload`: the pickled loop and its configuration, opened by ranks only."""

    run: str
    driver: str
    coordinator: str
    settings: LoopSettings
    preload: tuple[str, ...]
    payload: bytes


def agent_main(config: dict[str, AgentConfig]) -> dict[str, Any]:
    """The function that Ray Train runs on each worker."""
    return Agent(config["agent"]).run()


@dataclass(slots=True)
class _Rank:
    """A forked rank; a standby until it has a generation."""

    token: int
    channel: Channel
    heartbeat: HeartbeatPage
    process: ProcessId | None = None
    pidfd: int = -1
    ready: bool = False
    store_port: int = 0
    generation: int | None = None
    kill_ordered: bool = False
    error: RankError | None = None
    told_step: int = -1

    def close(self) -> None:
        self.channel.close()
        self.heartbeat.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Agent:
    """One thread waits for the zygote, the ranks and a wake-up pipe; the link's threads only queue commands."""

    def __init__(self, config: AgentConfig) -> None:
        context = ray.train.get_context()
        self._config = config
        self._id = f"{config.driver}/agent-{uuid.uuid4().hex[:12]}"
        self._rank_number = context.get_world_rank()
        self._local_rank = context.get_local_rank()
        self._local_world_size = context.get_local_world_size()
        self._world_size = context.get_world_size()
        placement_group = ray.util.get_current_placement_group()
        self._group = placement_group.id.hex() if placement_group else "none"
        self._node = ray.get_runtime_context().get_node_id()
        self._node_ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
        self._lock = processes.RunLock(config.run, config.driver)
        self._payload_fd = _memfd("lastgood-loop", config.payload)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._commands: list[Command] = []
        self._commands_lock = threading.Lock()
        self._standby: _Rank | None = None
        self._current: _Rank | None = None
        self._dying: list[_Rank] = []
        self._finished: RankFinished | None = None
        self._next_token = 0
        self._last_report: int | None = None
        self._lost: str | None = None
        self._zygote_ready = False
        self._reporter = Reporter(lambda event: self._link.tell(event), self._id)
        self._zygote, self._zygote_process = self._start_zygote()
        self._link = Link(
            config.coordinator,
            self._id,
            introduce=self._introduce,
            on_command=self._queue,
            on_lost=self._coordinator_lost,
            lost_after_seconds=_LOST_AFTER_SECONDS,
        )

    def run(self) -> dict[str, Any]:
        """Serve until told to finish; what it returns is the same for every rank."""
        self._link.start()
        try:
            while self._last_report is None and self._lost is None:
                if not self._wait():
                    self._link.tell(AgentFailed(agent=self._id, message="its zygote ended"))
                    self._link.flush(_FLUSH_SECONDS)
                    return {"error": "the zygote ended"}
            if self._last_report is not None and not self._reporter.wait_until_done(self._last_report):
                logger.warning("lastgood: %s", "not every commit was reported to Ray")
            return {"error": self._lost}
        finally:
            self._shut_down()

    # ------------------------------------------------------------ zygote

    def _start_zygote(self) -> tuple[Channel, subprocess.Popen[bytes]]:
        ours, theirs = channel_pair()
        environment = {
            **os.environ,
            # One OpenMP operation in the zygote would make every forked rank hang at its first.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Ask NVML whether there is a GPU: asking the driver would open it, and forked ranks could not use it.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # The allocator of pyarrow starts a thread when it is imported.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "workers.zygote",
                str(theirs.fileno()),
                ",".join(self._config.preload),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno(), self._lock.fd],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        return ours, process

    def _fork_standby(self) -> None:
        ours, theirs = channel_pair()
        heartbeat_fd = HeartbeatPage.create_fd()
        self._next_token += 1
        self._standby = _Rank(token=self._next_token, channel=ours, heartbeat=HeartbeatPage(heartbeat_fd))
        self._zygote.send("fork", fds=(theirs.fileno(), heartbeat_fd, self._payload_fd), token=self._next_token)
        theirs.close()
        os.close(heartbeat_fd)

    def _from_zygote(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["kind"]:
            case "ready":
                self._zygote_ready = True
                self._fork_standby()
            case "failed":
                self._link.tell(AgentFailed(agent=self._id, message=message["message"]))
            case "forked":
                rank = next(rank for rank in self._ranks() if rank.token == message["token"])
                rank.process = ProcessId(pid=message["pid"], start_ticks=message["start_ticks"])
                rank.pidfd = fds[0]
            case "exited":
                self._rank_exited(message["pid"], message["code"], message["at"])

    # ------------------------------------------------------------ the waiting

    def _ranks(self) -> list[_Rank]:
        return [rank for rank in (self._current, self._standby, *self._dying) if rank is not None]

    def _wait(self) -> bool:
        """Wait for one round of messages; False when the zygote is gone."""
        poller = select.poll()
        poller.register(self._zygote, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        channels = {rank.channel.fileno(): rank for rank in self._ranks() if rank.channel.fileno() >= 0}
        for fd in channels:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(_PROGRESS_SECONDS * 1000):
            if fd == self._wake_read:
                self._obey_queued()
            elif fd == self._zygote.fileno():
                received = self._zygote.receive()
                if received is None:
                    return False
                self._from_zygote(*received)
            elif channels[fd].channel.fileno() == fd:  # else its exit was told in the same round
                self._from_rank(channels[fd])
        self._tell_progress()
        return True

    def _queue(self, command: Command) -> None:
        with self._commands_lock:
            self._commands.append(command)
        os.write(self._wake_write, b"c")

    def _obey_queued(self) -> None:
        os.read(self._wake_read, 4096)
        with self._commands_lock:
            commands, self._commands = self._commands, []
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case StartRank():
                self._start_rank(command)
            case KillRank():
                self._kill_rank(command.generation)
            case SaveOutcome():
                self._pass_outcome(command)
            case Report():
                self._reporter.queue(command)
            case Finish():
                self._last_report = command.last_report

    def _coordinator_lost(self, reason: str) -> None:
        self._lost = reason
        os.write(self._wake_write, b"l")

    # ------------------------------------------------------------ generations

    def _start_rank(self, command: StartRank) -> None:
        rank = self._standby
        if rank is None or not rank.ready or (self._current is not None and self._current.generation is not None):
            logger.warning("lastgood: no standby for generation %d", command.generation)
            return
        self._standby, self._current, self._finished = None, rank, None
        rank.generation = command.generation
        settings = self._config.settings
        orders = RankOrders(
            **{name: getattr(settings, name) for name in settings.__dataclass_fields__},
            generation=command.generation,
            rank=command.rank,
            local_rank=command.local_rank,
            local_world_size=self._local_world_size,
            world_size=command.world_size,
            threads=self._threads,
            store_host=command.store_host,
            store_port=command.store_port,
            keeper_address=keeper_address(self._config.run, self._config.driver, self._node),
            restore=command.restore,
        )
        rank.channel.send("start", orders=orders.to_json())
        assert rank.process is not None
        self._link.tell(RankStarted(agent=self._id, generation=command.generation, process=rank.process))

    def _kill_rank(self, generation: int) -> None:
        rank = self._current
        if rank is not None and rank.generation is not None and rank.generation <= generation:
            rank.kill_ordered = True
            if rank.process is not None:
                processes.kill_group(rank.process.pid)
        elif rank is None:
            self._tell_ready()

    def _rank_exited(self, pid: int, code: int, at: float) -> None:
        processes.kill_group(pid)  # what it leaves behind: loader workers and the sockets that they inherited
        rank = next((rank for rank in self._ranks() if rank.process is not None and rank.process.pid == pid), None)
        if rank is None:
            return
        while rank.channel.fileno() >= 0 and self._from_rank(rank):
            continue  # its last words: an error, or that it has finished
        if rank is self._current:
            self._current = None
            assert rank.generation is not None
            self._link.tell(
                RankExited(
                    agent=self._id,
                    generation=rank.generation,
                    pid=pid,
                    exit_code=code,
                    at=at,
                    ordered=rank.kill_ordered,
                    error=rank.error,
                )
            )
        elif rank is self._standby:
            self._standby = None
        if rank in self._dying:
            self._dying.remove(rank)
        rank.close()
        if self._standby is None and self._last_report is None:
            self._fork_standby()

    def _tell_ready(self) -> None:
        if self._standby is not None and self._standby.ready:
            self._link.tell(RankReady(agent=self._id, store_port=self._standby.store_port))

    # ------------------------------------------------------------ what ranks say

    def _from_rank(self, rank: _Rank) -> bool:
        """Take one message of a rank; False if there is none."""
        try:
            received = rank.channel.receive(0.0)
        except TimeoutError:
            return False
        if received is None:
            rank.channel.close()
            return False
        message = received[0]
        generation = rank.generation or 0
        match message["kind"]:
            case "ready":
                rank.ready, rank.store_port = True, message["store_port"]
                self._tell_ready()
            case "restored":
                self._link.tell(
                    RankRestored(
                        agent=self._id,
                        generation=generation,
                        checkpoint=message["checkpoint"],
                        step=message["step"],
                        seconds=message["seconds"],
                    )
                )
            case "restore_failed":
                self._link.tell(
                    RestoreFailed(
                        agent=self._id,
                        generation=generation,
                        reason=message["reason"],
                    )
                )
            case "first_step":
                self._tell_step(rank, message["step"], message["at"], first=True)
                if self._standby is None:
                    self._fork_standby()  # not earlier: it would slow down the start
            case "report":
                self._link.tell(
                    RankReport(
                        agent=self._id, generation=generation, step=message["step"], metrics=message["metrics"]
                    )
                )
            case "finished":
                self._finished = RankFinished(
                    agent=self._id,
                    generation=generation,
                    step=message["step"],
                    metrics=message["metrics"],
                    protected=message["protected"],
                )
                self._link.tell(self._finished)
            case "error":
                rank.error = RankError(
                    **{name: message[name] for name in ("type", "message", "traceback", "at", "exit_code")}
                )
        return True

    def _tell_progress(self) -> None:
        rank = self._current
        if rank is not None and rank.generation is not None:
            step = rank.heartbeat.read().step
            if step > rank.told_step >= 0:
                self._tell_step(rank, step, time.time(), first=False)

    def _tell_step(self, rank: _Rank, step: int, at: float, *, first: bool) -> None:
        rank.told_step = step
        loss = rank.heartbeat.read().loss
        self._link.tell(
            RankProgress(
                agent=self._id,
                generation=rank.generation or 0,
                step=step,
                loss=None if loss != loss else loss,
                at=at,
                first=first,
            )
        )

    def _pass_outcome(self, outcome: SaveOutcome) -> None:
        rank = self._current
        if rank is None or rank.generation != outcome.generation:
            return
        try:
            rank.channel.send(
                "save_outcome", step=outcome.step, committed=outcome.committed, reason=outcome.reason
            )
        except OSError:
            return  # it is dying, which the zygote tells

    # ------------------------------------------------------------ coming and going

    def _introduce(self) -> AgentJoined:
        current, standby = self._current, self._standby
        return AgentJoined(
            agent=self._id,
            group=self._group,
            rank=self._rank_number,
            local_rank=self._local_rank,
            world_size=self._world_size,
            node=self._node,
            node_ip=self._node_ip,
            pid=os.getpid(),
            ready=standby is not None and standby.ready,
            store_port=standby.store_port if standby else 0,
            generation=current.generation if current else None,
            rank_process=current.process if current else None,
            reports_queued=self._reporter.queued,
            reports_done=self._reporter.done,
            finished=self._finished,
        )

    def _shut_down(self) -> None:
        for rank in self._ranks():
            if rank.process is not None:
                processes.kill_group(rank.process.pid)
        self._link.flush(1.0)
        self._link.close()
        self._zygote.close()  # the zygote ends, and its ranks with it
        try:
            self._zygote_process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._zygote_process.kill()
            self._zygote_process.wait()
        for rank in self._ranks():
            rank.close()
        for fd in (self._payload_fd, self._wake_read, self._wake_write):
            os.close(fd)
        self._lock.close()


def _memfd(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    return fd
