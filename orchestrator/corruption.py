"""What follows when the ranks of a save do not hold alike what they must.

The save is refused before this (decide/commit.py). Here it is written down, checkpoints that may hold the same are
passed over, and the generation is ended: fresh ranks restore a checkpoint from when all were alike. Found at the same
step twice in a row, it is no stray bit but a machine or a loop that does it each time, and the run stops.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from orchestrator.archive import RunArchive
from orchestrator.decide import lineage, replicas
from orchestrator.decide.failure import Cause
from orchestrator.decide.orders import Corruption
from orchestrator.lifecycle import Lifecycle
from orchestrator.observe.ledger import read_ledger
from workers.checkpoint.digests import file_header
from workers.checkpoint.manifest import checkpoint_dir, shard_file
from workers.checkpoint.store import Store
from workers.errors import CheckpointDamaged

logger = logging.getLogger("lastgood")

_LISTED_MAX = 20


async def answer(life: Lifecycle, found: Corruption) -> None:
    """Record it, pass over what may hold it too, and end the generation, or the run."""
    nodes = _nodes(life, found)
    clause = replicas.describe(found.differences)
    logger.error("lastgood: step %d is not saved: %s", found.step, clause)
    reason = f"at step {found.step} of its generation {clause}, which were not compared when it was saved"
    try:
        repeated = is_repeated(read_ledger(life.ledger.path), found)
        bad, unproven = await asyncio.to_thread(_pass_over_suspects, life.archive, found, reason)
    except OSError as error:
        life.stop(
            f"at step {found.step} {clause}, and checkpoints that may hold the same could not be set aside: {error}",
            "EnvironmentProblem",
        )
        return
    detail = {
        "step": found.step,
        "tensors": list(dict.fromkeys(difference.what for difference in found.differences))[:_LISTED_MAX],
        "differences": len(found.differences),
        "odd": list(replicas.odd_ranks(found.differences)),
        "nodes": nodes,
        "unproven": unproven,
    }
    life.ledger.append("corruption", generation=found.generation, attempt=found.attempt, **detail)
    for name in bad:
        life.ledger.append("quarantine", checkpoint=name, reason=reason)
    if repeated:
        life.stop(_stop_message(found, clause, nodes), "TrainingFailed")
    elif found.generation == life.rendezvous.generation:
        rank = replicas.culprit(found.differences)
        cause = Cause(rank=rank, kind="corruption", exit_code=None, at=time.time(), detail=detail)
        await life.carry_out(life.rendezvous.fail(cause))


def is_repeated(entries: Iterable[dict[str, Any]], found: Corruption) -> bool:
    """Whether the corruption before this one was at the same step, in an earlier generation of this driver."""
    before = None
    for entry in entries:
        if entry["kind"] == "coordinator" and not entry["resumed"]:
            before = None  # another driver: something may have been repaired meanwhile
        elif entry["kind"] == "corruption" and entry["generation"] < found.generation:
            before = entry["step"]
    return before == found.step


def _nodes(life: Lifecycle, found: Corruption) -> dict[str, str]:
    """The node of each rank that is odd; of each holder, if nobody can tell which is."""
    ranks = {rank for difference in found.differences for rank in difference.odd or difference.holders}
    return {str(rank): member.joined.node for rank, member in sorted(life.rendezvous.members.items()) if rank in ranks}


def _pass_over_suspects(archive: RunArchive, found: Corruption, reason: str) -> tuple[tuple[str, ...], str | None]:
    """Put checkpoints that may hold the same into quarantine; returns those, and one that had to be spared."""
    scan = archive.scan(manifests=False)
    worlds = {record.number: record.world_size for record in scan.generations}
    # Of each set of holders, one that speaks for all: they had said the same, or it would not have been committed.
    speakers = {difference.holders[0] for difference in found.differences}
    compared = [
        replicas.Compared(
            name=record.name,
            generation=record.generation,
            said=_said(archive.store, record.name, speakers, worlds.get(record.generation, 0)),
        )
        for record in lineage.eligible(scan.generations, scan.checkpoints)
        if record.name not in scan.quarantined
    ]
    bad, unproven = replicas.suspects(found.differences, found.generation, compared)
    for name in bad:
        archive.quarantine(name, reason)
    return bad, unproven


def _said(store: Store, checkpoint: str, ranks: Iterable[int], world_size: int) -> dict[str, Any] | None:
    """What these ranks had said of their replicas; None if that cannot be read."""
    sets: list[Any] = []
    for rank in ranks:
        try:
            document = file_header(store, f"{checkpoint_dir(checkpoint)}/{shard_file(rank, world_size)}").document
        except (CheckpointDamaged, OSError):
            return None
        sets += document.get("replicas", {}).get("sets", [])
    return {"sets": sets}


def _stop_message(found: Corruption, clause: str, nodes: dict[str, str]) -> str:
    where = ", ".join(f"rank {rank} on node {node}" for rank, node in nodes.items())
    if replicas.odd_ranks(found.differences):
        advice = "test the memory and the GPU there, or leave that node out"
    else:
        advice = "test the memory and the GPUs of these nodes; with 3 or more replicas the odd one could be told"
    return (
        f"at step {found.step}, for the second time in a row, {clause} ({where}). A machine or the training loop does "
        f"this each time: {advice}; look for code that changes replicated parameters, or optimizer state, on one rank "
        f"alone. RecoveryConfig(check_replicas=False) turns the check off, but a checkpoint holds one rank's copy only"
    )
