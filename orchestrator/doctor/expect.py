"""What saves and restores will cost at a given size, computed from speeds that were measured on one node.

Pure. State is taken to be spread evenly over the ranks, one keeper a node writes the shards of its ranks, and each
rank's shard is digested by a thread of its own, twice: as a whole and by tensor. With

    rank = state / ranks        node = rank x ranks on a node        copy = min(copy of one thread, copy of all / ranks)

    stall               rank / copy
    digest              2 x rank / hash, more where a node has fewer CPUs than ranks
    write               node / write + fsync of file and directory
    durable             stall + digest + write
    verified            durable + node / read back + digest
    restore, memory     digest + rank / copy
    restore, storage    node / read + rank / copy into fresh memory + digest + rank / copy
    recovery            restart of the ranks + restore
    memory              slots x node

Left out: what training takes of the same memory bandwidth, CPUs and storage meanwhile; the cost of a tensor, which
counts in states of many thousand small ones; the way from a GPU to the host; several streams to one storage, which may
together be faster than one. Storage that all nodes share gives each of them its full speed at best, and an equal part
of it at worst: hence spans.
"""

import math
from dataclasses import dataclass

# Measured by `make bench-recovery` with a state of a few MB, rounded up: a rank is killed, or Ray's worker below it.
RESTART_RANK_SECONDS = 0.3
RESTART_WORKER_SECONDS = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The run: bytes of its whole state, ranks in all and on one node, snapshots that each rank may hold."""

    state_bytes: int
    ranks: int
    ranks_per_node: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Of one node, in bytes a second; copy_all with all its CPUs. read_back: as saves are verified, past the page
    cache; read: as restores read. sync_seconds: fsync of a file and of a directory."""

    cpus: float
    copy: float
    copy_all: float
    copy_fresh: float
    hash: float
    write: float
    read_back: float
    read: float
    sync_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds if each node has the measured speed of the storage, and if all nodes have it together."""

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """stall_seconds: how long the loop stands still for a snapshot that is not overlapped with training.
    save_seconds: how long a save keeps the storage busy, so the shortest time between two that are both written.
    recovery_*: from a death until training goes on: with the state in memory, from storage, and from storage after
    Ray had to replace its workers."""

    nodes: int
    rank_bytes: int
    node_bytes: int
    memory_bytes: int
    stall_seconds: float
    durable_seconds: Span
    verified_seconds: Span
    save_seconds: Span
    recovery_memory_seconds: float
    recovery_storage_seconds: Span
    recovery_worker_seconds: Span


def expect(scale: Scale, speeds: Speeds) -> Expectation:
    """See the module's formulas."""
    on_node = min(scale.ranks, scale.ranks_per_node)
    nodes = math.ceil(scale.ranks / scale.ranks_per_node)
    rank_bytes = math.ceil(scale.state_bytes / scale.ranks)
    node_bytes = rank_bytes * on_node
    stall = rank_bytes / min(speeds.copy, speeds.copy_all / on_node)
    fresh = rank_bytes / min(speeds.copy_fresh, speeds.copy_all / on_node)
    digest = 2 * rank_bytes / (speeds.hash * min(1.0, speeds.cpus / on_node))

    def span(before: float, transfer_seconds: float) -> Span:
        return Span(least=before + transfer_seconds, most=before + transfer_seconds * nodes)

    write, read_back, read = node_bytes / speeds.write, node_bytes / speeds.read_back, node_bytes / speeds.read
    fixed = digest + speeds.sync_seconds
    restore = fresh + digest + stall
    return Expectation(
        nodes=nodes,
        rank_bytes=rank_bytes,
        node_bytes=node_bytes,
        memory_bytes=scale.slots * node_bytes,
        stall_seconds=stall,
        durable_seconds=span(stall + fixed, write),
        verified_seconds=span(stall + fixed + digest, write + read_back),
        save_seconds=span(fixed + digest, write + read_back),
        recovery_memory_seconds=RESTART_RANK_SECONDS + digest + stall,
        recovery_storage_seconds=span(RESTART_RANK_SECONDS + restore, read),
        recovery_worker_seconds=span(RESTART_WORKER_SECONDS + restore, read),
    )
