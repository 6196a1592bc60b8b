"""Bytes that change where they lie: in shards, manifests, the ledger, generation files, snapshots in memory."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from chaos.faults.fault import Fault, Injected, Target
from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import CheckpointRecord, eligible
from orchestrator.observe.ledger import LEDGER_FILE
from workers.checkpoint.header import PAGE_BYTES
from workers.checkpoint.manifest import MANIFEST_FILE, checkpoint_dir
from workers.checkpoint.slots import HEADER_BYTES
from workers.checkpoint.store import LocalStore

Damage = Callable[[Path, random.Random], None]
_SLOT_MAGIC = b"lgslot\0\2"
_COMPLETE = (3, 4)
_SPARE_KINDS = ("cadence", "snapshot", "replicated", "save_skipped")
"""Lines that no verdict needs: a judge that has lost its evidence cannot tell whose fault that is."""


def flip_bit(path: Path, rng: random.Random) -> None:
    """One bit, anywhere in the file."""
    with open(path, "r+b") as file:
        position = rng.randrange(max(1, path.stat().st_size))
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ (1 << rng.randrange(8))]))


def cut(path: Path, rng: random.Random) -> None:
    """Lose the end of the file, as a write that never came through."""
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def tear(path: Path, rng: random.Random) -> None:
    """One page of the file is other bytes, as when a write was half done."""
    size = path.stat().st_size
    start = rng.randrange(max(1, -(-size // PAGE_BYTES))) * PAGE_BYTES
    with open(path, "r+b") as file:
        file.seek(start)
        old = file.read(min(PAGE_BYTES, size - start))
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in old))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def hide_directory(path: Path, rng: random.Random) -> None:
    path.parent.chmod(0)


def _on_checkpoint(damage: Damage, *, manifest: bool) -> Callable[[Target, random.Random], Injected | None]:
    def inject(target: Target, rng: random.Random) -> Injected | None:
        name = _victim(target)
        if name is None:
            return None
        directory = target.run_dir / checkpoint_dir(name)
        path = directory / MANIFEST_FILE if manifest else rng.choice(sorted(directory.glob("*.safetensors")))
        try:
            damage(path, rng)
        except FileNotFoundError:
            return None  # retention was faster
        return Injected(context={"checkpoint": name, "path": str(path.relative_to(target.run_dir)), "damage": True})

    return inject


def _victim(target: Target) -> str | None:
    """The newest committed checkpoint that counts, if one before it is left to go back to."""
    touched = _touched(target)
    scan = RunArchive(LocalStore(target.run_dir)).scan(fresh=False)
    good: list[CheckpointRecord] = [
        record
        for record in eligible(scan.generations, scan.checkpoints)
        if record.name not in scan.rejected and record.name not in touched
    ]
    return good[0].name if len(good) >= 2 else None


def _touched(target: Target) -> set[str]:
    found = set()
    for path in (target.run_dir / "faults").glob("*.json"):
        found.add(json.loads(path.read_text(encoding="utf-8"))["context"].get("checkpoint"))
    return found - {None}


def _flip_in_memory(target: Target, rng: random.Random) -> Injected | None:
    """In the image of a complete snapshot, through the keeper's own descriptor."""
    for keeper in target.status().get("keepers", ()):
        slots = _slots(keeper["pid"])
        if slots:
            path, image_bytes, context = rng.choice(slots)
            with open(path, "r+b", buffering=0) as memory:
                position = HEADER_BYTES + rng.randrange(image_bytes)
                memory.seek(position)
                byte = memory.read(1)
                memory.seek(position)
                memory.write(bytes([byte[0] ^ (1 << rng.randrange(8))]))
            return Injected(context={**context, "damage": True})
    return None


def _slots(pid: int) -> list[tuple[Path, int, dict[str, int]]]:
    """The complete snapshots that a keeper has: where to write, the image's length, whose it is."""
    found = []
    folder = Path(f"/proc/{pid}/fd")
    try:
        names = sorted(folder.iterdir())
    except OSError:
        return []
    for path in names:
        try:
            if "lastgood-slot" not in os.readlink(path):
                continue
            with open(path, "rb", buffering=0) as memory:
                header = memory.read(56)
        except OSError:
            continue
        state = int.from_bytes(header[8:12], "little")
        image_bytes = int.from_bytes(header[32:40], "little")
        # Before the keeper has digested it nothing could tell.
        if header.startswith(_SLOT_MAGIC) and state in _COMPLETE and image_bytes and any(header[40:56]):
            whose = {
                "rank": int.from_bytes(header[12:16], "little"),
                "generation": int.from_bytes(header[16:24], "little"),
                "step": int.from_bytes(header[24:32], "little"),
            }
            found.append((path, image_bytes, whose))
    return found


def _spoil_ledger_line(target: Target, rng: random.Random) -> Injected | None:
    """The first byte of a line changes, so that it is no JSON any more."""
    path = target.run_dir / LEDGER_FILE
    data = path.read_bytes()
    starts, position = [], 0
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n") and any(f'"kind": "{kind}"'.encode() in line for kind in _SPARE_KINDS):
            starts.append(position)
        position += len(line)
    if not starts:
        return None
    with open(path, "r+b") as file:
        file.seek(rng.choice(starts))
        file.write(bytes([data[0] ^ 1]))
    return Injected(context={"path": LEDGER_FILE})


def _not_for_root() -> str | None:
    return "this user is root, whom permissions do not stop" if os.geteuid() == 0 else None


FILE_FAULTS = (
    Fault(
        name="flip_shard",
        description="one bit changes in a shard of the newest checkpoint",
        needs="two committed checkpoints",
        inject=_on_checkpoint(flip_bit, manifest=False),
    ),
    Fault(
        name="tear_shard",
        description="one page of a shard of the newest checkpoint is other bytes: a torn write",
        needs="two committed checkpoints",
        inject=_on_checkpoint(tear, manifest=False),
    ),
    Fault(
        name="truncate_shard",
        description="a shard of the newest checkpoint loses its end",
        needs="two committed checkpoints",
        inject=_on_checkpoint(cut, manifest=False),
    ),
    Fault(
        name="delete_shard",
        description="a shard of the newest checkpoint is deleted",
        needs="two committed checkpoints",
        inject=_on_checkpoint(remove, manifest=False),
    ),
    Fault(
        name="flip_manifest",
        description="one bit changes in the newest manifest",
        needs="two committed checkpoints",
        inject=_on_checkpoint(flip_bit, manifest=True),
    ),
    Fault(
        name="truncate_manifest",
        description="the newest manifest loses its end",
        needs="two committed checkpoints",
        inject=_on_checkpoint(cut, manifest=True),
    ),
    Fault(
        name="delete_manifest",
        description="the newest manifest is deleted",
        needs="two committed checkpoints",
        inject=_on_checkpoint(remove, manifest=True),
    ),
    Fault(
        name="hide_checkpoint",
        description="the newest checkpoint's directory can't be read",
        needs="two committed checkpoints, a user other than root",
        inject=_on_checkpoint(hide_directory, manifest=True),
        available=_not_for_root,
    ),
    Fault(
        name="flip_snapshot",
        description="one bit changes in a complete snapshot in memory",
        needs="the right to write to the keeper's memory files in /proc",
        inject=_flip_in_memory,
    ),
    Fault(
        name="spoil_ledger",
        description="a line of the ledger is no JSON any more",
        inject=_spoil_ledger_line,
    ),
)
