"""The agents of a cell, all in one process: what workers.agent does for a rank, less what only Ray or time can do.

They fork ranks through the host, as an agent does through its zygote, say what ranks say, kill what they are told to,
and note each commit that ranks were told of: the witness's own record of what was acknowledged.
"""

import contextlib
import json
import os
import select
import signal
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import cloudpickle

from chaos.matrix.job import train_loop
from chaos.matrix.wires import SocketLink, ask
from workers import last_words, processes
from workers.forks import ForkedRank
from workers.heartbeat import HeartbeatPage
from workers.keeper import keeper_address
from workers.messages import (
    AgentJoined,
    AskDraining,
    Command,
    FirstStep,
    KillRank,
    RankError,
    RankExited,
    RankFinished,
    RankReady,
    RankRestored,
    RankStarted,
    Report,
    Reported,
    RestoreFailed,
    SaveOutcome,
    StandbyLost,
    StartRank,
)
from workers.orders import LoopSettings, RankOrders
from workers.processes import ProcessId
from workers.wire import Channel, channel_pair

ACKNOWLEDGED_FILE = "acknowledged.jsonl"
_POLL_SECONDS = 0.02
_LOST_AFTER_SECONDS = 60.0


@dataclass(slots=True)
class Agent:
    """One rank's. `node`: where its keeper is."""

    rank: int
    node: str
    id: str
    link: Any = None
    standby: ForkedRank | None = None
    current: ForkedRank | None = None
    finished: RankFinished | None = None
    exited: RankExited | None = None
    reports_done: int = 0
    commands: list[Command] = field(default_factory=list)


class Agents:
    """Serves until the host ends its process. `host`: forks ranks, see host.py."""

    def __init__(
        self, *, host: Channel, address: str, driver: str, settings: LoopSettings, nodes: tuple[str, ...], seed: int
    ) -> None:
        self._host = host
        self._address = address
        self._driver = driver
        self._settings = settings
        self._group = uuid.uuid4().hex
        self._payload = cloudpickle.dumps((train_loop, {"seed": seed}))
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._acknowledged = (settings.run_dir.parent / ACKNOWLEDGED_FILE).open("a", buffering=1)
        self._agents = [
            Agent(rank=rank, node=node, id=f"{driver}/agent-{uuid.uuid4().hex[:8]}") for rank, node in enumerate(nodes)
        ]
        self._tokens = 0
        for agent in self._agents:
            self._fork(agent)
            agent.link = SocketLink(
                address,
                agent.id,
                introduce=lambda agent=agent: self._introduce(agent),  # type: ignore[misc]
                on_command=lambda command, agent=agent: self._queue(agent, command),  # type: ignore[misc]
                on_lost=lambda _reason: None,
                lost_after_seconds=_LOST_AFTER_SECONDS,
            )
        for agent in self._agents:
            agent.link.start()
        threading.Thread(target=self._watch_outcome, daemon=True).start()

    def serve(self) -> None:
        while True:
            ranks = {
                rank.channel.fileno(): (agent, rank)
                for agent in self._agents
                for rank in (agent.current, agent.standby)
                if rank is not None and rank.channel.fileno() >= 0
            }
            poller = select.poll()
            for fd in (self._host.fileno(), self._wake_read, *ranks):
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll():
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    self._obey()
                elif fd == self._host.fileno():
                    received = self._host.receive()
                    if received is None:
                        os._exit(0)
                    self._from_host(*received)
                elif ranks[fd][1].channel.fileno() == fd:
                    self._from_rank(*ranks[fd])

    # ------------------------------------------------------------ the coordinator

    def _queue(self, agent: Agent, command: Command) -> None:
        with self._lock:
            agent.commands.append(command)
        os.write(self._wake_write, b"w")

    def _obey(self) -> None:
        with self._lock:
            queued = [(agent, agent.commands) for agent in self._agents]
            for agent in self._agents:
                agent.commands = []
        for agent, commands in queued:
            for command in commands:
                match command:
                    case StartRank():
                        self._start(agent, command)
                    case KillRank():
                        current = agent.current
                        if current is not None and (current.generation or 0) <= command.generation:
                            current.kill_on_order()
                    case SaveOutcome():
                        self._outcome(agent, command)
                    case Report() | AskDraining():
                        agent.reports_done = command.number
                        agent.link.tell(Reported(agent=agent.id, number=command.number))

    def _outcome(self, agent: Agent, outcome: SaveOutcome) -> None:
        if outcome.committed:
            line = {"rank": agent.rank, "at": time.time(), "generation": outcome.generation, "step": outcome.step}
            self._acknowledged.write(json.dumps(line) + "\n")
        if agent.current is not None and agent.current.generation == outcome.generation:
            with contextlib.suppress(OSError):
                agent.current.channel.send("save_outcome", **asdict(outcome))

    def _introduce(self, agent: Agent) -> AgentJoined:
        current, standby = agent.current, agent.standby
        return AgentJoined(
            agent=agent.id,
            group=self._group,
            rank=agent.rank,
            local_rank=sum(other.node == agent.node for other in self._agents[: agent.rank]),
            world_size=len(self._agents),
            node=agent.node,
            node_ip="127.0.0.1",
            pid=os.getpid(),
            start_ticks=processes.start_ticks(os.getpid()) or 0,
            ready=standby is not None and standby.ready,
            store_port=standby.store_port if standby else 0,
            generation=current.generation if current else None,
            rank_process=current.process if current else None,
            reports_queued=agent.reports_done,
            reports_done=agent.reports_done,
            finished=agent.finished,
            exited=agent.exited,
        )

    def _watch_outcome(self) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                outcome = ask(self._address, "outcome")
                if outcome.ended:
                    self._host.send("over", error=outcome.error, step=outcome.step, generation=outcome.generation)
                    return
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------ ranks

    def _fork(self, agent: Agent) -> None:
        ours, theirs = channel_pair()
        heartbeat_fd, last_words_fd = HeartbeatPage.create_fd(), last_words.create_fd()
        payload_fd = os.memfd_create("payload", os.MFD_CLOEXEC)  # of this rank alone: readers share its position
        os.write(payload_fd, self._payload)
        self._tokens += 1
        agent.standby = ForkedRank(
            token=self._tokens,
            directory=self._settings.run_dir,
            channel=ours,
            heartbeat=HeartbeatPage(heartbeat_fd),
            last_words_fd=last_words_fd,
        )
        self._host.send(
            "fork",
            fds=(theirs.fileno(), heartbeat_fd, payload_fd, last_words_fd),
            token=self._tokens,
            rank=agent.rank,
        )
        theirs.close()
        os.close(heartbeat_fd)
        os.close(payload_fd)

    def _start(self, agent: Agent, command: StartRank) -> None:
        while agent.standby is not None and agent.standby.process is None:
            # It was ready, and ordered to start, sooner than the host's word of it came.
            received = self._host.receive()
            if received is None:
                os._exit(0)
            self._from_host(*received)
        rank = agent.standby
        if rank is None or rank.process is None or not rank.may_start(command) or agent.current is not None:
            agent.link.tell(_exit(agent, command.generation, 0, -signal.SIGKILL, None))
            return
        agent.standby, agent.current, agent.finished = None, rank, None
        rank.generation = command.generation
        orders = RankOrders(
            **{item.name: getattr(self._settings, item.name) for item in fields(LoopSettings)},
            generation=command.generation,
            rank=command.rank,
            local_rank=command.local_rank,
            local_world_size=sum(other.node == agent.node for other in self._agents),
            world_size=command.world_size,
            threads=1,
            store_host=command.store_host,
            store_port=command.store_port,
            keeper_address=keeper_address(self._settings.run, self._driver, agent.node),
            restore=command.restore,
            snapshot_every_steps=command.snapshot_every_steps,
            tuned_save_every_steps=command.tuned_save_every_steps,
            skip=command.skip,
        )
        with contextlib.suppress(OSError):
            rank.channel.send("start", orders=orders.to_json())
        agent.link.tell(RankStarted(agent=agent.id, generation=command.generation, process=rank.process))

    def _from_host(self, message: dict[str, Any], fds: list[int]) -> None:
        ranks = [(agent, rank) for agent in self._agents for rank in (agent.current, agent.standby) if rank]
        if message["kind"] == "forked":
            rank = next(rank for _, rank in ranks if rank.token == message["token"])
            rank.process = ProcessId(pid=message["pid"], start_ticks=message["start_ticks"])
            rank.pidfd = fds[0]
            return
        for agent, rank in ranks:
            if rank.process is not None and rank.process.pid == message["pid"]:
                rank.kill()
                while self._from_rank(agent, rank):
                    continue
                if rank is agent.current:
                    agent.current = None
                    agent.exited = _exit(agent, rank.generation or 0, message["pid"], message["code"], rank)
                    agent.link.tell(agent.exited)
                else:
                    agent.standby = None
                    agent.link.tell(StandbyLost(agent=agent.id))
                rank.close()
                if agent.standby is None:
                    self._fork(agent)

    def _from_rank(self, agent: Agent, rank: ForkedRank) -> bool:
        message = rank.receive()
        if message is None:
            return False
        who: dict[str, Any] = {"agent": agent.id, "generation": rank.generation or 0}
        match message.pop("kind"):
            case "ready":
                rank.ready, rank.store_port = True, message["store_port"]
                agent.link.tell(RankReady(agent=agent.id, store_port=rank.store_port))
            case "restored":
                agent.link.tell(RankRestored(**who, **message))
            case "restore_failed":
                agent.link.tell(RestoreFailed(**who, **message))
            case "first_step":
                agent.link.tell(FirstStep(**who, **message))
            case "finished":
                agent.finished = RankFinished(**who, **message)
                agent.link.tell(agent.finished)
            case "error":
                rank.error = RankError(**message)
        return True


def _exit(agent: Agent, generation: int, pid: int, code: int, rank: ForkedRank | None) -> RankExited:
    return RankExited(
        agent=agent.id,
        generation=generation,
        pid=pid,
        exit_code=code,
        at=time.time(),
        ordered=rank is not None and rank.kill_ordered and code == -signal.SIGKILL,
        step=rank.heartbeat.read().step if rank is not None else -1,
        error=rank.error if rank is not None else None,
    )


def acknowledged(directory: Path) -> list[dict[str, Any]]:
    """What ranks were told to be committed, oldest first; a line that its writer could not finish is left out."""
    try:
        lines = (directory / ACKNOWLEDGED_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]
