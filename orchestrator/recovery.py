"""From a failure to the next generation: what to restore, the generation's file, and how a failure is put into
words."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.archive import GENERATIONS_DIR, LineageMoved, RunArchive
from orchestrator.decide import ladder, lineage
from orchestrator.decide.budget import FailureBudget, Retry, Stop
from orchestrator.decide.failure import Cause, Failure
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, Source
from orchestrator.decide.probation import Probation
from orchestrator.observe.ledger import read_ledger
from orchestrator.observe.report import StopReport
from orchestrator.outcome import Outcome
from workers import failpoint
from workers.checkpoint.store import Store
from workers.data.course import BatchId
from workers.errors import Fenced

logger = logging.getLogger("lastgood")

_TRIES_MAX = 10
_STORAGE_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The new generation, all generations with it, and the newer rungs that were not taken."""

    record: GenerationRecord
    generations: Sequence[GenerationRecord]
    passed: Sequence[tuple[str, str]]


def wait_for_storage(store: Store, timeout_seconds: float) -> None:
    """Until what the run made there can be looked at: a coordinator that fails to start is not started again.

    Returns also when the time is over; what needs the directory then says what is wrong.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            if store.was_made(GENERATIONS_DIR):
                return
            problem = "it is not there"
        except OSError as error:
            problem = str(error)
        logger.warning("lastgood: waiting for %s: %s", store.place(GENERATIONS_DIR), problem)
        time.sleep(_STORAGE_POLL_SECONDS)


def current_generation(archive: RunArchive, driver: str) -> GenerationRecord | None:
    """The highest generation, if this driver created it: then the coordinator was restarted in the middle of a run."""
    highest = lineage.current(archive.scan(manifests=False, fresh=False).generations)
    return highest if highest is not None and highest.driver == driver else None


def create_generation(
    archive: RunArchive,
    *,
    run_dir: Path,
    committed: Collection[str],
    begun: Collection[int],
    driver: str,
    reason: str,
    world_size: int,
    skip: Collection[BatchId],
    suspects: Mapping[str, str],
    memory: MemorySet | None,
    on_quarantine: Callable[[str, str], None],
    clock: Callable[[], float] = time.time,
) -> Created:
    """Choose the rung to restore and create the next generation's file.

    `committed`: names that the ledger knows as committed and not deleted. `begun`: generations that it knows. `skip`:
    batches to pass over, beside those that earlier generations did. `suspects`: states on probation, with reasons; if
    one is passed over, that is the generation's reason. `memory`: the set in memory that could be restored.
    `on_quarantine(name, reason)` is called for each rung that is found damaged, also if no generation comes of it.
    Raises NothingVerifies if there is no good rung, Fenced if another driver has taken over.
    """
    refused: ladder.NothingVerifies | None = None
    for _ in range(_TRIES_MAX):
        failpoint.hit("restore.choose", reason=reason)
        selection = archive.select(committed, suspects=suspects, memory=memory, begun=begun)
        choice, scan = selection.choice, selection.scan
        for name, why in selection.newly_quarantined.items():
            on_quarantine(name, why)
        if isinstance(choice, ladder.NothingVerifies):
            # Another driver may have committed and deleted while this one looked: so twice in a row, or it is no word.
            if choice == refused:
                raise choice.error(str(run_dir))
            refused = choice
            continue
        parent, generation, step, source = _origin(choice)
        passed = () if isinstance(choice, ladder.Fresh) else choice.passed
        record = GenerationRecord(
            number=scan.next_number,
            driver=driver,
            parent=parent,
            parent_generation=generation,
            restored_step=step,
            source=source,
            reason="probation" if _passes_over(passed, suspects) else reason,
            created_at=clock(),
            world_size=world_size,
            skip=tuple(sorted({*skip, *(batch for earlier in scan.generations for batch in earlier.skip)})),
            unfinished=choice.unfinished if isinstance(choice, ladder.Fresh) else (),
        )
        try:
            archive.create_generation(record, seen=scan)
        except LineageMoved as moved:
            logger.warning("lastgood: generation %d is void, trying the next one: %s", record.number, moved)
            continue
        return Created(
            record=record,
            generations=(*scan.generations, record),
            passed=passed,
        )
    raise LineageMoved(f"the lineage in {run_dir} moved {_TRIES_MAX} times in a row: another driver is at work")


def origin_name(record: Mapping[str, Any]) -> str | None:
    """What probation calls the state that a generation, given as its record's fields, began from."""
    parent: str | None = record["parent"]
    if record["source"] == "memory" and parent is None:
        return lineage.memory_name(record["parent_generation"], record["restored_step"])
    return parent


def _origin(choice: ladder.FromMemory | ladder.Restore | ladder.Fresh) -> tuple[str | None, int | None, int, Source]:
    """Parent, its generation, restored step and source of the generation that begins from this."""
    match choice:
        case ladder.FromMemory():
            return choice.parent, choice.memory.generation, choice.memory.step, "memory"
        case ladder.Restore():
            return choice.name, choice.generation, choice.step, "checkpoint"
        case ladder.Fresh():
            return None, None, 0, "fresh"


def _passes_over(passed: Iterable[tuple[str, str]], suspects: Mapping[str, str]) -> bool:
    """Whether one of the suspected states is among these rungs."""
    states = {lineage.state_of(name) for name in suspects}
    return any(lineage.state_of(name) in states for name, _ in passed)


def newest_committed(archive: RunArchive, begun: Collection[int] = ()) -> CheckpointRecord | None:
    """On the lineage. `begun`: see RunArchive.scan."""
    scan = archive.scan(begun=begun, manifests=False, fresh=False)
    return lineage.newest(scan.generations, scan.checkpoints)


def skipped_batches(ledger: Path) -> frozenset[BatchId]:
    """The batches that the ledger says are skipped, whichever driver decided it."""
    skips = (entry for entry in read_ledger(ledger) if entry["kind"] == "skip")
    return frozenset((epoch, batch) for entry in skips for epoch, batch in entry["batches"])


@dataclass(slots=True, kw_only=True)
class Before:
    """What happened to this driver before its coordinator was restarted. `judged`: the last generation that failed."""

    outcome: Outcome = field(default_factory=lambda: Outcome(ended=False))
    judged: int = 0
    agents: set[str] = field(default_factory=set)


def replay(ledger: Path, driver: str, budget: FailureBudget, probation: Probation) -> Before:
    """Read it from the ledger, and tell budget and probation of it."""
    before = Before()
    for entry in entries_of(driver, ledger):
        match entry["kind"]:
            case "generation":
                budget.generation_started(entry["restored_step"])
                probation.generation_started(origin_name({**entry, "parent": entry["checkpoint"]}))
            case "commit":
                budget.committed(entry["step"])
                probation.committed(entry["checkpoint"], entry["step"])
            case "agent":
                before.agents.add(entry["agent"])
            case "failure":
                before.judged = entry["generation"]
                judge(entry, budget, probation)
            # Another driver may write into the same ledger: of one that is fenced, or refused.
            case "stopped" if entry["driver"] == driver:
                before.outcome = Outcome(ended=True, error=entry["reason"], error_type=entry["error_type"])
            case "fenced" if entry["driver"] == driver:
                before.outcome = Outcome(ended=True, error=entry["reason"], error_type=Fenced.__name__)
    return before


def entries_of(driver: str, ledger: Path) -> Iterator[dict[str, Any]]:
    """What the ledger says happened under this driver."""
    mine = False
    for entry in read_ledger(ledger):
        if entry["kind"] == "coordinator":
            mine = entry["driver"] == driver
        if mine:
            yield entry


def protected_at(ledger: Path, driver: str) -> float:
    """When the newest state that is saved was the run's; when this driver began, if it has saved nothing."""
    times = [
        float(entry["snapshot_at"] if entry["kind"] == "commit" else entry["at"])
        for entry in entries_of(driver, ledger)
        if entry["kind"] == "commit" or (entry["kind"] == "coordinator" and not entry["resumed"])
    ]
    return max(times, default=time.time())


def judge(failure: Mapping[str, Any], budget: FailureBudget, probation: Probation) -> tuple[Retry | Stop, str | None]:
    """Tell both of a failure, as the ledger has it; the verdict, and the checkpoint that is on probation for it."""
    step, exit_code = max(failure["step"], 0), failure["exit_code"]
    if failure["restore_failed"] is not None:
        return budget.failure("restore_failed", step), None
    suspect = probation.failure(failure["cause"], step, exit_code)
    return budget.failure(failure["cause"], step, exit_code), suspect


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


_WITHOUT_EXIT = {
    "hang": "its standing still",
    "agent_lost": "the loss of its agent or node",
    "rank_lost": "the loss of its process",
    "corruption": "state that differs from its replicas'",
}


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


def stop_report(
    failure: Failure,
    reason: str,
    *,
    entry: Mapping[str, Any],
    run_dir: Path,
    checkpoint: str | None,
    suspects: Mapping[str, str],
) -> StopReport:
    """All that is known of why the run does not go on; `entry` is the failure's in the ledger."""
    first = failure.first
    return StopReport(
        run_dir=str(run_dir),
        reason=reason,
        failure=entry,
        ending=_ending(first),
        traceback=first.error.traceback if first.error else first.detail.get("stack"),
        pid=failure.exit.pid if failure.exit else 0,
        log=failure.exit.log if failure.exit else (),
        checkpoint=checkpoint,
        suspects=suspects,
    )


def _ending(cause: Cause) -> str:
    if cause.error is not None:
        return f"{cause.error.type}: {cause.error.message}"
    if cause.kind == "oom":
        return _out_of_memory(cause.detail)
    if cause.exit_code is None:
        return _WITHOUT_EXIT.get(cause.kind, cause.kind)
    if cause.exit_code < 0:
        return str(cause.detail.get("signal", f"signal {-cause.exit_code}"))
    return f"exit code {cause.exit_code}"


def _out_of_memory(detail: Mapping[str, Any]) -> str:
    killer = {"kernel": "the kernel", "ray": "Ray's memory monitor"}[detail["killer"]]
    memory = detail.get("memory")
    size = f"; it used {memory['rss_bytes'] / 2**20:.0f} MiB when last seen" if memory else ""
    return f"its being killed by {killer} for lack of memory{size}"
