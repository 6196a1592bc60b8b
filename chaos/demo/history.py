"""What one run directory says about its past: kills, what came after each, and which samples counted.

Everything is read from files that the run left: the markers of fired faults, the ledger, generation files, committed
manifests and sample journals. So a run can be judged again later, by anyone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, chain, newest
from orchestrator.observe.ledger import read_ledger
from workers.checkpoint.manifest import parse_checkpoint_name
from workers.checkpoint.store import LocalStore
from workers.checkpoint.verify import verify_checkpoint
from workers.data.journal import EffectiveSamples, JournalContent, effective_samples, read_journal

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One kill and what came after it; None where the history does not get that far.

    during: the fault point at which the rank was killed, or "random moment". exit_code: how the rank ended, by the
    ledger; -9 for SIGKILL. step: steps finished when it died. source: what its successor restored: "checkpoint",
    "memory", or "fresh" for nothing. recovery_seconds: from the kill to the moment when all
    ranks had finished the first step after it.
    """

    during: str
    rank: int
    generation: int
    exit_code: int | None
    step: int | None
    newest_committed_step: int
    restored_step: int | None
    source: str | None
    lost_steps: int | None
    recovery_seconds: float | None


class History:
    """The past of the run in `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._store = LocalStore(run_dir)
        scan = RunArchive(self._store).scan()
        self.generations: Sequence[GenerationRecord] = sorted(scan.generations, key=lambda record: record.number)
        self.committed: Sequence[CheckpointRecord] = scan.checkpoints
        self.ledger: Sequence[Entry] = read_ledger(run_dir / "ledger.jsonl")
        self.kills: Sequence[Entry] = sorted(_markers(run_dir / "faults"), key=lambda marker: float(marker["at"]))

    @property
    def final_checkpoint(self) -> CheckpointRecord | None:
        """The newest committed checkpoint on the lineage."""
        return newest(self.generations, self.committed)

    def entries(self, kind: str) -> list[Entry]:
        """The ledger's entries of one kind, oldest first."""
        return [entry for entry in self.ledger if entry["kind"] == kind]

    def ray_workers(self) -> set[int]:
        """Process ids of all Ray Train workers that the run ever had."""
        return {entry["pid"] for entry in self.entries("agent")}

    def recoveries(self) -> list[Recovery]:
        """One for each kill, in order of time."""
        return [self._recovery(kill) for kill in self.kills]

    def _recovery(self, kill: Entry) -> Recovery:
        rank, generation = kill["context"]["rank"], kill["context"]["generation"]
        failure = next((entry for entry in self.entries("failure") if entry["generation"] == generation), None)
        step = failure["step"] if failure else None
        before = self.newest_committed(at=kill["at"], generation=generation)
        steps_after = [entry for entry in self.entries("first_step") if entry["generation"] > generation]
        restored_step = source = recovery_seconds = None
        if steps_after:
            successor = min(entry["generation"] for entry in steps_after)
            done_at = max(entry["at_step"] for entry in steps_after if entry["generation"] == successor)
            recovery_seconds = round(done_at - kill["at"], 3)
            restored_step, source = next(
                (rec.restored_step, rec.source) for rec in self.generations if rec.number == successor
            )
        return Recovery(
            during=kill["point"],
            rank=rank,
            generation=generation,
            exit_code=_exit_code(failure, rank) if failure else None,
            step=step,
            newest_committed_step=before.step if before else 0,
            restored_step=restored_step,
            source=source,
            lost_steps=None if step is None or restored_step is None else step - restored_step,
            recovery_seconds=recovery_seconds,
        )

    def newest_committed(self, *, at: float, generation: int) -> CheckpointRecord | None:
        """The newest checkpoint on the lineage as it was at that time, while `generation` was the highest."""
        return newest(
            [record for record in self.generations if record.number <= generation],
            [_checkpoint(entry["checkpoint"]) for entry in self.entries("commit") if entry["at"] <= at],
        )

    def torn_restores(self) -> list[str]:
        """Restores of anything but a checkpoint that had been committed before and whose every byte is as committed,
        or a set in memory that verified: one that did not was dropped, and nothing was trained from it."""
        trained = {entry["generation"] for entry in self.entries("first_step")}
        dropped = {(entry["generation"], entry["step"]) for entry in self.entries("memory_dropped")}
        torn = [
            f"generation {record.number} went on from snapshots in memory that were damaged"
            for record in self.generations
            if record.source == "memory"
            and record.number in trained
            and (record.parent_generation, record.restored_step) in dropped
        ]
        for restore in self.entries("restored"):
            name = restore["checkpoint"]
            if name is None:
                continue
            committed = any(e["checkpoint"] == name and e["seq"] < restore["seq"] for e in self.entries("commit"))
            if not committed:
                torn.append(f"{name} was restored and had not been committed")
            elif problems := verify_checkpoint(self._store, name):
                torn.append(f"{name} was restored and is damaged: {problems[0].file}: {problems[0].reason}")
        return torn

    def stale_restores(self) -> list[str]:
        """Generations that began from an older step than the newest that was committed when they began."""
        stale = []
        for record in self.generations[1:]:
            before = self.newest_committed(at=record.created_at, generation=record.number - 1)
            newest_step = before.step if before else 0
            if record.restored_step < newest_step:
                stale.append(f"generation {record.number} restored {record.restored_step}, not {newest_step}")
        return stale

    def samples(self, last_step: int) -> EffectiveSamples:
        """The samples that the run's lineage consumed up to `last_step`."""
        journals: dict[tuple[int, int], JournalContent] = {}
        for path in sorted((self.run_dir / "samples").glob("g*-rank-*.jsonl")):
            generation, _, rank = path.stem.partition("-rank-")
            journals[int(generation[1:]), int(rank)] = read_journal(path)
        restored = {record.number: record.restored_step for record in self.generations}
        return effective_samples(
            journals,
            [
                (link.generation, restored[link.generation], last_step if link.step_max is None else link.step_max)
                for link in chain(self.generations)
            ],
        )


def _markers(directory: Path) -> list[dict[str, Any]]:
    markers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    return [marker for marker in markers if marker["action"] == "kill_rank"]


def _exit_code(failure: Entry, rank: int) -> int | None:
    ends: list[Entry] = [failure, *failure["echoes"]]
    return next((end["exit_code"] for end in ends if end["rank"] == rank), None)


def _checkpoint(name: str) -> CheckpointRecord:
    parsed = parse_checkpoint_name(name)
    if parsed is None:
        raise ValueError(f"the ledger records a commit of {name!r}, which is no checkpoint's name")
    step, generation, attempt = parsed
    return CheckpointRecord(name=name, generation=generation, step=step, attempt=attempt)
