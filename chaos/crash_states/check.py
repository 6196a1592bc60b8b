"""One state: the real recovery is run on it, and everything that it owes is looked at.

Recovery here is what a coordinator does when a driver starts: read the ledger, scan, climb down the ladder, put what
is damaged into quarantine, create the next generation's file; then what each rank does: read the chosen checkpoint,
every byte of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chaos.crash_states.enumerate import Tree
from chaos.crash_states.memory_store import MemoryStore
from chaos.crash_states.promises import Promise
from chaos.crash_states.scenario import Recording
from orchestrator import recovery
from orchestrator.archive import GENERATIONS_DIR, QUARANTINE_DIR, RunArchive
from orchestrator.decide import lineage
from orchestrator.observe.ledger import LEDGER_FILE, begun_generations, committed_checkpoints, parse_ledger
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import CHECKPOINTS_DIR, MANIFEST_FILE, parse_checkpoint_name
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.store import Store
from workers.errors import NothingVerifies

GUARANTEES = {
    "never half": "a file that has its final name is whole, and is what was written",
    "commit means whole": "where a manifest is, all its shards are, with all their bytes; on object storage: "
    "where it is on the lineage, for a commit of a process that is gone may still arrive",
    "kept": "a checkpoint whose commit has returned stays whole until retention begins to delete it",
    "never lost": "the newest checkpoint whose commit has returned is chosen, or a newer one",
    "never torn": "every byte of the chosen checkpoint is what was saved, and the reader takes it",
    "never fresh": "no run that has committed anything starts from the beginning",
    "number used once": "the next generation has a higher number than any that was created",
    "rightly quarantined": "only what is damaged is put into quarantine",
    "recorded": "a line of the ledger that was durable is there",
    "recovers": "recovery raises no error",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """`guarantee` is a key of GUARANTEES."""

    guarantee: str
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What recovery made of a state: the checkpoint (None for a fresh start), what it put aside, what it broke."""

    chosen: str | None
    quarantined: tuple[str, ...]
    violations: tuple[Violation, ...]


class Judge:
    """Judges the states of one recording. What reading a checkpoint comes to is known once its files were read.

    `open_store`: object storage that holds what a tree does; a file system in memory, if it is not given.
    """

    def __init__(self, recording: Recording[Any], open_store: Callable[[Tree], Store] | None = None) -> None:
        self._recording = recording
        self._open_store = open_store
        self._read: dict[tuple[str, frozenset[tuple[str, object]]], str] = {}

    def check(self, tree: Tree, promise: Promise) -> Verdict:
        """Judge one state."""
        store = MemoryStore(tree) if self._open_store is None else self._open_store(tree)
        return check(tree, self._recording, promise, store, self._unlike, late_commits=self._open_store is not None)

    def _unlike(self, store: Store, name: str, images: tuple[bytes, ...]) -> str:
        files = frozenset(
            (file, store.read_bytes(f"{CHECKPOINTS_DIR}/{name}/{file}"))
            for file in store.list_dir(f"{CHECKPOINTS_DIR}/{name}")
        )
        if (name, files) not in self._read:
            self._read[name, files] = unlike(store, name, images)
        return self._read[name, files]


def check(
    tree: Tree,
    recording: Recording[Any],
    promise: Promise,
    store: Store,
    read: Callable[..., str] | None = None,
    *,
    late_commits: bool = False,
) -> Verdict:
    """Judge one state, which `store` holds. `read`: in place of `unlike`. `late_commits`: commits of processes that are
    gone may have arrived since."""
    ledger = parse_ledger(store.read_bytes(LEDGER_FILE)) if store.exists(LEDGER_FILE) else []
    there = store.list_dir(CHECKPOINTS_DIR)
    damaged = dict(damage(tree, there, recording))
    counting = _eligible(store, begun_generations(ledger)) if late_commits else set(there)
    violations = [*_structure(tree, there, counting, recording, promise, damaged)]
    if lost := sorted(promise.recorded - {entry["seq"] for entry in ledger}):
        violations.append(Violation("recorded", f"lines {lost} are missing"))
    quarantined: dict[str, str] = {}
    chosen: str | None = None
    try:
        created = recovery.create_generation(
            RunArchive(store, clock=_clock),
            run_dir=Path(),
            committed=committed_checkpoints(ledger),
            begun=begun_generations(ledger),
            driver="the next one",
            reason="power loss",
            world_size=recording.plan.ranks,
            skip=(),
            suspects={},
            memory=None,
            on_quarantine=quarantined.__setitem__,
            clock=_clock,
        )
    except NothingVerifies as error:
        broken = "recovers" if promise.fresh else "never lost"
        violations.append(Violation(broken, f"nothing was found to restore: {error}"))
    except Exception as error:  # whatever it is: no state justifies another error
        violations.append(Violation("recovers", f"{type(error).__name__}: {error}"))
    else:
        chosen = created.record.parent
        violations += _choice(chosen, store, recording, promise, read or unlike)
        if created.record.number <= promise.generation:
            told = f"generation {created.record.number} is created, and {promise.generation} was there"
            violations.append(Violation("number used once", told))
    for name in sorted(quarantined.keys() - damaged.keys()):
        violations.append(Violation("rightly quarantined", f"{name}, for {quarantined[name]!r}, and it is whole"))
    return Verdict(chosen, tuple(sorted(quarantined)), tuple(violations))


def damage(tree: Tree, there: Sequence[str], recording: Recording[Any]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of each directory of a checkpoint that is not all that was saved."""
    for name in there:
        folder = _folder(tree, CHECKPOINTS_DIR).get(name)
        if parse_checkpoint_name(name) is None or folder is None or isinstance(folder, bytes):
            continue
        prefix = f"{CHECKPOINTS_DIR}/{name}/"
        for path, contents in recording.expected.items():
            if path.startswith(prefix) and folder.get(path.removeprefix(prefix)) not in contents:
                yield name, path
                break


def _structure(
    tree: Tree,
    there: Sequence[str],
    counting: Collection[str],
    recording: Recording[Any],
    promise: Promise,
    damaged: Mapping[str, str],
) -> Iterator[Violation]:
    checkpoints = _folder(tree, CHECKPOINTS_DIR)
    for where, folder in [
        *((f"{CHECKPOINTS_DIR}/{name}", folder) for name, folder in checkpoints.items()),
        (GENERATIONS_DIR, _folder(tree, GENERATIONS_DIR)),
        (QUARANTINE_DIR, _folder(tree, QUARANTINE_DIR)),
    ]:
        for name, content in folder.items() if not isinstance(folder, bytes) else ():
            path = f"{where}/{name}"
            allowed = recording.expected.get(path)
            if allowed is None:
                continue
            created = where == GENERATIONS_DIR and int(name.partition(".")[0]) <= promise.generation
            if content not in (allowed[-1:] if created else allowed):
                yield Violation("never half", f"{path} has other bytes than were written ({len(content)})")
    for name, path in damaged.items():
        if MANIFEST_FILE in _folder(checkpoints, name) and name in counting:
            yield Violation("commit means whole", f"{path} is missing or has other bytes")
    for name in sorted(promise.kept):
        if name in damaged or name not in there:
            yield Violation("kept", f"{name} was committed, and {damaged.get(name, 'its directory')} is not there")


def _eligible(store: Store, begun: Collection[int]) -> set[str]:
    scan = RunArchive(store).scan(begun=begun, manifests=False)
    return {record.name for record in lineage.eligible(scan.generations, scan.checkpoints)}


def _choice(
    chosen: str | None, store: Store, recording: Recording[Any], promise: Promise, read: Callable[..., str]
) -> Iterator[Violation]:
    if chosen is None:
        if not promise.fresh:
            yield Violation("never fresh", f"it starts afresh, and {_names(promise.acceptable)} was committed")
        return
    if chosen not in promise.acceptable:
        yield Violation("never lost", f"{chosen} is chosen, and {_names(promise.acceptable)} was committed")
    if told := read(store, chosen, recording.images.get(chosen, ())):
        yield Violation("never torn", f"{chosen} is chosen, and {told}")


def unlike(store: Store, name: str, images: tuple[bytes, ...]) -> str:
    """Read a checkpoint as its ranks do, and say in what it differs from the images that were saved."""
    try:
        for rank, image in enumerate(images):
            reader = CheckpointReader(store, name, rank)
            saved = parse_header(image)
            if reader.document() != saved.document:
                return f"the document of rank {rank} differs"
            for record in saved.tensors.values():
                tensor = reader.fetch(record.name, offsets=record.offsets, shape=record.shape)
                found = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                if found.tobytes() != image[record.start : record.stop]:
                    return f"{record.name} of rank {rank} has other bytes than were saved, and the reader took them"
    except Exception as error:  # as above
        return f"its reader says {type(error).__name__}: {error}"
    return "" if images else "it was never saved"


def _folder(tree: Tree, name: str) -> Tree:
    found = tree.get(name, {})
    return found if not isinstance(found, bytes) else {}


def _names(names: frozenset[str]) -> str:
    return " or ".join(sorted(names)) or "nothing"


def _clock() -> float:
    return 1765000000.0
