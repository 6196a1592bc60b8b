"""What it costs to write a snapshot to storage and to read it again, beside what the machine can do.

    python tests/benchmarks/persist.py [--mib 512] [--tensors 244] [--rounds 7] [--tensor-counts 200 5000 20000]
        [--directory DIR] [--json]

One rank's shard, in a slot as a keeper has it. In each round all arms run, in an order that is drawn anew. "bare" is a
loop that does nothing but write or read the same bytes with O_DIRECT in blocks of 8 MiB, and fsync; the other arms are
the product's own code. Restoring ends with all tensors copied into ones that were there before. The second table is
of states of tiny tensors: what each one costs.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from workers.checkpoint import huge_pages, image
from workers.checkpoint.digests import BLOCK_BYTES, image_digests
from workers.checkpoint.header import PAGE_BYTES, parse_header
from workers.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_FILE,
    Manifest,
    checkpoint_dir,
    checkpoint_name,
    read_manifest,
)
from workers.checkpoint.persist import ReadBack, WrittenShard, write_shard
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import NamedTensor

CAP_BYTES_PER_SECOND = 256e6


class Bench:
    """One rank's state of so many float32 tensors, in a slot."""

    def __init__(self, directory: Path, tensors: int, elements: int) -> None:
        self.store = LocalStore(directory)
        generator = torch.Generator().manual_seed(0)
        self.live = {
            f"model.layers.{at:05d}.weight": torch.rand(elements, generator=generator) for at in range(tensors)
        }
        named = [
            NamedTensor(name=name, tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,))
            for name, tensor in self.live.items()
        ]
        layout = image.plan(named, {})
        self.slot = Slot.create(layout.image_bytes)
        self.slot.begin(rank=0, generation=1, step=0)
        self.slot.complete(layout.write(self.slot.image, named, {}))
        self.bytes = self.slot.image_bytes
        self.rounded = -(-self.bytes // PAGE_BYTES) * PAGE_BYTES
        self.content = self.slot.image[: self.bytes]
        self.digests = self.digest()
        self._attempt = 0

    def digest(self) -> tuple[str, dict[str, str]]:
        return image_digests(self.content, parse_header(self.content).tensors.values())

    def write_shard(self, read_back: ReadBack | None) -> WrittenShard:
        self.discard()
        self._attempt += 1
        return write_shard(
            self.store, self.name, 0, 1, self.slot.image, self.bytes, {}, digests=self.digests, read_back=read_back
        )

    @property
    def name(self) -> str:
        return checkpoint_name(1, 1, self._attempt)

    def discard(self) -> None:
        self.store.remove_tree(CHECKPOINTS_DIR)

    def manifest(self, written: WrittenShard) -> Manifest:
        return Manifest(
            run="bench",
            generation=1,
            step=1,
            attempt=self._attempt,
            world_size=1,
            shards=(written.shard,),
            identity={},
            progress={},
            created_at=0.0,
        )

    def commit(self) -> Path:
        """A checkpoint to restore; returns the shard's path."""
        written = self.write_shard(None)
        directory = checkpoint_dir(self.name)
        self.store.write_atomic(f"{directory}/{MANIFEST_FILE}", self.manifest(written).to_bytes())
        return self.store.local_path(f"{directory}/{written.shard.file}")

    def restore(self) -> None:
        reader = CheckpointReader(self.store, self.name, 0)
        reader.fill((name, (0,), target) for name, target in self.live.items())
        reader.close()


def faulted(size: int, *, huge: bool) -> memoryview:
    memory = huge_pages.anonymous(size) if huge else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    view = memoryview(memory)[:size]
    for at in range(0, size, BLOCK_BYTES):
        view[at : at + BLOCK_BYTES] = bytes(min(BLOCK_BYTES, size - at))
    return view


def write_bare(path: Path, memory: memoryview) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
    for at in range(0, len(memory), BLOCK_BYTES):
        os.pwrite(descriptor, memory[at : at + BLOCK_BYTES], at)
    os.fsync(descriptor)
    os.close(descriptor)


def read_bare(path: Path, memory: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for at in range(0, len(memory), BLOCK_BYTES):
        os.preadv(descriptor, [memory[at : at + BLOCK_BYTES]], at)
    os.close(descriptor)


def set_cached(path: Path, wanted: bool) -> None:
    with open(path, "rb", buffering=0) as file:
        if wanted:
            while file.read(BLOCK_BYTES):
                continue
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def throughput(directory: Path, mib: int, tensors: int, rounds: int) -> list[dict[str, Any]]:
    bench = Bench(directory, tensors, max(1, (mib << 20) // 4 // tensors))
    ordinary = faulted(bench.rounded, huge=False)
    ordinary[: bench.bytes] = bench.content
    target, huge_target = faulted(bench.rounded, huge=False), faulted(bench.rounded, huge=True)
    bare = directory / "bare"
    shard = bench.commit()
    shard = shard.rename(directory / "shard")  # the write arms delete the checkpoints before it
    writes: dict[str, Callable[[], object]] = {
        "write: bare, from ordinary pages": lambda: write_bare(bare, ordinary),
        "write: bare, from the slot": lambda: write_bare(bare, bench.slot.image[: bench.rounded]),
        "write: a shard, not read back": lambda: bench.write_shard(None),
        "write: a shard, read back": lambda: bench.write_shard(ReadBack()),
        f"write: a shard, read back at {CAP_BYTES_PER_SECOND / 1e6:.0f} MB/s": lambda: bench.write_shard(
            ReadBack(bytes_per_second_max=CAP_BYTES_PER_SECOND)
        ),
    }
    reads: dict[str, tuple[bool, Callable[[], None]]] = {
        "read, cold: bare, into ordinary pages": (False, lambda: read_bare(shard, target)),
        "read, cold: bare, into huge pages": (False, lambda: read_bare(shard, huge_target)),
        "restore, cold": (False, bench.restore),
        "restore, cached": (True, bench.restore),
    }

    def copy() -> None:
        target[: bench.bytes] = bench.content

    measured: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}

    def measure(arm: str, work: Callable[[], object]) -> None:
        began, used = time.perf_counter(), time.process_time()
        work()
        measured.setdefault(arm, []).append(time.perf_counter() - began)
        processor.setdefault(arm, []).append(time.process_time() - used)

    for _ in range(rounds):
        for arm, write in random.sample(sorted(writes.items()), len(writes)):
            measure(arm, write)
        bare.unlink()
        bench.discard()
        bench.store.make_dir(checkpoint_dir(checkpoint_name(1, 1, 0)))
        path = bench.commit()
        shard.unlink()
        os.link(path, shard)
        for arm, (is_cached, read) in random.sample(sorted(reads.items()), len(reads)):
            set_cached(shard, is_cached)
            measure(arm, read)
        measure("memcpy into faulted memory", copy)
    bench.slot.close()
    order = [*writes, *reads, "memcpy into faulted memory"]
    return [
        {
            "arm": arm,
            "bytes": bench.bytes,
            "seconds_median": statistics.median(measured[arm]),
            "seconds_min": min(measured[arm]),
            "seconds_max": max(measured[arm]),
            "processor_seconds_median": statistics.median(processor[arm]),
        }
        for arm in order
    ]


def per_tensor(directory: Path, count: int, rounds: int) -> dict[str, Any]:
    bench = Bench(directory, count, 16)
    steps: dict[str, list[float]] = {}
    manifest_bytes = 0
    for _ in range(rounds):
        times = [time.perf_counter()]

        def lap(what: str, times: list[float] = times) -> None:
            times.append(time.perf_counter())
            steps.setdefault(what, []).append(times[-1] - times[-2])

        bench.digest()
        lap("digest")
        written = bench.write_shard(ReadBack())
        lap("write")
        data = bench.manifest(written).to_bytes()
        manifest_bytes = len(data)
        bench.store.write_atomic(f"{checkpoint_dir(bench.name)}/{MANIFEST_FILE}", data)
        lap("manifest")
        read_manifest(bench.store, bench.name)
        lap("read_manifest")
        bench.restore()
        lap("restore")
    bench.slot.close()
    seconds = {what: statistics.median(found) for what, found in steps.items()}
    return {"tensors": count, "manifest_bytes": manifest_bytes, "seconds_median": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="What writing and reading a shard costs.")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=244)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensor-counts", type=int, nargs="+", default=[200, 5000, 20000])
    parser.add_argument("--directory", type=Path, help="where to write; by default in the system's temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        arms = throughput(Path(directory), options.mib, options.tensors, options.rounds)
        counts = [per_tensor(Path(directory), count, options.rounds) for count in options.tensor_counts]
    if options.json:
        print(json.dumps({"rounds": options.rounds, "throughput": arms, "tensor_counts": counts}))
        return
    table = Table("", "median s", "min to max s", "GiB/s", "processor s", title=f"{arms[0]['bytes'] / 2**20:.0f} MiB")
    for arm in arms:
        table.add_row(
            arm["arm"],
            f"{arm['seconds_median']:.3f}",
            f"{arm['seconds_min']:.3f} to {arm['seconds_max']:.3f}",
            f"{arm['bytes'] / 2**30 / arm['seconds_median']:.2f}",
            f"{arm['processor_seconds_median']:.3f}",
        )
    Console(width=120).print(table)
    steps = list(counts[0]["seconds_median"])
    tiny = Table(
        "tensors", *(f"{step.replace('_', ' ')}, us" for step in steps), "manifest, bytes", title="of each tiny tensor"
    )
    for one in counts:
        micros = [f"{1e6 * one['seconds_median'][step] / one['tensors']:.1f}" for step in steps]
        tiny.add_row(str(one["tensors"]), *micros, f"{one['manifest_bytes'] / one['tensors']:.0f}")
    Console(width=120).print(tiny)


if __name__ == "__main__":
    main()
