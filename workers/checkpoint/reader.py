"""Restoring from a checkpoint, or from snapshots in memory: no byte reaches the training that was not compared with
the digest of what was saved.

Invariants: a rank's own shard is read once, in large blocks, and checked as a whole before anything of it is used; of
other ranks' shards only the needed tensors are read, each checked by its own digest, or the shard as a whole where only
that one's is known. Tensors are looked up over all shards: a replicated tensor lies in one rank's only.

Faults survived: a shard that is missing, cut short, or has any bit changed raises CheckpointDamaged, which names the
file and the tensor, so that the ladder can go one rung down. Nothing in a checkpoint is ever unpickled or executed.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import xxhash

from workers import failpoint
from workers.checkpoint import header
from workers.checkpoint.digests import BLOCK_BYTES, image_digests
from workers.checkpoint.image import DTYPES
from workers.checkpoint.manifest import Manifest, ShardRecord, TensorRecord, checkpoint_dir, read_manifest
from workers.checkpoint.read_range import read_range
from workers.checkpoint.store import Store
from workers.errors import CallerError, CheckpointDamaged


class ShardBytes(Protocol):
    """Where shards are read from: files, or snapshots that are still in memory. Nothing is checked here."""

    def whole(self, shard: ShardRecord) -> memoryview:
        """All bytes of a shard; of another length than the record's if the shard is."""

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        """Bytes start to stop of a shard; fewer if it ends before."""

    def what(self, shard: ShardRecord) -> str:
        """Names a shard in errors."""

    def close(self) -> None:
        """Give back what was taken to read them."""


class StoredShards:
    """ShardBytes of a checkpoint in a store, read by one rank; CheckpointDamaged if a file is missing."""

    def __init__(self, store: Store, manifest: Manifest, rank: int, alive: Callable[[], None]) -> None:
        self._store = store
        self._alive = alive
        self._directory = checkpoint_dir(manifest.name)
        self._context = {"rank": rank, "step": manifest.step, "generation": manifest.generation}

    def whole(self, shard: ShardRecord) -> memoryview:
        path = self.what(shard)
        return self._read(path, 0, self._size(path))

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        path = self.what(shard)
        return self._read(path, start, min(stop, self._size(path)))

    def what(self, shard: ShardRecord) -> str:
        return f"{self._directory}/{shard.file}"

    def close(self) -> None:
        return  # files are open while they are read

    def _size(self, path: str) -> int:
        try:
            return self._store.size(path)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing") from None

    def _read(self, path: str, start: int, stop: int) -> memoryview:
        def before_block(index: int, total: int) -> None:
            self._alive()
            failpoint.hit("restore.read", index=index, total=total, **self._context)

        return read_range(self._store, path, start, stop, before_block=before_block)


class CheckpointReader:
    """A TensorSource over one checkpoint, for one rank. `close` frees the memory of the shards that were read whole."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        *,
        manifest: Manifest | None = None,
        shards: ShardBytes | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises CheckpointDamaged if the manifest is not good. `shards` replaces the files of the checkpoint; `alive`
        is called for each block that is read."""
        self.manifest = manifest if manifest is not None else read_manifest(store, name)
        if not 0 <= rank < self.manifest.world_size:
            raise CallerError(
                f"checkpoint {name} was saved by {self.manifest.world_size} ranks, so it has nothing for rank {rank}"
            )
        self._shards = shards if shards is not None else StoredShards(store, self.manifest, rank, alive)
        self._own = self.manifest.shards[rank]
        self._whole: dict[int, memoryview] = {}  # by rank
        self._alive = alive
        self._parts: dict[str, list[tuple[ShardRecord, TensorRecord]]] = {}
        # Own shard first: of equal parts that several ranks wrote, the one already in memory is taken.
        for shard in (self._own, *self.manifest.shards):
            for record in shard.tensors:
                known = self._parts.setdefault(record.name, [])
                if all((record.offsets, record.shape) != (other.offsets, other.shape) for _, other in known):
                    known.append((shard, record))

    def document(self) -> dict[str, Any]:
        """The document that this rank saved."""
        return header.parse_header(self._content(self._own), self._shards.what(self._own)).document

    def names(self) -> Collection[str]:
        """Every tensor name in the checkpoint, over all ranks."""
        return self._parts.keys()

    def fetch(self, name: str, *, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A CPU tensor with elements `offsets` on, `shape` of them, of the whole tensor. Not to be written to, and only
        good until `close`: it may be a view of the shard.

        Put together from as many saved parts as it takes. Raises KeyError if they do not cover it, CheckpointDamaged if
        the bytes are not the committed ones.
        """
        parts = self._parts[name]
        first = parts[0][1]
        offsets, shape = tuple(offsets), tuple(shape)
        if not len(offsets) == len(shape) == len(first.global_shape) or any(
            offset < 0 or offset + size > total
            for offset, size, total in zip(offsets, shape, first.global_shape, strict=True)
        ):
            raise KeyError(f"{name}: {shape} at {offsets} is not within its saved shape {first.global_shape}")
        if math.prod(shape):
            for shard, record in parts:
                if _lies_within(offsets, shape, record):
                    end = [start + size for start, size in zip(offsets, shape, strict=True)]
                    return self._tensor(shard, record)[_window(offsets, end, record.offsets)]
        result = torch.empty(shape, dtype=self._dtype(first))
        missing = result.numel()
        for shard, record in parts:
            begin = [max(ours, theirs) for ours, theirs in zip(offsets, record.offsets, strict=True)]
            end = [
                min(ours + size, theirs + length)
                for ours, size, theirs, length in zip(offsets, shape, record.offsets, record.shape, strict=True)
            ]
            if missing == 0 or any(low >= high for low, high in zip(begin, end, strict=True)):
                continue
            target = result[_window(begin, end, offsets)]
            target.copy_(self._tensor(shard, record)[_window(begin, end, record.offsets)])
            missing -= target.numel()
        if missing:
            raise KeyError(f"{name}: no saved part covers {missing} elements of {shape} at {offsets}")
        return result

    def close(self) -> None:
        """Forget the bytes of whole shards; a later call reads files again."""
        self._whole.clear()
        self._shards.close()

    def _tensor(self, shard: ShardRecord, record: TensorRecord) -> torch.Tensor:
        """One saved part, verified, as a view of the memory it was read into."""
        if shard is self._own or not record.digest:
            content = self._content(shard)[record.start : record.stop]
        else:
            content = self._shards.part(shard, record.start, record.stop)
            if xxhash.xxh3_128_hexdigest(content) != record.digest:
                raise self._damaged(shard, f"tensor {record.name!r} has other bytes than were saved")
        dtype = self._dtype(record)
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(record.shape)

    def _content(self, shard: ShardRecord) -> memoryview:
        """All of a shard, compared with its digest when it is read."""
        content = self._whole.get(shard.rank)
        if content is None:
            content = self._shards.whole(shard)
            if len(content) != shard.bytes:
                raise self._damaged(shard, f"it has {len(content)} bytes, and {shard.bytes} were saved")
            if self._digest(content) != shard.digest:
                raise self._damaged(shard, f"{self._place_of_damage(shard, content)} other bytes than were saved")
            self._whole[shard.rank] = content
        return content

    def _digest(self, content: memoryview) -> str:
        digester = xxhash.xxh3_128()
        for start in range(0, len(content), BLOCK_BYTES):
            self._alive()
            digester.update(content[start : start + BLOCK_BYTES])
        return digester.hexdigest()

    def _place_of_damage(self, shard: ShardRecord, content: memoryview) -> str:
        if not all(record.digest for record in shard.tensors):
            return "it has"
        by_tensor = image_digests(content, shard.tensors)[1]
        bad = [record.name for record in shard.tensors if by_tensor[record.name] != record.digest]
        return f"tensor {bad[0]!r} has" if bad else "its header has"

    def _dtype(self, record: TensorRecord) -> torch.dtype:
        try:
            return DTYPES[record.dtype]
        except KeyError:
            raise CheckpointDamaged(f"tensor {record.name!r} is of the unknown type {record.dtype!r}") from None

    def _damaged(self, shard: ShardRecord, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self._shards.what(shard)} is damaged: {reason}")


def _lies_within(offsets: Sequence[int], shape: Sequence[int], record: TensorRecord) -> bool:
    return all(
        theirs <= ours and ours + size <= theirs + length
        for ours, size, theirs, length in zip(offsets, shape, record.offsets, record.shape, strict=True)
    )


def _window(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - zero, high - zero) for low, high, zero in zip(begin, end, origin, strict=True))
