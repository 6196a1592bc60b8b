"""Restoring from a committed checkpoint: every byte that reaches the training was compared with the manifest.

Invariants: a rank's own shard is read once, in large blocks, and checked as a whole before anything of it is used; of
other ranks' shards only the needed tensors are read, each checked by its own digest. Tensors are looked up over all
shards: a replicated tensor lies in one rank's only. What `fetch` returns is memory of its own.

Faults survived: a shard that is missing, cut short, or has any bit changed raises CheckpointDamaged, which names the
file and the tensor, so that the ladder can go one rung down. Nothing in a checkpoint is ever unpickled or executed.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import xxhash

from workers import failpoint
from workers.checkpoint import header
from workers.checkpoint.digests import image_digests
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


class StoredShards:
    """ShardBytes of a checkpoint in a store, read by one rank; CheckpointDamaged if a file is missing."""

    def __init__(self, store: Store, manifest: Manifest, rank: int, alive: Callable[[], None]) -> None:
        self._store = store
        self._alive = alive
        self._directory = checkpoint_dir(manifest.name)
        self._context = {"rank": rank, "step": manifest.step, "generation": manifest.generation}

    def whole(self, shard: ShardRecord) -> memoryview:
        path = f"{self._directory}/{shard.file}"
        return self._read(path, 0, self._size(path))

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        path = f"{self._directory}/{shard.file}"
        return self._read(path, start, min(stop, self._size(path)))

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
    """A TensorSource over one committed checkpoint, for one rank. `close` frees the memory of the rank's own shard."""

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
        self._name = name
        self._shards = shards if shards is not None else StoredShards(store, self.manifest, rank, alive)
        self._own = self.manifest.shards[rank]
        self._own_bytes: memoryview | None = None
        self._parts: dict[str, list[tuple[ShardRecord, TensorRecord]]] = {}
        # Own shard first: of equal parts that several ranks wrote, the one already in memory is taken.
        for shard in (self._own, *self.manifest.shards):
            for record in shard.tensors:
                known = self._parts.setdefault(record.name, [])
                if all((record.offsets, record.shape) != (other.offsets, other.shape) for _, other in known):
                    known.append((shard, record))

    def document(self) -> dict[str, Any]:
        """The document that this rank saved."""
        return header.parse_header(self._own_content(), self._what(self._own)).document

    def names(self) -> Collection[str]:
        """Every tensor name in the checkpoint, over all ranks."""
        return self._parts.keys()

    def fetch(self, name: str, *, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A CPU tensor of its own memory with elements `offsets` on, `shape` of them, of the whole tensor.

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
        """Forget the own shard's bytes; a later call reads them again."""
        self._own_bytes = None

    def _tensor(self, shard: ShardRecord, record: TensorRecord) -> torch.Tensor:
        """One saved part, verified, as a view of the memory it was read into."""
        if shard is self._own:
            content = self._own_content()[record.start : record.stop]
        else:
            content = self._shards.part(shard, record.start, record.stop)
            if xxhash.xxh3_128_hexdigest(content) != record.digest:
                raise self._damaged(shard, f"tensor {record.name!r} has other bytes than were committed")
        dtype = self._dtype(record)
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(record.shape)

    def _own_content(self) -> memoryview:
        """All of the own shard, compared with the manifest when it is read."""
        if self._own_bytes is None:
            content = self._shards.whole(self._own)
            if len(content) != self._own.bytes:
                raise self._damaged(self._own, f"it has {len(content)} bytes, and {self._own.bytes} were committed")
            whole, by_tensor = image_digests(content, self._own.tensors)
            if whole != self._own.digest:
                bad = [record.name for record in self._own.tensors if by_tensor[record.name] != record.digest]
                where = f"tensor {bad[0]!r} has" if bad else "its header has"
                raise self._damaged(self._own, f"{where} other bytes than were committed")
            self._own_bytes = content
        return self._own_bytes

    def _dtype(self, record: TensorRecord) -> torch.dtype:
        try:
            return DTYPES[record.dtype]
        except KeyError:
            raise CheckpointDamaged(f"tensor {record.name!r} is of the unknown type {record.dtype!r}") from None

    def _what(self, shard: ShardRecord) -> str:
        return f"{checkpoint_dir(self._name)}/{shard.file}"

    def _damaged(self, shard: ShardRecord, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self._what(shard)} is damaged: {reason}")


def _window(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - zero, high - zero) for low, high, zero in zip(begin, end, origin, strict=True))
