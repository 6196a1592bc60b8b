"""From a failure to the next generation: what to restore, the generation's file, and how a failure is put into
words."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.archive import LineageMoved, RunArchive
from orchestrator.decide import ladder, lineage
from orchestrator.decide.budget import FailureBudget
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord
from orchestrator.decide.rendezvous import Cause, Failure
from orchestrator.observe.ledger import read_ledger
from orchestrator.outcome import Outcome

logger = logging.getLogger("lastgood")

_TRIES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The new generation, all generations with it, and the newer rungs that were not taken."""

    record: GenerationRecord
    generations: Sequence[GenerationRecord]
    passed: Sequence[tuple[str, str]]


def current_generation(archive: RunArchive, driver: str) -> GenerationRecord | None:
    """The highest generation, if this driver created it: then the coordinator was restarted in the middle of a run."""
    highest = lineage.current(archive.scan(manifests=False).generations)
    return highest if highest is not None and highest.driver == driver else None


def create_generation(
    archive: RunArchive,
    *,
    run_dir: Path,
    committed: Collection[str],
    driver: str,
    reason: str,
    world_size: int,
    on_quarantine: Callable[[str, str], None],
) -> Created:
    """Choose the rung to restore and create the next generation's file.

    `committed`: names that the ledger knows as committed and not deleted. `on_quarantine(name, reason)` is called for
    each rung that is found damaged, also if no generation comes of it. Raises NothingVerifies if there is no good rung,
    Fenced if another driver has taken over.
    """
    for _ in range(_TRIES_MAX):
        selection = archive.select(committed)
        choice, scan = selection.choice, selection.scan
        for name, why in selection.newly_quarantined.items():
            on_quarantine(name, why)
        if isinstance(choice, ladder.NothingVerifies):
            raise choice.error(str(run_dir))
        restore = choice if isinstance(choice, ladder.Restore) else None
        record = GenerationRecord(
            number=scan.next_number,
            driver=driver,
            parent=restore.name if restore else None,
            parent_generation=restore.generation if restore else None,
            restored_step=restore.step if restore else 0,
            source="checkpoint" if restore else "fresh",
            reason=reason,
            created_at=time.time(),
            world_size=world_size,
        )
        try:
            archive.create_generation(record, seen=scan)
        except LineageMoved as moved:
            logger.warning("lastgood: generation %d is void, trying the next one: %s", record.number, moved)
            continue
        return Created(
            record=record,
            generations=(*scan.generations, record),
            passed=restore.passed if restore else (),
        )
    raise LineageMoved(f"the lineage in {run_dir} moved {_TRIES_MAX} times in a row: another driver is at work")


def newest_committed(archive: RunArchive) -> CheckpointRecord | None:
    scan = archive.scan(manifests=False)
    return lineage.newest(scan.generations, scan.checkpoints)


def replay(ledger: Path, driver: str, budget: FailureBudget) -> Outcome:
    """Tell the budget what the ledger says happened to this driver before a restart; returns how the run stands."""
    outcome = Outcome(ended=False)
    mine = False
    for entry in read_ledger(ledger):
        if entry["kind"] == "coordinator":
            mine = entry["driver"] == driver
        if not mine:
            continue
        match entry["kind"]:
            case "generation":
                budget.generation_started(entry["restored_step"])
            case "commit":
                budget.committed(entry["step"])
            case "failure" if entry["restore_failed"] is None:
                budget.failure(entry["cause"], max(entry["step"], 0))
            case "stopped":
                outcome = Outcome(ended=True, error=entry["reason"], error_type=entry["error_type"])
    return outcome


def excluded_nodes(ledger: Path, driver: str) -> set[str]:
    """The nodes that this driver leaves out, by the ledger's word."""
    excluded: set[str] = set()
    mine = False
    for entry in read_ledger(ledger):
        match entry["kind"]:
            case "coordinator":
                mine = entry["driver"] == driver
            case "node_excluded" if mine and entry["left_out"]:
                excluded.add(entry["node"])
            case "nodes_taken_back":
                excluded.clear()
    return excluded


_WITHOUT_EXIT = {"agent_lost": "the loss of its agent or node", "rank_lost": "the loss of its process"}


def describe(failure: Failure) -> dict[str, Any]:
    """The ledger's fields of a failure; JSON values only."""
    first = failure.first
    return {
        "generation": failure.generation,
        "rank": first.rank,
        "cause": first.kind,
        "exit_code": first.exit_code,
        "failed_at": first.at,
        "step": failure.step,
        "error": f"{first.error.type}: {first.error.message}" if first.error else None,
        "echoes": [_echo(cause) for cause in failure.echoes],
        "detail": dict(first.detail),
    }


def _echo(cause: Cause) -> dict[str, Any]:
    return {"rank": cause.rank, "cause": cause.kind, "exit_code": cause.exit_code, "at": cause.at}


def stop_message(failure: Failure, reason: str) -> str:
    """The user's own traceback first, then what was first and why the run does not go on."""
    first = failure.first
    what = f"rank {first.rank} ended with {_ending(first)} after step {max(failure.step, 0)}"
    verdict = f"The run was stopped because {reason}; first cause: {what}."
    if first.error is None:
        return verdict
    return f"{first.error.traceback.rstrip()}\n\n{verdict}"


def _ending(cause: Cause) -> str:
    if cause.error is not None:
        return f"{cause.error.type}: {cause.error.message}"
    if cause.exit_code is None:
        return _WITHOUT_EXIT.get(cause.kind, cause.kind)
    return f"signal {-cause.exit_code}" if cause.exit_code < 0 else f"exit code {cause.exit_code}"
