"""Whether a cell's run kept what lastgood promises, from what it left: the run directory, the records of the faults
that were fired, and what the ranks were told. Each guarantee is one check, whose complaint quotes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.archive import RunArchive, ScanResult
from orchestrator.decide import ladder, lineage
from orchestrator.decide.lineage import CheckpointRecord
from orchestrator.observe.ledger import begun_generations, committed_checkpoints, read_ledger
from workers.checkpoint.manifest import read_manifest
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.store import LocalStore
from workers.checkpoint.verify import verify_checkpoint
from workers.errors import LastgoodError

Digests = Mapping[str, str]
"""Shard and tensor to the digest of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is left of a run. `broken` lists violations of safety, `restored` what each generation began from."""

    broken: tuple[str, ...]
    restored: tuple[str, ...]


def final_digests(run_dir: Path, steps: int) -> Digests:
    """Of every tensor in the checkpoint that the ladder chooses, read whole through the reader that ranks use.

    AssertionError, or an error of the reader, if that is not of step `steps`, the last one.
    """
    store = LocalStore(run_dir)
    ledger = read_ledger(run_dir / "ledger.jsonl")
    choice = RunArchive(store).select(committed_checkpoints(ledger), begun=begun_generations(ledger)).choice
    assert isinstance(choice, ladder.Restore), f"the ladder chooses {choice}"
    assert choice.step == steps, f"the ladder chooses {choice.name}, and the last step is {steps}"
    manifest = read_manifest(store, choice.name)
    digests = {}
    for shard in manifest.shards:
        reader = CheckpointReader(store, choice.name, shard.rank, manifest=manifest)
        assert reader.document()["progress"]["step"] == steps
        for tensor in shard.tensors:
            reader.fetch(tensor.name, offsets=tensor.offsets, shape=tensor.shape)
            digests[f"{shard.file}: {tensor.name}"] = tensor.digest
        reader.close()
    return digests


def look(
    run_dir: Path,
    told: Sequence[Mapping[str, Any]],
    *,
    keep_last: int,
    steps: int,
    reference: Digests,
    finished: bool,
) -> Seen:
    """Judge a run of `steps` steps. `told`: generation, step and Unix time of each commit that was acknowledged.
    `reference`: the digests of the run that nobody disturbed. An unfinished run is judged for safety alone."""
    store = LocalStore(run_dir)
    ledger = read_ledger(run_dir / "ledger.jsonl")
    scan = RunArchive(store).scan(committed_checkpoints(ledger), begun=begun_generations(ledger))
    broken = [
        *_torn(store, scan, ledger),
        *_lost(scan, told, keep_last),
        *_stale(scan, ledger, told),
    ]
    if finished:
        broken += [*_floor(store, scan, told, keep_last), *_inexact(run_dir, steps, reference)]
    restored = tuple(
        f"generation {record.number}: step {record.restored_step} ({record.source})" for record in scan.generations
    )
    return Seen(broken=tuple(broken), restored=restored)


def _torn(store: LocalStore, scan: ScanResult, ledger: list[dict[str, Any]]) -> list[str]:
    """Nothing that counts as committed has other bytes than were saved, but for what was set aside for it."""
    problems = []
    for record in scan.checkpoints:
        if record.name not in scan.quarantined and (found := verify_checkpoint(store, record.name)):
            problems.append(
                f"never torn: what is committed is whole; {record.name}: {found[0].file}: {found[0].reason}"
            )
    committed = {entry["checkpoint"]: entry["seq"] for entry in reversed(ledger) if entry["kind"] == "commit"}
    manifests = {record.name for record in scan.checkpoints}
    for entry in ledger:
        name = entry.get("checkpoint") if entry["kind"] == "restored" else None
        if name is not None and committed.get(name, entry["seq"]) >= entry["seq"] and name not in manifests:
            problems.append(f"never torn: only what is committed is restored; {name} was restored and is not")
    return problems


def _lost(scan: ScanResult, told: Sequence[Mapping[str, Any]], keep_last: int) -> list[str]:
    """What ranks were told to be committed is there, unless there are as many newer ones as retention keeps."""
    there = sorted((record.generation, record.step) for record in scan.checkpoints)
    return [
        f"never lost: a commit that was acknowledged stays; step {key[1]} of generation {key[0]} is gone"
        for key in sorted({(one["generation"], one["step"]) for one in told})
        if key not in there and sum(other > key for other in there) < keep_last
    ]


def _stale(scan: ScanResult, ledger: list[dict[str, Any]], told: Sequence[Mapping[str, Any]]) -> list[str]:
    """A generation restores the newest state that was acknowledged before it began, unless that was set aside as
    damaged, or is on probation because the run had failed after it again and again."""
    suspected = {entry["checkpoint"] for entry in ledger if entry["kind"] in ("quarantine", "probation")}
    aside = {lineage.state_of(name) for name in {*scan.quarantined, *suspected}}
    problems = []
    for record in scan.generations:
        before = [other for other in scan.generations if other.number < record.number]
        known = [
            CheckpointRecord(name=f"{one['step']}", generation=one["generation"], step=one["step"], attempt=1)
            for one in told
            if one["at"] < record.created_at and (one["generation"], one["step"]) not in aside
        ]
        newest = lineage.newest(before, known)
        restored = (record.parent_generation or 0, record.restored_step)
        if newest is not None and restored < (newest.generation, newest.step):
            problems.append(
                f"newest verified wins; generation {record.number} restored step {record.restored_step}, "
                f"and step {newest.step} of generation {newest.generation} was committed"
            )
    return problems


def _floor(store: LocalStore, scan: ScanResult, told: Sequence[Mapping[str, Any]], keep_last: int) -> list[str]:
    """As many checkpoints as are to be kept are there and whole."""
    good = [record for record in scan.checkpoints if not verify_checkpoint(store, record.name)]
    kept = lineage.eligible(scan.generations, good)
    wanted = min(keep_last, len({one["step"] for one in told}))
    if len(kept) >= wanted:
        return []
    return [f"retention keeps the newest {wanted} checkpoints; whole are only {[record.name for record in kept]}"]


def _inexact(run_dir: Path, steps: int, reference: Digests) -> list[str]:
    """The last step is bit by bit the one of the run that nobody disturbed."""
    try:
        found = final_digests(run_dir, steps)
    except (AssertionError, LastgoodError, OSError, KeyError) as error:
        return [f"exact: the run ends with its last step restorable; {error}"]
    if found == reference:
        return []
    other = sorted(name for name in found.keys() | reference.keys() if found.get(name) != reference.get(name))
    return [f"exact: the last step equals the undisturbed run's, bit by bit; {len(other)} tensors differ: {other[0]}"]
