"""A run directory as the coordinator and the command line see it: what is there, what is added, what is taken away.

    generations/00000007.json                 fence and lineage, created exclusively
    checkpoints/step-000000120-g0007-a01/     one save attempt; its manifest.json is the commit
    quarantine/step-000000120-g0007-a01.json  why a checkpoint is passed over; the checkpoint stays where it is
    trash/                                    on its way out

Invariants:
- What exists is found by looking, never remembered. There is no index that could be lost, and nothing points anywhere.
- A driver that sees another driver's generation above its own commits nothing and deletes nothing any more (Fenced).
- A generation trains only from what is still the newest after its file was in place (LineageMoved).
- Nothing that a higher generation may have chosen is unlinked: out of sight first, then look, then unlink or put back.

Faults survived: a kill between any two operations; another driver doing the same at the same time; files of this
directory truncated, changed or deleted by anyone; names that lastgood did not give, which are left alone.
"""

import contextlib
import errno
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.decide import ladder, lineage
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet
from orchestrator.generation_file import generation_bytes, parse_generation, unknown_generation
from workers import failpoint
from workers.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_FILE,
    Manifest,
    checkpoint_dir,
    parse_checkpoint_name,
    read_manifest,
)
from workers.checkpoint.sealed import seal, unseal
from workers.checkpoint.store import TRASH_DIR, Store
from workers.errors import CheckpointDamaged, EnvironmentProblem, Fenced, LastgoodError

GENERATIONS_DIR = "generations"
QUARANTINE_DIR = "quarantine"
_VANISHED = "its directory is gone, though it was committed"

_GENERATION_NAME = re.compile(r"(\d{8,})\.json", re.ASCII)


class LineageMoved(LastgoodError):
    """What a generation was to start from is no longer the newest, or gone: choose again, under the next number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What is in the run directory.

    generations: all records, lowest first, without those that this driver created in vain (see LineageMoved), and
    without those that do not count (see lineage.without_void).
    checkpoints: every committed one, also where its manifest is damaged or, though it was committed, gone.
    vanished: those that were committed, and whose directory is gone; they may come back with a mount, so they are
    never quarantined.
    manifests: those that could be read. orphans: attempts without a manifest. quarantined, problems: reasons by name.
    next_number: of the generation to create next.
    """

    generations: tuple[GenerationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    manifests: tuple[Manifest, ...]
    orphans: tuple[CheckpointRecord, ...]
    quarantined: Mapping[str, str]
    problems: Mapping[str, str]
    vanished: tuple[CheckpointRecord, ...]
    next_number: int

    @property
    def rejected(self) -> dict[str, str]:
        """Reasons not to restore a checkpoint, by name."""
        return {**self.problems, **self.quarantined}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to restore, the scan that shows it, and what was put into quarantine on the way (name to reason)."""

    choice: ladder.Choice
    scan: ScanResult
    newly_quarantined: Mapping[str, str]


class RunArchive:
    """The run directory in `store`. `clock` is Unix time in seconds. OSErrors of the storage are passed on."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._created_in_vain: set[int] = set()
        self._creating = threading.Lock()
        self._created = 0  # the highest generation that was created here

    @property
    def store(self) -> Store:
        """Where the run lies."""
        return self._store

    # Looking

    def scan(
        self,
        committed: Collection[str] = (),
        *,
        begun: Collection[int] = (),
        manifests: bool = True,
        fresh: bool = True,
    ) -> ScanResult:
        """Look at everything.

        `committed` are names known to have been committed, from the ledger: without their manifest they are damaged,
        and no orphans. `begun`: generations known to have begun, from there too. manifests=False leaves manifests
        unread, so that damage in one is not noticed. `fresh` defeats stale listings of network file systems, and needs
        write access.
        """
        numbers = self._generation_numbers(fresh=fresh)
        generations = tuple(self._read_generation(number) for number in numbers if number not in self._created_in_vain)
        known = {*committed, *(record.parent for record in generations if record.parent)}
        checkpoints: list[CheckpointRecord] = []
        orphans: list[CheckpointRecord] = []
        read: list[Manifest] = []
        problems: dict[str, str] = {}
        attempts = self._attempts(fresh=fresh)
        for record in attempts:
            files = self._store.list_dir(checkpoint_dir(record.name), fresh=fresh)
            if MANIFEST_FILE not in files and not self._store.exists(checkpoint_dir(record.name)):
                continue  # deleted while we looked
            if MANIFEST_FILE not in files and record.name not in known:
                orphans.append(record)
                continue
            checkpoints.append(record)
            if MANIFEST_FILE not in files:
                problems[record.name] = f"{MANIFEST_FILE} is missing, though it was committed"
            elif manifests:
                manifest = self._read_manifest(record.name)
                if isinstance(manifest, str):
                    problems[record.name] = manifest
                else:
                    read.append(manifest)
        used = [*numbers, *(record.generation for record in (*checkpoints, *orphans))]
        return ScanResult(
            generations=lineage.without_void(generations, (*checkpoints, *orphans), begun),
            checkpoints=tuple(checkpoints),
            manifests=tuple(read),
            orphans=tuple(orphans),
            quarantined=self._quarantined(fresh=fresh),
            problems=problems,
            vanished=_records(set(committed) - {attempt.name for attempt in attempts}),
            next_number=lineage.next_number(used),
        )

    def structural_problems(self, name: str) -> tuple[str, ...]:
        """What is wrong with a checkpoint as far as names and sizes show; its shards are not read."""
        manifest = self._read_manifest(name)
        if isinstance(manifest, str):
            return (manifest,)
        problems = []
        for shard in manifest.shards:
            try:
                size = self._store.size(f"{checkpoint_dir(name)}/{shard.file}")
            except FileNotFoundError:
                problems.append(f"{shard.file} is missing")
                continue
            if size != shard.bytes:
                problems.append(f"{shard.file} has {size} bytes, {shard.bytes} were committed")
        return tuple(problems)

    def select(
        self,
        committed: Collection[str] = (),
        *,
        suspects: Mapping[str, str] = MappingProxyType({}),
        memory: MemorySet | None = None,
        begun: Collection[int] = (),
    ) -> Selection:
        """Choose what to restore; a rung that is visibly damaged is put into quarantine and the next one taken.

        For `committed` see `scan`, for `suspects`, `memory` and `begun` ladder.choose.
        """
        newly: dict[str, str] = {}
        known = {*begun, memory.generation} if begun and memory is not None else begun
        while True:
            scan = self.scan(committed, begun=known, manifests=False)
            damaged = {name: reason for name, reason in scan.problems.items() if name not in scan.quarantined}
            vanished = {record.name: _VANISHED for record in scan.vanished}
            choice = ladder.choose(
                generations=scan.generations,
                checkpoints=(*scan.checkpoints, *scan.vanished),
                rejected={**vanished, **scan.rejected},
                unfinished=scan.orphans,
                suspects=suspects,
                memory=memory,
                begun=begun,
                committed=committed,
            )
            if isinstance(choice, ladder.Restore):
                problems = self.structural_problems(choice.name)
                damaged |= {choice.name: "; ".join(problems)} if problems else {}
            if not damaged:
                return Selection(choice=choice, scan=scan, newly_quarantined=newly)
            for name, reason in damaged.items():
                self.quarantine(name, reason)
            newly |= damaged

    # Changing

    def prepare(self) -> None:
        """Create what a run needs in its directory, durably."""
        for name in (GENERATIONS_DIR, CHECKPOINTS_DIR):
            self._store.make_dir(name)
        # Whoever created them may have been killed before their names were durable, or did not care.
        self._store.sync_dir(".")

    def create_generation(self, record: GenerationRecord, *, seen: ScanResult) -> tuple[GenerationRecord, ...]:
        """Create a generation's file, durably; `seen` is the scan that the decision was made on. Returns all records.

        Once more with an equal record is fine. Raises Fenced if another driver took this number or a higher one, and
        LineageMoved if meanwhile the newest checkpoint is another one or the parent is gone: then select again, and
        create the next number.
        """
        failpoint.hit("generation.create", generation=record.number, step=record.restored_step)
        self._store.make_dir(GENERATIONS_DIR)
        self._check_fence(record.number)
        if record.parent is not None:
            self._rely_on(record.parent, record.number)
        try:
            # A commit that goes on meanwhile is not to take this file for another driver's.
            with self._creating:
                self._store.create_exclusive(
                    _generation_path(record.number),
                    generation_bytes(record),
                    points="generation",
                    context={"generation": record.number, "step": record.restored_step},
                )
                self._created = max(self._created, record.number)
        except FileExistsError:
            raise Fenced(_fenced(record.number, record.number)) from None
        failpoint.hit("generation.created", generation=record.number, step=record.restored_step)
        if record.parent is not None:
            self._rely_on(record.parent, record.number, again=True)
        self._check_fence(record.number)
        attempts = self._attempts(fresh=True)
        committed = [attempt for attempt in attempts if self._is_committed(attempt.name) or attempt in seen.checkpoints]
        moved = ""
        if record.parent is not None and record.parent not in {attempt.name for attempt in committed}:
            moved = f"{record.parent}, which generation {record.number} was to restore, is gone"
        before = lineage.newest(seen.generations, seen.checkpoints)
        now = lineage.newest(seen.generations, committed)
        restored = (record.parent_generation or 0, record.restored_step)
        # A set that is restored from memory may be committed meanwhile, or one before it.
        expected = record.source == "memory" and now is not None and (now.generation, now.step) <= restored
        if not moved and now != before and not expected:
            moved = f"{now.name if now else 'nothing'} is the newest checkpoint now, no longer {before and before.name}"
        if moved:
            self._created_in_vain.add(record.number)
            raise LineageMoved(moved)
        return (*(known for known in seen.generations if known.number != record.number), record)

    def commit(self, manifest: Manifest, *, my_generation: int | None = None) -> None:
        """Write the manifest: from here on the checkpoint counts. Once more with the same shards is fine.

        `my_generation` is the one that runs now, if it is not the manifest's. Raises Fenced if a higher one exists,
        before or after: what a driver that was stopped in between still writes is not restored, and must not be called
        committed. Raises EnvironmentProblem if shards that keepers wrote are not to be seen from here.
        """
        context = {"generation": manifest.generation, "step": manifest.step}
        failpoint.hit("commit.begin", **context)
        my_generation = manifest.generation if my_generation is None else my_generation
        self._check_fence(my_generation)
        directory = checkpoint_dir(manifest.name)
        visible = self._store.list_dir(directory, fresh=True)
        unseen = [shard.file for shard in manifest.shards if shard.file not in visible]
        if unseen:
            self._check_fence(my_generation)  # another driver deletes what earlier ones did not finish
            raise EnvironmentProblem(
                f"{directory}/{unseen[0]} was written by a keeper but is not to be seen from the coordinator's node; "
                f"RunConfig.storage_path has to be a directory that all nodes share"
            )
        path = f"{directory}/{MANIFEST_FILE}"
        try:
            self._store.write_atomic(path, manifest.to_bytes(), points="commit", context=context)
        except FileExistsError:
            # Ours, from a try whose answer was lost. Only its time may differ.
            existing = read_manifest(self._store, manifest.name)
            if replace(existing, created_at=manifest.created_at) != manifest:
                raise CheckpointDamaged(f"{path} exists already, with other content") from None
            self._store.sync_dir(directory)
        self._check_fence(my_generation)
        failpoint.hit("commit.done", **context)

    def quarantine(self, name: str, reason: str) -> None:
        """Record that a checkpoint is not to be restored; it stays where it is. The first reason stands."""
        if parse_checkpoint_name(name) is None:
            raise ValueError(f"{name!r} is not a checkpoint's name")
        content = seal({"checkpoint": name, "reason": reason, "at": float(self._clock())})
        self._store.make_dir(QUARANTINE_DIR)
        try:
            self._store.create_exclusive(_quarantine_path(name), content, points="quarantine")
        except FileExistsError:
            return

    def delete(self, name: str, *, my_generation: int) -> bool:
        """Delete a checkpoint or an orphan; False, and nothing is gone, if a higher generation exists."""
        if self._highest_number() > my_generation:
            return False
        directory = checkpoint_dir(name)
        failpoint.hit("retention.trash", generation=my_generation)
        self._store.make_dir(TRASH_DIR)
        try:
            if not self._store.set_aside(directory, generation=my_generation, began=self._began):
                return False
        except FileNotFoundError:
            return True
        failpoint.hit("retention.check", generation=my_generation)
        # A driver that began meanwhile either sees that it is gone, or is seen here.
        if self._highest_number() > my_generation:
            self._store.put_back(directory, generation=my_generation)
            return False
        failpoint.hit("retention.unlink", generation=my_generation)
        self._store.drop(directory)
        failpoint.hit("retention.done", generation=my_generation)
        return True

    def empty_trash(self, *, my_generation: int) -> bool:
        """Finish what a killed driver began to delete; False, and nothing is done, if a higher generation exists."""
        for name in self._store.aside(CHECKPOINTS_DIR):
            if self._highest_number() > my_generation:
                return False
            if parse_checkpoint_name(name) is not None:
                self._store.drop(checkpoint_dir(name))
        return True

    def free_bytes(self) -> int:
        """What can still be written, as far as the file system knows."""
        return self._store.free_bytes()

    def is_orphan(self, name: str) -> bool:
        """Whether there is something of this save attempt, and no manifest."""
        return self._store.is_dir(checkpoint_dir(name)) and not self._is_committed(name)

    def _began(self, generation: int) -> bool:
        return self._store.exists(_generation_path(generation))

    def _rely_on(self, name: str, generation: int, *, again: bool = False) -> None:
        """What a generation continues from must not be lost behind it: whoever committed it may have been killed before
        its names were durable, and whoever was about to delete it may have a request under way."""
        with contextlib.suppress(FileNotFoundError):  # it is gone, which is seen to later
            self._store.hold(checkpoint_dir(name), generation=generation, again=again)

    # Reading

    def _generation_numbers(self, *, fresh: bool) -> list[int]:
        matches = map(_GENERATION_NAME.fullmatch, self._store.list_dir(GENERATIONS_DIR, fresh=fresh))
        return sorted(int(match[1]) for match in matches if match)

    def _highest_number(self) -> int:
        return max(self._generation_numbers(fresh=True), default=0)

    def _check_fence(self, my_generation: int) -> None:
        with self._creating:
            mine, highest = max(my_generation, self._created), self._highest_number()
        if highest > mine:
            raise Fenced(_fenced(my_generation, highest))

    def _read_generation(self, number: int) -> GenerationRecord:
        path = _generation_path(number)
        try:
            return parse_generation(self._store.read_bytes(path), number, path)
        except (CheckpointDamaged, FileNotFoundError) as error:
            return unknown_generation(number, str(error))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return unknown_generation(number, str(error))

    def _read_manifest(self, name: str) -> Manifest | str:
        """The manifest, or why it cannot be used. Errors that are not about this one file are raised."""
        try:
            return read_manifest(self._store, name)
        except CheckpointDamaged as error:
            return str(error)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return f"{MANIFEST_FILE} cannot be read: {error}"

    def _attempts(self, *, fresh: bool) -> list[CheckpointRecord]:
        records: list[CheckpointRecord] = []
        for name in self._store.list_dir(CHECKPOINTS_DIR, fresh=fresh):
            if self._store.is_dir(checkpoint_dir(name)):
                records += _records([name])
        return records

    def _is_committed(self, name: str) -> bool:
        return self._store.exists(f"{checkpoint_dir(name)}/{MANIFEST_FILE}")

    def _quarantined(self, *, fresh: bool) -> dict[str, str]:
        reasons = {}
        for file in self._store.list_dir(QUARANTINE_DIR, fresh=fresh):
            name = file.removesuffix(".json")
            if file == name or parse_checkpoint_name(name) is None:
                continue
            path = _quarantine_path(name)
            try:
                reasons[name] = str(unseal(self._store.read_bytes(path), path).get("reason"))
            except (CheckpointDamaged, FileNotFoundError) as error:
                reasons[name] = f"quarantined, but the reason cannot be read: {error}"
        return reasons


def _generation_path(number: int) -> str:
    return f"{GENERATIONS_DIR}/{number:08d}.json"


def _records(names: Iterable[str]) -> tuple[CheckpointRecord, ...]:
    """The attempts that these are names of; other names are left out."""
    parsed = ((name, parse_checkpoint_name(name)) for name in names)
    return tuple(
        CheckpointRecord(name=name, step=found[0], generation=found[1], attempt=found[2])
        for name, found in parsed
        if found is not None
    )


def _quarantine_path(name: str) -> str:
    return f"{QUARANTINE_DIR}/{name}.json"


def _fenced(mine: int, other: int) -> str:
    return (
        f"another driver started generation {other} of this run, so generation {mine} ends here; "
        f"run only one fit() of a run directory at a time"
    )
