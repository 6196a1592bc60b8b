"""What coordinator and keepers do around saves, in one process and by their own code, with marks of what was promised.

Mutants of the protocol override its methods (mutants.py).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from chaos.crash_states.object_record import RecordedLedger, RecordingObjectStore
from chaos.crash_states.record import Log, RecordingStore
from chaos.crash_states.requests import RequestLog
from orchestrator import recovery
from orchestrator.archive import GENERATIONS_DIR, RunArchive, ScanResult
from orchestrator.decide.commit import Commit, CommitMachine, Persist
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.generation_file import generation_bytes
from orchestrator.housekeeping import Housekeeping
from orchestrator.observe.ledger import (
    DURABLE_KINDS,
    LEDGER_FILE,
    Ledger,
    LedgerStore,
    begun_generations,
    committed_checkpoints,
    parse_ledger,
)
from workers.checkpoint.digests import image_digests
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardRecord,
    checkpoint_dir,
    checkpoint_name,
    shard_file,
)
from workers.checkpoint.persist import ReadBack, write_shard
from workers.checkpoint.store import Store

if TYPE_CHECKING:
    from chaos.crash_states.scenario import Course


class MarkingArchive(RunArchive):
    """Marks what begins and what has returned."""

    def __init__(self, store: Store, course: "Course") -> None:
        super().__init__(store, clock=course.clock)
        self._course = course

    def create_generation(self, record: GenerationRecord, *, seen: ScanResult) -> tuple[GenerationRecord, ...]:
        facts = {"number": record.number, "parent": record.parent}
        self._course.expect(f"{GENERATIONS_DIR}/{record.number:08d}.json", generation_bytes(record))
        self._course.mark("generation begins", **facts)
        records = super().create_generation(record, seen=seen)
        self._course.mark("generation created", **facts)
        return records

    def commit(self, manifest: Manifest, *, my_generation: int | None = None) -> None:
        self.expect(manifest)
        super().commit(manifest, my_generation=my_generation)
        self._course.mark("committed", name=manifest.name)

    def expect(self, manifest: Manifest) -> None:
        """A commit begins."""
        self._course.expect(f"{checkpoint_dir(manifest.name)}/{MANIFEST_FILE}", manifest.to_bytes())
        self._course.mark("commit begins", name=manifest.name)

    def delete(self, name: str, *, my_generation: int) -> bool:
        self._course.mark("delete begins", name=name, generation=my_generation)
        return super().delete(name, my_generation=my_generation)


class Driver:
    """One driver, its coordinator and its keepers. `step` is that of the newest state it knows of."""

    store_kind: type[RecordingStore] = RecordingStore
    archive_kind: type[MarkingArchive] = MarkingArchive

    def __init__(self, course: "Course") -> None:
        self.course = course
        self.store = self.open_store()
        self.keepers = [self.open_store() for _ in range(course.plan.ranks)]
        self.archive = self.archive_kind(self.store, course)
        self.prepare()
        lines = self.open_ledger()
        told = lines.read_bytes(LEDGER_FILE) if lines.exists(LEDGER_FILE) else b""
        entries = parse_ledger(told)
        self.committed, self.begun = set(committed_checkpoints(entries)), begun_generations(entries)
        self.ledger = Ledger(Path(LEDGER_FILE), clock=course.clock, store=lines)
        self.ledger.listen(self._recorded)
        self.ledger.append("coordinator", driver="driver", resumed=False, pid=1)
        self.machine = CommitMachine()
        self.housekeeping = Housekeeping(
            archive=self.archive,
            ledger=self.ledger,
            keep_last=course.plan.keep_last,
            keep_last_min=1,
            committed=self.committed,
            protected=lambda: set(self.machine.in_flight),
        )
        self.generation = 0
        self.step = 0

    def open_store(self) -> Store:
        """Each process has its own."""
        return self.store_kind(self.course.storage, cast(Log, self.course.log), self.course.before)

    def open_ledger(self) -> LedgerStore:
        """Where the ledger is."""
        return cast(RecordingStore, self.store)

    def prepare(self) -> None:
        """Make the run directory ready."""
        self.archive.prepare()

    def begin(self, reason: str, *, back: bool = False) -> None:
        """Choose what to restore, and begin a generation with it. `back`: the newest checkpoint is on probation."""
        newest = recovery.newest_committed(self.archive) if back else None
        created = recovery.create_generation(
            self.archive,
            run_dir=Path(),
            committed=self.committed,
            begun=self.begun,
            driver=f"driver of {reason}",
            reason=reason,
            world_size=self.course.plan.ranks,
            skip=(),
            suspects={newest.name: "on probation"} if newest is not None else {},
            memory=None,
            on_quarantine=lambda name, why: self.ledger.append("quarantine", checkpoint=name, reason=why),
            clock=self.course.clock,
        )
        record = created.record
        self.ledger.append("generation", generation=record.number, checkpoint=record.parent, reason=reason)
        self.course.mark("generation begun", number=record.number, parent=record.parent)
        self.generation, self.step = record.number, record.restored_step
        self.machine.generation_started(created.generations, at=0.0)

    def save(self, step: int, *, beside: Sequence[Callable[[], None]] = ()) -> None:
        """All ranks' snapshots of this step become a committed checkpoint, while `beside` runs."""
        decisions = []
        for rank in range(self.course.plan.ranks):
            decisions += self.machine.snapshotted(rank, self.generation, step, at=0.0)
        persist = next(decision for decision in decisions if isinstance(decision, Persist))
        name = checkpoint_name(step, self.generation, persist.attempt)
        self.write_shards(name, persist, beside)
        self.step = step

    def write_shards(self, name: str, persist: Persist, beside: Sequence[Callable[[], None]]) -> None:
        """The keepers' part of a save, and the commit once all receipts are there."""
        receipts: dict[int, ShardRecord] = {}

        def keep(rank: int) -> None:
            receipts[rank] = self.persist(name, rank, persist.step)

        self.expect_shards(name, persist.step)
        self.course.turns.run([*(partial(keep, rank) for rank in persist.ranks), *beside])
        self.conclude(name, persist, receipts)

    def conclude(self, name: str, persist: Persist, receipts: dict[int, ShardRecord]) -> None:
        """Tell the commit machine of the receipts, and do what it orders."""
        key: dict[str, Any] = {"generation": persist.generation, "step": persist.step, "attempt": persist.attempt}
        decisions = []
        for rank, shard in sorted(receipts.items()):
            decisions += self.machine.shard_persisted(
                rank, persist.generation, persist.step, persist.attempt, shard, at=0.0
            )
        for decision in decisions:
            if isinstance(decision, Commit):
                self.commit(self.manifest(persist, decision.shards))
                self.machine.committed(**key, at=0.0)

    def expect_shards(self, name: str, step: int) -> None:
        """What their files are to hold."""
        images = []
        for rank in range(self.course.plan.ranks):
            memory, size = self.course.image(rank, step, self.generation)
            images.append(memory[:size])
            self.course.expect(self.shard_path(name, rank), memory[:size])
        self.course.images[name] = tuple(images)

    def persist(self, name: str, rank: int, step: int) -> ShardRecord:
        """A keeper's part of a save; returns its receipt."""
        memory, size = self.course.image(rank, step, self.generation)
        image = memoryview(memory)
        digests = image_digests(image[:size], parse_header(image[:size]).tensors.values())
        return write_shard(
            self.keepers[rank],
            name,
            rank,
            self.course.plan.ranks,
            image,
            size,
            {},
            digests=digests,
            read_back=ReadBack(),
        ).shard

    def manifest(self, persist: Persist, shards: tuple[ShardRecord, ...]) -> Manifest:
        """What the coordinator writes."""
        return Manifest(
            run="crash-states",
            generation=persist.generation,
            step=persist.step,
            attempt=persist.attempt,
            world_size=len(shards),
            shards=shards,
            identity={},
            progress={"step": persist.step},
            created_at=self.course.clock(),
        )

    def commit(self, manifest: Manifest) -> None:
        """The coordinator's part."""
        self.archive.commit(manifest, my_generation=self.generation)
        self.record_commit(manifest)

    def record_commit(self, manifest: Manifest) -> None:
        """In the ledger."""
        self.ledger.append("commit", step=manifest.step, checkpoint=manifest.name, generation=manifest.generation)
        self.committed.add(manifest.name)

    def clean_up(self) -> None:
        """Retention, after a commit."""
        self.housekeeping.clean_up(self.generation)

    def _recorded(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] in DURABLE_KINDS:
            self.course.mark("recorded", seq=entry["seq"])

    def shard_path(self, name: str, rank: int) -> str:
        """Of a rank's shard."""
        return f"{checkpoint_dir(name)}/{shard_file(rank, self.course.plan.ranks)}"


class ObjectDriver(Driver):
    """The same on object storage."""

    object_store_kind: type[RecordingObjectStore] = RecordingObjectStore

    def open_store(self) -> Store:
        return self.object_store_kind(self.course.storage, cast(RequestLog, self.course.log), self.course.before)

    def open_ledger(self) -> LedgerStore:
        return RecordedLedger(cast(RecordingObjectStore, self.store))
