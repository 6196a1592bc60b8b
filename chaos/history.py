"""What one run directory says about its past: kills, what came after each, and which samples counted.

Everything is read from files that the run left: the markers of fired faults, the ledger, generation files, committed
manifests and sample journals. So a run can be judged again later, by anyone.
"""

import json
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, chain, eligible, newest
from orchestrator.observe.ledger import LEDGER_FILE, begun_generations, parse_ledger, read_ledger
from orchestrator.run_store import store_of
from workers.checkpoint.manifest import MANIFEST_FILE, checkpoint_dir, parse_checkpoint_name
from workers.checkpoint.store import LocalStore
from workers.checkpoint.verify import Problem, verify_checkpoint
from workers.data.journal import EffectiveSamples, JournalContent, effective_samples, read_journal

Entry = Mapping[str, Any]

_SAVE_POINTS = ("snapshot.", "persist.", "commit.")
_LEFTOVER_REASONS = frozenset({"its save was never completed", "its save failed"})
"""Why the ledger says that something was deleted which had never been committed."""


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
    """The past of the run in `run_dir`; nothing is written there.

    faults: the markers of all injected faults, in order of time. kills: those that killed a rank.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._store = store_of(run_dir)
        self.ledger: Sequence[Entry] = read_ledger(run_dir / LEDGER_FILE)
        scan = RunArchive(self._store).scan(begun=begun_generations(self.ledger), fresh=False)
        self.generations: Sequence[GenerationRecord] = sorted(scan.generations, key=lambda record: record.number)
        self.committed: Sequence[CheckpointRecord] = scan.checkpoints
        self.quarantined: Mapping[str, str] = scan.quarantined
        self.faults: Sequence[Entry] = sorted(_markers(run_dir / "faults"), key=lambda marker: float(marker["at"]))
        self.kills: Sequence[Entry] = [marker for marker in self.faults if marker["action"] == "kill_rank"]
        self._manifest_times = {manifest.name: manifest.created_at for manifest in scan.manifests}
        self._problems: dict[str, list[Problem]] = {}

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

    def trained(self) -> set[int]:
        """The generations of which a rank has finished a step."""
        return {entry["generation"] for entry in self.entries("first_step")}

    def begun(self) -> list[GenerationRecord]:
        """The generations whose ranks were started; the file of another may be left by a driver that died, or void."""
        numbers = begun_generations(self.ledger)
        return [record for record in self.generations if record.number in numbers]

    def deletions(self) -> dict[str, Entry]:
        """By checkpoint, the ledger's last word that retention has removed it."""
        return {entry["checkpoint"]: entry for entry in self.entries("deleted")}

    def unrecorded_commits(self) -> set[str]:
        """Committed checkpoints, there or deleted since, whose commit the ledger does not have."""
        deleted = {name for name, entry in self.deletions().items() if entry["reason"] not in _LEFTOVER_REASONS}
        return (deleted | set(self._manifest_times)) - {entry["checkpoint"] for entry in self.entries("commit")}

    def touched(self, checkpoint: str, *, by: float = math.inf) -> bool:
        """Whether a fault damaged this checkpoint's files, at that time or before."""
        return any(fault["context"].get("checkpoint") == checkpoint and fault["at"] <= by for fault in self.faults)

    def faults_in_saves(self) -> list[Entry]:
        """Those that struck at a fault point of a save, or between its snapshots and its commit or failure."""
        began: dict[int, float] = {}
        saves = []
        for entry in self.ledger:
            if entry["kind"] == "snapshot":
                began.setdefault(entry["step"], entry["at"])
            elif entry["kind"] in ("commit", "save_failed") and entry["step"] in began:
                saves.append((began.pop(entry["step"]), entry["at"]))
        return [
            fault
            for fault in self.faults
            if fault["point"].startswith(_SAVE_POINTS) or any(first <= fault["at"] <= last for first, last in saves)
        ]

    def has_manifest(self, checkpoint: str) -> bool:
        """Whether it is there, as far as the presence of its manifest tells."""
        return self._store.exists(f"{checkpoint_dir(checkpoint)}/{MANIFEST_FILE}")

    @contextmanager
    def directory_of(self, checkpoint: str) -> Iterator[Path]:
        """A checkpoint's directory; a copy of it for as long as it is looked at, if it lies on object storage."""
        path = checkpoint_dir(checkpoint)
        if isinstance(self._store, LocalStore):
            yield self._store.local_path(path)
            return
        with tempfile.TemporaryDirectory(prefix="lastgood-checkpoint-") as folder:
            for name in self._store.list_dir(path):
                (Path(folder) / name).write_bytes(self._store.read_bytes(f"{path}/{name}"))
            yield Path(folder)

    def problems(self, checkpoint: str) -> list[Problem]:
        """What is not as it was committed, of a checkpoint that is still there."""
        if checkpoint not in self._problems:
            self._problems[checkpoint] = verify_checkpoint(self._store, checkpoint)
        return self._problems[checkpoint]

    def was_committed(self, checkpoint: str, *, before: Entry) -> bool:
        """Whether it was, by the word of the ledger, or of a manifest, before this entry of the ledger.

        A coordinator that died after it had written the manifest never recorded it; one that is deleted can no longer
        say when it was written.
        """
        if any(e["checkpoint"] == checkpoint and e["seq"] < before["seq"] for e in self.entries("commit")):
            return True
        if checkpoint in self._manifest_times:
            return self._manifest_times[checkpoint] <= float(before["at"])
        gone = self.deletions().get(checkpoint)
        return bool(gone is not None and gone["seq"] > before["seq"] and gone["reason"] not in _LEFTOVER_REASONS)

    def recoveries(self) -> list[Recovery]:
        """One for each kill of a rank, in order of time."""
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

    def newest_committed(self, *, at: float, generation: int, without: Collection[str] = ()) -> CheckpointRecord | None:
        """The newest checkpoint on the lineage as it was at that time, while `generation` was the highest.

        The file of a generation that never began may be on the lineage then, or void: of both answers the older one.
        """
        commits = [
            checkpoint_record(entry["checkpoint"])
            for entry in self.entries("commit")
            if entry["at"] <= at and entry["checkpoint"] not in without
        ]
        answers = [
            newest([record for record in records if record.number <= generation], commits)
            for records in (self.generations, self.begun())
        ]
        return min(answers, key=lambda found: found.step if found else 0)

    def torn_restores(self) -> list[str]:
        """Restores of anything but a checkpoint that had been committed before and whose every byte is as committed,
        or a set in memory that verified: one that did not was dropped, and nothing was trained from it."""
        trained = self.trained()
        dropped = {(entry["generation"], entry["step"]) for entry in self.entries("memory_dropped")}
        created: dict[int, float] = {record.number: record.created_at for record in self.generations}
        deleted = self.deletions()
        torn = [
            f"generation {record.number} went on from snapshots in memory that were damaged"
            for record in self.generations
            if record.source == "memory"
            and record.number in trained
            and (record.parent_generation, record.restored_step) in dropped
        ]
        for restore in self.entries("restored"):
            name, generation = restore["checkpoint"], restore["generation"]
            if name is None:
                continue
            if not self.was_committed(name, before=restore):
                torn.append(f"{name} was restored and had not been committed (ledger {restore['seq']})")
                continue
            unclear = name in deleted or not self.has_manifest(name) or generation not in trained
            # What was damaged only afterwards says nothing about what was restored.
            began = created.get(generation, float(restore["at"]))
            later = self.touched(name) and not self.touched(name, by=began)
            if not unclear and not later and (problems := self.problems(name)):
                torn.append(
                    f"{name} was restored and is damaged: {problems[0].file}: {problems[0].reason} "
                    f"(ledger {restore['seq']})"
                )
        return torn

    def stale_restores(self) -> list[str]:
        """Generations that began from an older step than the newest that was committed when they began, and that
        nothing spoke against then."""
        stale = []
        for record in self.begun():
            if record.number == self.generations[0].number or record.reason == "probation":
                continue
            against = self._rejected_at(record.created_at)
            before = self.newest_committed(at=record.created_at, generation=record.number - 1, without=against)
            if before is not None and record.restored_step < before.step:
                stale.append(
                    f"generation {record.number} restored {record.restored_step}, not {before.step} ({before.name})"
                )
        return stale

    def off_lineage_restores(self) -> list[str]:
        """Generations that began from a state which was not on the lineage of those before."""
        found = []
        for record in self.begun():
            if record.parent_generation is None:
                continue
            state = CheckpointRecord(name="", generation=record.parent_generation, step=record.restored_step, attempt=0)
            earlier = [
                [other for other in records if other.number < record.number]
                for records in (self.generations, self.begun())
            ]
            if not any(eligible(records, [state]) for records in earlier):
                found.append(
                    f"generation {record.number} restored step {record.restored_step} of generation "
                    f"{record.parent_generation}, which was rolled back (generations/{record.number:08d}.json)"
                )
        return found

    def _rejected_at(self, at: float) -> set[str]:
        """Checkpoints that were quarantined, deleted, or damaged by a fault."""
        rejected = {
            entry["checkpoint"]
            for kind in ("quarantine", "deleted")
            for entry in self.entries(kind)
            if entry["at"] <= at
        }
        names = {fault["context"].get("checkpoint") for fault in self.faults if fault["at"] <= at}
        return rejected | {name for name in names if name is not None}

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


def unreadable(run_dir: Path) -> list[str]:
    """What of a run's records cannot be read, so that what it said is not judged; the ledger's last line may be cut."""
    lines = [line for line in (run_dir / LEDGER_FILE).read_bytes().split(b"\n")[:-1] if line.strip()]
    found = []
    if lost := len(lines) - len(parse_ledger(b"\n".join(lines))):
        found.append(f"{lost} of {len(lines)} lines of {LEDGER_FILE}")
    for path in sorted((run_dir / "faults").glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            found.append(str(path.relative_to(run_dir)))
    return found


def _markers(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.json")):
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # whoever wrote it was killed before its fault struck
        released = path.with_suffix(".released")
        until = released.stat().st_mtime if released.exists() else marker["at"]
        yield {"until": until, **marker}


def _exit_code(failure: Entry, rank: int) -> int | None:
    ends: list[Entry] = [failure, *failure["echoes"]]
    return next((end["exit_code"] for end in ends if end["rank"] == rank), None)


def checkpoint_record(name: str) -> CheckpointRecord:
    """What a checkpoint's name says of it; ValueError for a name that is none."""
    parsed = parse_checkpoint_name(name)
    if parsed is None:
        raise ValueError(f"the ledger records a commit of {name!r}, which is no checkpoint's name")
    step, generation, attempt = parsed
    return CheckpointRecord(name=name, generation=generation, step=step, attempt=attempt)
