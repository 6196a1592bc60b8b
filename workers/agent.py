"""The agent: the Ray Train worker itself, one a rank. It holds the rank's resources and does what the coordinator says.

It never imports torch, never raises, and stays while ranks come and go: a rank is forked ahead of time and waits for
orders. Faults survived: the rank dies or exits in any way (told with its exit status, at once); the coordinator is
restarted (the agent introduces itself again). What cannot be mended here (no zygote, a standby that never gets ready)
is told, and ends the run. An error that must end the run is returned, not raised, since Ray would retry what is
raised.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields
from typing import Any

import ray
import ray.train

from workers import processes, termination
from workers.forks import ForkedRank, ZygoteClient
from workers.keeper import keeper_address
from workers.link import Link
from workers.messages import (
    AgentFailed,
    AgentJoined,
    AskDraining,
    Command,
    DumpStacks,
    Finish,
    FirstStep,
    KillRank,
    Leave,
    RankError,
    RankExited,
    RankFinished,
    RankReady,
    RankReport,
    RankRestored,
    RankStarted,
    Report,
    RestoreFailed,
    SaveAt,
    SaveEvery,
    SaveOutcome,
    SaveRefused,
    StandbyLost,
    StartRank,
    Terminated,
)
from workers.observer import RankObserver
from workers.orders import LoopSettings, RankOrders
from workers.processes import ProcessId
from workers.reporter import Reporter

logger = logging.getLogger("lastgood")

_LOOK_SECONDS = 0.2
_LOST_AFTER_SECONDS = 60.0
_FLUSH_SECONDS = 10.0
_START_DEATHS_MAX = 3


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
    agent = Agent(config["agent"])
    try:
        return {"error": agent.run()}
    except AgentLeaves:
        raise
    except Exception as error:
        logger.exception("lastgood: the agent failed")
        agent.give_up(f"the agent failed: {type(error).__name__}: {error}")
        return {"error": str(error)}
    finally:
        agent.close()


class AgentLeaves(Exception):
    """Raised, since what is raised makes Ray Train start its workers anew."""


class Agent:
    """One thread waits for the zygote, the ranks and a wake-up pipe; the link's threads only queue commands."""

    def __init__(self, config: AgentConfig) -> None:
        context = ray.train.get_context()
        placement_group = ray.util.get_current_placement_group()
        self._config = config
        self._id = f"{config.driver}/agent-{uuid.uuid4().hex[:12]}"
        self._context = context
        self._rank_number = context.get_world_rank()
        self._group = placement_group.id.hex() if placement_group else "none"
        self._node = ray.get_runtime_context().get_node_id()
        self._node_ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._commands: list[Command] = []
        self._commands_lock = threading.Lock()
        self._standby: ForkedRank | None = None
        self._current: ForkedRank | None = None
        self._start_deaths = 0
        self._finished: RankFinished | None = None
        self._last_exit: RankExited | None = None
        self._last_report: int | None = None
        self._lost: str | None = None
        self._leaving = False
        self._terminated: Terminated | None = None
        self._lock = processes.RunLock(config.run, config.driver)
        self._observer = RankObserver(
            agent=self._id,
            rank=self._rank_number,
            run_dir=config.settings.run_dir,
            tell=lambda event: self._link.tell(event),
        )
        # First thing, since it takes seconds: joining goes on meanwhile.
        self._zygote = self._start_zygote()
        self._reporter = Reporter(lambda event: self._link.tell(event), self._id)
        self._link = Link(
            config.coordinator,
            self._id,
            introduce=self._introduce,
            on_command=self._queue,
            on_lost=self._coordinator_lost,
            lost_after_seconds=_LOST_AFTER_SECONDS,
        )

    def run(self) -> str | None:
        """Serve until told to finish; returns why it had to end otherwise."""
        self._link.start()
        while self._last_report is None and self._lost is None:
            self._wait()
            if self._leaving:
                raise AgentLeaves("this worker's place will be taken away")
        if self._last_report is not None and not self._reporter.wait_until_done(self._last_report):
            logger.warning("lastgood: not every commit was reported to Ray")
        return self._lost

    def give_up(self, message: str) -> None:
        """Tell the coordinator that there can be no rank here, which ends the run."""
        self._link.tell(AgentFailed(agent=self._id, message=message))
        self._link.flush(_FLUSH_SECONDS)
        self._lost = message

    def close(self) -> None:
        for rank in self._ranks():
            rank.kill()
        self._link.flush(1.0)
        self._link.close()
        self._zygote.close()
        for rank in self._ranks():
            rank.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._lock.close()
        processes.remove_node_dir(self._lock.path.parent)

    # ------------------------------------------------------------ waiting

    def _ranks(self) -> list[ForkedRank]:
        return [rank for rank in (self._current, self._standby) if rank is not None]

    def _wait(self) -> None:
        """Wait for one round of messages."""
        poller = select.poll()
        poller.register(self._zygote.channel, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        if (sigterm_fd := termination.fd()) is not None:
            poller.register(sigterm_fd, select.POLLIN)
        ranks = {rank.channel.fileno(): rank for rank in self._ranks() if rank.channel.fileno() >= 0}
        for fd in ranks:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(_LOOK_SECONDS * 1000):
            if fd == self._wake_read:
                self._obey_queued()
            elif fd == sigterm_fd:
                self._tell_terminated()
            elif fd == self._zygote.channel.fileno():
                received = self._zygote.channel.receive()
                if received is None:
                    self._zygote_ended()
                    return
                self._from_zygote(*received)
            elif ranks[fd].channel.fileno() == fd:  # else its end was told in this round
                self._from_rank(ranks[fd])
        if self._current is not None:
            self._observer.look(self._current)

    def _queue(self, command: Command) -> None:
        with self._commands_lock:
            self._commands.append(command)
        self._wake()

    def _coordinator_lost(self, reason: str) -> None:
        self._lost = reason
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the agent is closing
            os.write(self._wake_write, b"w")

    def _obey_queued(self) -> None:
        os.read(self._wake_read, 4096)
        with self._commands_lock:
            commands, self._commands = self._commands, []
        for command in commands:
            match command:
                case StartRank():
                    self._start_rank(command)
                case KillRank():
                    self._kill_rank(command.generation)
                case DumpStacks():
                    if self._current is not None:
                        self._observer.dump_stacks(self._current, command)
                case SaveOutcome():
                    self._pass_on(command.generation, "save_outcome", command)
                case SaveAt():
                    self._pass_on(command.generation, "save_at", command)
                case SaveEvery():
                    self._pass_on(command.generation, "save_every", command)
                case Report() | AskDraining():
                    self._reporter.queue(command)
                case Leave():
                    self._leaving = True
                case Finish():
                    self._last_report = command.last_report

    # ------------------------------------------------------------ generations

    def _start_rank(self, command: StartRank) -> None:
        rank = self._standby
        if rank is None or rank.process is None or not rank.may_start(command) or self._current is not None:
            # It has died since it was told to be ready.
            code, now = -signal.SIGKILL, time.time()
            self._link.tell(
                RankExited(agent=self._id, generation=command.generation, pid=0, exit_code=code, at=now, ordered=False)
            )
            return
        self._standby, self._current, self._finished = None, rank, None
        rank.generation = command.generation
        self._observer.rank_begins()
        settings = {item.name: getattr(self._config.settings, item.name) for item in fields(LoopSettings)}
        orders = RankOrders(
            **settings,
            generation=command.generation,
            rank=command.rank,
            local_rank=command.local_rank,
            local_world_size=self._context.get_local_world_size(),
            world_size=command.world_size,
            threads=self._threads,
            store_host=command.store_host,
            store_port=command.store_port,
            keeper_address=keeper_address(self._config.run, self._config.driver, self._node),
            restore=command.restore,
            snapshot_every_steps=command.snapshot_every_steps,
            tuned_save_every_steps=command.tuned_save_every_steps,
            skip=command.skip,
        )
        with contextlib.suppress(OSError):  # it has just died, which the zygote tells
            rank.channel.send("start", orders=orders.to_json())
        self._observer.follow(rank)
        self._link.tell(RankStarted(agent=self._id, generation=command.generation, process=rank.process))

    def _kill_rank(self, generation: int) -> None:
        rank = self._current
        if rank is not None and rank.generation is not None and rank.generation <= generation:
            rank.kill_on_order()

    def _pass_on(self, generation: int, kind: str, command: SaveOutcome | SaveAt | SaveEvery) -> None:
        """To the rank, if it is still the generation's."""
        rank = self._current
        if rank is not None and rank.generation == generation:
            with contextlib.suppress(OSError):  # it is dying, which the zygote tells
                rank.channel.send(kind, **asdict(command))

    def _tell_terminated(self) -> None:
        if termination.received() and self._terminated is None:
            self._terminated = Terminated(agent=self._id, generation=None, at=time.time())
            self._link.tell(self._terminated)

    # ------------------------------------------------------------ the zygote

    def _start_zygote(self) -> ZygoteClient:
        self._zygote_ready = False
        return ZygoteClient(
            preload=self._config.preload,
            payload=self._config.payload,
            inherited_fd=self._lock.fd,
            directory=self._lock.path.parent,
        )

    def _zygote_ended(self) -> None:
        """Its ranks died with it; a new one is started, unless several could not even get ready."""
        code = self._zygote.close()
        if not self._zygote_ready:
            self._start_deaths += 1
            if self._start_deaths >= _START_DEATHS_MAX:
                self.give_up(
                    f"{_START_DEATHS_MAX} zygotes in a row, which fork ranks, ended while they were preloading, the "
                    f"last one with exit code {code}; see Ray's worker log"
                )
                return
        for rank in self._ranks():
            if rank.process is not None:
                self._exited(rank.process.pid, -signal.SIGKILL, time.time())
        self._standby = None
        self._zygote = self._start_zygote()

    def _from_zygote(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["kind"]:
            case "ready":
                self._zygote_ready = True
                self._standby = self._zygote.fork()
            case "failed":
                self.give_up(message["message"])
            case "forked":
                rank = next(rank for rank in self._ranks() if rank.token == message["token"])
                rank.process = ProcessId(pid=message["pid"], start_ticks=message["start_ticks"])
                rank.pidfd = fds[0]
            case "exited":
                self._exited(message["pid"], message["code"], message["at"])

    def _exited(self, pid: int, code: int, at: float) -> None:
        rank = next((rank for rank in self._ranks() if rank.process is not None and rank.process.pid == pid), None)
        if rank is None:
            return
        rank.kill()  # what it leaves behind: loader workers and the sockets that they inherited
        while self._from_rank(rank):
            continue  # its last words
        if rank is self._current:
            self._current = None
            self._last_exit = self._observer.exited(rank, pid=pid, code=code, at=at)
            self._link.tell(self._last_exit)
        else:
            self._standby = None
            self._link.tell(StandbyLost(agent=self._id))
            self._start_deaths += 1
        last_words = rank.last_words()
        rank.close()
        if self._start_deaths >= _START_DEATHS_MAX:
            reason = rank.error.traceback if rank.error else f"exit code {code}\n{last_words}"
            self.give_up(f"{_START_DEATHS_MAX} ranks in a row died before they could start: {reason}")
        elif self._standby is None and self._last_report is None:
            self._fork_standby()

    def _fork_standby(self) -> None:
        with contextlib.suppress(OSError):  # the zygote has just ended, which is told next
            self._standby = self._zygote.fork()

    # ------------------------------------------------------------ what ranks say

    def _from_rank(self, rank: ForkedRank) -> bool:
        """Take one message of a rank; False if there is none."""
        message = rank.receive()
        if message is None:
            return False
        who: dict[str, Any] = {"agent": self._id, "generation": rank.generation or 0}
        match message.pop("kind"):
            case "ready":
                rank.ready, rank.store_port, self._start_deaths = True, message["store_port"], 0
                self._link.tell(RankReady(agent=self._id, store_port=rank.store_port))
            case "restored":
                self._link.tell(RankRestored(**who, **message))
            case "restore_failed":
                self._link.tell(RestoreFailed(**who, **message))
            case "first_step":
                rank.stepped, rank.told_step = True, message["step"] - 1
                self._link.tell(FirstStep(**who, **message))
                if self._standby is None:
                    self._fork_standby()  # not earlier: it would slow down the start
            case "report":
                self._link.tell(RankReport(**who, **message))
            case "save_refused":
                self._link.tell(SaveRefused(**who, **message))
            case "terminated" if rank is self._current:
                self._link.tell(Terminated(**who, **message))
            case "finished":
                self._finished = RankFinished(**who, **message)
                self._link.tell(self._finished)
            case "error":
                rank.error = RankError(**message)
        return True

    def _introduce(self) -> AgentJoined:
        current, standby = self._current, self._standby
        return AgentJoined(
            agent=self._id,
            group=self._group,
            rank=self._rank_number,
            local_rank=self._context.get_local_rank(),
            world_size=self._context.get_world_size(),
            node=self._node,
            node_ip=self._node_ip,
            pid=os.getpid(),
            start_ticks=processes.start_ticks(os.getpid()) or 0,
            ready=standby is not None and standby.ready,
            store_port=standby.store_port if standby else 0,
            generation=current.generation if current else None,
            rank_process=current.process if current else None,
            reports_queued=self._reporter.queued,
            reports_done=self._reporter.done,
            asked_last=self._reporter.asked_last,
            finished=self._finished,
            exited=self._last_exit,
            terminated=self._terminated,
        )
