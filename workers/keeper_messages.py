"""What keepers and the coordinator tell each other; see workers.messages for what holds of all messages."""

from dataclasses import dataclass, field
from typing import Any

from workers.checkpoint.manifest import ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshot:
    """A complete snapshot in a keeper's memory; its digest is known, and in its slot's header.

    `attempt`: the last one that the keeper was ordered to write of it, or 0. `durable`: it is due to be written; else
    it stays in memory, unless the run fails. `replicas` is what the rank said of them in its document; {} if nothing is
    to be compared. `finished`: the rank's loop had returned, which is known of a step only when it is saved once more.
    `copy_seconds`: how long the copy took; `stall_seconds`: how long the loop stood still for it.
    """

    rank: int
    generation: int
    step: int
    digest: str
    attempt: int = 0
    durable: bool = True
    replicas: dict[str, Any] = field(default_factory=dict)
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPersisted:
    """A keeper's receipt: the shard is durable and was read back. Identity, progress and replicas come from the shard's
    document; replicas is {} if nothing is to be compared."""

    rank: int
    generation: int
    step: int
    attempt: int
    shard: ShardRecord
    snapshot_at: float
    durable_seconds: float
    verify_seconds: float
    identity: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    replicas: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperJoined:
    """`copies`: of shards of other nodes. `host`, `port`: where other keepers reach this one."""

    keeper: str
    node: str
    pid: int
    snapshots: tuple[HeldSnapshot, ...]
    receipts: tuple[ShardPersisted, ...]
    copies: tuple[HeldSnapshot, ...] = ()
    host: str = ""
    port: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshotted:
    """`again`: the rank wants this step saved also if it is committed already, for it knows more of it now."""

    keeper: str
    snapshot: HeldSnapshot
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSkipped:
    """A rank had no free slot at a step at which it should have taken a snapshot; `durable`: one that is due to be
    written."""

    keeper: str
    rank: int
    generation: int
    step: int
    reason: str
    durable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """`transient`: another attempt may succeed. `no_space`: it may once something is deleted."""

    keeper: str
    rank: int
    generation: int
    step: int
    attempt: int
    error: str
    transient: bool
    no_space: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDrained:
    """The ranks of generations up to this one are gone, and all that they had told this keeper has been passed on,
    as far as it could be digested in time. `held`: all complete shards in its memory now, its ranks' and copies."""

    keeper: str
    generation: int
    held: tuple[HeldSnapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopied:
    """How sending a copy of this rank's shard to another keeper ended; `error` is None if it is there."""

    keeper: str
    rank: int
    generation: int
    step: int
    bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistOrder:
    """Write this rank's snapshot of `step` into the directory of that attempt."""

    rank: int
    world_size: int
    generation: int
    step: int
    attempt: int
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOrder:
    """Slots of `generation` that hold a step up to `upto_step`, except those in `keep`, may be used again; those of the
    steps in `spare` only for a snapshot that is due to be written and has no other."""

    generation: int
    upto_step: int
    keep: tuple[int, ...]
    spare: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """Send the shards of these ranks to the keeper at `host` and `port`, which also keeps what it has of the set of
    `keep_generation` and `keep_step`."""

    ranks: tuple[int, ...]
    generation: int
    step: int
    host: str
    port: int
    keep_generation: int
    keep_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies:
    """Copies that are older than this set are not needed any more."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGeneration:
    """Kill what is left of the rank groups of generations up to this one."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAgent:
    """To the keeper of its node: the agent says nothing any more; end its process, so that Ray replaces it."""

    pid: int
    start_ticks: int


KeeperEvent = (
    KeeperJoined | Snapshotted | SnapshotSkipped | ShardPersisted | PersistFailed | GenerationDrained | ShardCopied
)
KeeperCommand = PersistOrder | ReleaseOrder | CopyOrder | DropCopies | EndGeneration | KillAgent
