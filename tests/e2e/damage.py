"""Ways to damage a checkpoint, as disks, kills and people do. Each returns what the recorded reason has to match."""

import hashlib
import os
import pickle
import re
from pathlib import Path
from typing import Any

from workers.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_FILE,
    ShardRecord,
    checkpoint_dir,
    parse_checkpoint_name,
    read_manifest,
)
from workers.checkpoint.store import LocalStore


def checkpoints(run_dir: Path) -> dict[int, str]:
    """Step -> name of everything that looks like a checkpoint, for a run in which each step was saved once."""
    found = {}
    for path in (run_dir / CHECKPOINTS_DIR).iterdir():
        parsed = parse_checkpoint_name(path.name)
        if parsed is not None:
            assert parsed[0] not in found
            found[parsed[0]] = path.name
    return found


def contents(directory: Path) -> dict[str, str]:
    """File -> digest, to see that nothing was touched."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def flip_a_bit_of_a_tensor(run_dir: Path, name: str) -> str:
    shard, path = _shard(run_dir, name)
    tensor = max(shard.tensors, key=lambda record: record.stop - record.start)
    _flip(path, (tensor.start + tensor.stop) // 2)
    return f"{shard.file}.*{re.escape(repr(tensor.name))}"


def flip_a_bit_of_the_header(run_dir: Path, name: str) -> str:
    shard, path = _shard(run_dir, name, rank=0)
    _flip(path, 100)
    return f"{shard.file}.*header"


def cut_a_shard(run_dir: Path, name: str) -> str:
    shard, path = _shard(run_dir, name)
    os.truncate(path, shard.bytes - 1)
    return f"{shard.file} has {shard.bytes - 1} bytes, {shard.bytes} were committed"


def remove_a_shard(run_dir: Path, name: str) -> str:
    shard, path = _shard(run_dir, name, rank=0)
    path.unlink()
    return f"{shard.file} is missing"


def remove_the_manifest(run_dir: Path, name: str) -> str:
    (run_dir / checkpoint_dir(name) / MANIFEST_FILE).unlink()
    return f"{MANIFEST_FILE} is missing"


def flip_a_bit_of_the_manifest(run_dir: Path, name: str) -> str:
    path = run_dir / checkpoint_dir(name) / MANIFEST_FILE
    _flip(path, path.stat().st_size // 2)
    return f"{MANIFEST_FILE} (has|is|was)"


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def replace_a_shard_by_a_pickle(run_dir: Path, name: str, marker: Path) -> str:
    """Of the same length, so that only its bytes give it away."""
    shard, path = _shard(run_dir, name)
    path.write_bytes(pickle.dumps(Bomb(marker)).ljust(shard.bytes, b"\0"))
    return shard.file


def plant_pickles(run_dir: Path, marker: Path) -> None:
    """Beside every shard, and under the names that other checkpoint formats load."""
    bomb = pickle.dumps(Bomb(marker))
    for directory in (run_dir / CHECKPOINTS_DIR).iterdir():
        for file in (".metadata", "state.pkl", "checkpoint.pt", "dict_checkpoint.pkl", "rank-00000-of-00002.pt"):
            (directory / file).write_bytes(bomb)


def _shard(run_dir: Path, name: str, rank: int = 1) -> tuple[ShardRecord, Path]:
    shard = read_manifest(LocalStore(run_dir), name).shards[rank]
    return shard, run_dir / checkpoint_dir(name) / shard.file


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0b100]))
