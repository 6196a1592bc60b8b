"""What agents, keepers and the coordinator tell each other.

Events go up and commands come down, each at least once and in order (workers.link). Every message that is about a
generation carries its number, so that a late one is recognised and dropped.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from workers.keeper_messages import KeeperCommand, KeeperEvent
from workers.memory_watch import MemorySeen
from workers.processes import ProcessId

# ---------------------------------------------------------------- from agents


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """An agent is there, for the first time or after the coordinator was restarted.

    `group` names the set of Ray Train workers that were started together. `generation` is the one whose rank runs now.
    `exited`: how the last one ended, which a coordinator that is gone may have been told.
    `asked_last`: the last number of the sequence of reports that was an AskDraining.
    """

    agent: str
    group: str
    rank: int
    local_rank: int
    world_size: int
    node: str
    node_ip: str
    pid: int
    start_ticks: int = 0
    ready: bool
    store_port: int
    generation: int | None = None
    rank_process: ProcessId | None = None
    reports_queued: int = 0
    reports_done: int = 0
    asked_last: int = 0
    finished: "RankFinished | None" = None
    exited: "RankExited | None" = None
    terminated: "Terminated | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """A fresh rank waits for its orders; `store_port` is where its TCPStore would listen (0 if it has none)."""

    agent: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyLost:
    """The fresh rank that waited is gone; `RankReady` comes again when there is another."""

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    agent: str
    generation: int
    process: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestored:
    """`source`: "fresh", "checkpoint" or "memory". `checkpoint`: None unless one was restored."""

    agent: str
    generation: int
    source: str
    checkpoint: str | None
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed:
    """The bytes are not what was saved: another rung has to be tried."""

    agent: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The rank has finished its first step of the generation, at Unix time `at`."""

    agent: str
    generation: int
    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPulse:
    """How a rank is, twice a second. `at` is the agent's monotonic clock, in seconds.

    From its heartbeat page (workers.heartbeat): step, phase, label, allowance_seconds, moves, loss, sequence and tick;
    `still_seconds` since the last sign of life; and `step_seconds` of the steps since the last pulse, of the last 64 at
    most. `stepped`: whether it has finished a step of this generation. `cpu_seconds` and `state` (R, S, D, T, ...) are
    the kernel's word on its process.
    """

    agent: str
    generation: int
    at: float
    step: int
    loss: float | None
    phase: str
    label: str
    allowance_seconds: float
    moves: int
    still_seconds: float
    step_seconds: tuple[float, ...]
    stepped: bool
    sequence: int
    tick: int
    cpu_seconds: float
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDumped:
    """The stacks of a rank's threads are in `file`, below the run directory; None, with the `problem`, if they are not.

    `where`: the place in the user's code, as far as it can be told. `in_collective`: whether the loop's thread waits in
    one; None if that cannot be told.
    """

    agent: str
    generation: int
    file: str | None
    where: str = ""
    in_collective: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What the loop passed to `session.report`."""

    agent: str
    generation: int
    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """The loop has returned and what it left to save is committed."""

    agent: str
    generation: int
    step: int
    metrics: dict[str, Any]
    protected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An exception in a rank. `exit_code` is 1 unless lastgood raised it: then it says whose fault it is.

    `cause` and `detail`: kind and details of the failure's cause, for one that is more than an exception.
    """

    type: str
    message: str
    traceback: str
    at: float
    exit_code: int
    cause: str = "exception"
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process is gone. `ordered`: the coordinator had asked for it while it still ran.

    `step`: the last one that it finished, -1 if that is not known. `log`: the last lines that it printed.
    `out_of_memory`: the kernel killed it for lack of memory. `detail`: what else is known of its end; JSON values.
    """

    agent: str
    generation: int
    pid: int
    exit_code: int
    at: float
    ordered: bool
    step: int = -1
    error: RankError | None = None
    log: tuple[str, ...] = ()
    out_of_memory: bool = False
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """How much memory a rank uses: should its agent be killed for it, nobody else could tell afterwards."""

    agent: str
    generation: int
    memory: MemorySeen


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed:
    """The agent cannot have ranks at all (its zygote could not preload)."""

    agent: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesDraining:
    """Nodes that will be taken away, at Unix time `deadline_at` (None if Ray does not say)."""

    nodes: tuple[str, ...]
    deadline_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    agent: str
    number: int
    error: str | None = None
    draining: NodesDraining | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """The agent (`generation` is None) or its rank was sent SIGTERM at Unix time `at`; it goes on for now."""

    agent: str
    generation: int | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRefused:
    """The rank had already finished `newest_step` when it was told to save `step`."""

    agent: str
    generation: int
    step: int
    newest_step: int


# ---------------------------------------------------------------- to agents


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """Restore what `generation` had reached after `step`: from the keepers' memory, or from a committed checkpoint.

    `checkpoint` is its name; with the source "memory" it is None, unless the same state is committed. `places`: where
    the shards lie in memory, as (host, port, ranks) of each keeper; nothing if all are with the rank's own.
    """

    source: Literal["checkpoint", "memory"]
    generation: int
    step: int
    checkpoint: str | None
    places: tuple[tuple[str, int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """`skip`: the global batches that are to be passed over, as (epoch, batch). `snapshot_every_steps`: after how many
    steps a snapshot is taken that stays in memory; None for none but saves. `tuned_save_every_steps`: after how many
    steps a checkpoint is saved, if that is not fixed."""

    generation: int
    rank: int
    local_rank: int
    world_size: int
    store_host: str
    store_port: int
    restore: RestoreOrder | None
    snapshot_every_steps: int | None = None
    tuned_save_every_steps: int | None = None
    skip: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """Kill the rank of `generation` and everything in its process group, and have a fresh one ready."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Write down where the threads of this generation's rank are; `name` becomes a part of the file's name."""

    generation: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """To the rank: a save was committed, or given up."""

    generation: int
    step: int
    committed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAt:
    """To the rank: save right after this step."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvery:
    """To the rank: from now on save after every so many steps; in the tier "memory" a snapshot that stays there, in
    "durable" one that is due to be written."""

    generation: int
    tier: Literal["memory", "durable"]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Call `ray.train.report`: the `number`-th of the run's sequence, the same on every agent."""

    number: int
    metrics: dict[str, Any]
    checkpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDraining:
    """Call `ray.train.get_preemption_info`: a number of the same sequence, since Ray has one barrier for both."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End with an error, so that Ray Train starts its workers elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Return, once report `last_report` is done."""

    last_report: int


AgentEvent = (
    AgentJoined
    | RankReady
    | StandbyLost
    | RankStarted
    | RankRestored
    | RestoreFailed
    | FirstStep
    | RankPulse
    | StacksDumped
    | RankReport
    | RankFinished
    | RankExited
    | RankMemory
    | AgentFailed
    | Reported
    | Terminated
    | SaveRefused
)
Event = AgentEvent | KeeperEvent
Command = (
    StartRank
    | KillRank
    | DumpStacks
    | SaveOutcome
    | SaveAt
    | SaveEvery
    | Report
    | AskDraining
    | Leave
    | Finish
    | KeeperCommand
)
Standing = Literal["member", "unknown", "stale"]
