"""Restoring from a checkpoint, or from snapshots in memory: no restore ends well in which a byte was not compared with
the digest of what was saved.

Invariants: a rank's tensors are filled in the order in which they lie in their shard, a block at a time: each piece is
digested and copied while the next blocks are read, so that no memory for the shard is needed. Snapshots in memory have
one digest for all of a shard, which is compared before anything of it is used. Tensors are looked up over all shards: a
replicated tensor lies in one rank's only.

Faults survived: a shard that is missing, of another length, or has any bit changed raises CheckpointDamaged, which
names the file and the tensor, so that the ladder can go one rung down; some tensors may have its bytes then. Nothing in
a checkpoint is ever unpickled or executed.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import xxhash

from workers import failpoint
from workers.checkpoint import header
from workers.checkpoint.image import DTYPES
from workers.checkpoint.manifest import Manifest, ShardRecord, TensorRecord, checkpoint_dir, read_manifest
from workers.checkpoint.read_range import Block, read_range, stream_range
from workers.checkpoint.scatter import Target, runs, scatter
from workers.checkpoint.store import Store
from workers.errors import CallerError, CheckpointDamaged


class ShardBytes(Protocol):
    """Where shards are read from: files, or snapshots that are still in memory. Nothing is digested here."""

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        """Bytes start to stop of a shard; fewer if it ends before."""

    def blocks(self, shard: ShardRecord, start: int, stop: int) -> Iterator[Block]:
        """The same in order; each block is valid until the next one is asked for."""

    def what(self, shard: ShardRecord) -> str:
        """Names a shard in errors."""

    def close(self) -> None:
        """Give back what was taken to read them."""


class StoredShards:
    """ShardBytes of a checkpoint in a store, read by one rank; CheckpointDamaged if a file is missing or has another
    length than it was saved with."""

    def __init__(self, store: Store, manifest: Manifest, rank: int, alive: Callable[[], None]) -> None:
        self._store = store
        self._alive = alive
        self._directory = checkpoint_dir(manifest.name)
        self._context = {"rank": rank, "step": manifest.step, "generation": manifest.generation}

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        self._check_size(shard)
        return read_range(self._store, self.what(shard), start, stop, before_block=self._before_block)

    def blocks(self, shard: ShardRecord, start: int, stop: int) -> Iterator[Block]:
        self._check_size(shard)
        return stream_range(self._store, self.what(shard), start, stop, before_block=self._before_block)

    def what(self, shard: ShardRecord) -> str:
        return f"{self._directory}/{shard.file}"

    def close(self) -> None:
        return  # files are open while they are read

    def _check_size(self, shard: ShardRecord) -> None:
        path = self.what(shard)
        try:
            size = self._store.size(path)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing") from None
        if size != shard.bytes:
            raise CheckpointDamaged(f"{path} is damaged: it has {size} bytes, and {shard.bytes} were saved")

    def _before_block(self, index: int, total: int) -> None:
        self._alive()
        failpoint.hit("restore.read", index=index, total=total, **self._context)


class CheckpointReader:
    """A TensorSource over one checkpoint, for one rank. `close` gives back what the shards' bytes came from."""

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
        self._compared: dict[int, memoryview] = {}  # by rank, shards that were compared as a whole
        self._parts: dict[str, list[tuple[ShardRecord, TensorRecord]]] = {}
        # Own shard first: of equal parts that several ranks wrote, its own is taken.
        for shard in (self._own, *self.manifest.shards):
            for record in shard.tensors:
                known = self._parts.setdefault(record.name, [])
                if all((record.offsets, record.shape) != (other.offsets, other.shape) for _, other in known):
                    known.append((shard, record))

    def document(self) -> dict[str, Any]:
        """The document that this rank saved."""
        return header.parse_header(self._header(self._own), self._shards.what(self._own)).document

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

    def fill(self, wanted: Iterable[tuple[str, Sequence[int], torch.Tensor]]) -> None:
        """Overwrite each tensor with the saved elements from its offsets on, of the whole tensor of that name.

        Raises as `fetch`, and CheckpointDamaged for a tensor of another type than was saved.
        """
        streams: dict[int, list[Target]] = {}
        taken: set[tuple[str, tuple[int, ...]]] = set()
        for name, offsets, tensor in wanted:
            key = (name, tuple(offsets))
            stored = self._dtype(self._parts[name][0][1])
            if stored != tensor.dtype:
                raise CheckpointDamaged(f"{name}: the shard holds {stored}, but the document says {tensor.dtype}")
            same = (one for one in self._parts[name] if (one[1].offsets, one[1].shape) == (key[1], tuple(tensor.shape)))
            shard, record = next(same, (None, None))
            if shard is None or record is None or not tensor.is_contiguous() or key in taken:
                tensor.copy_(self.fetch(name, offsets=offsets, shape=tensor.shape))
                continue
            taken.add(key)
            if record.start < record.stop:
                streams.setdefault(shard.rank, []).append(Target.of(record, tensor))
        for rank, targets in sorted(streams.items()):
            self._fill_from(self.manifest.shards[rank], targets)

    def close(self) -> None:
        """Forget what was read; a later call reads again."""
        self._compared.clear()
        self._shards.close()

    def _fill_from(self, shard: ShardRecord, targets: list[Target]) -> None:
        by_tensor = _is_digested_by_tensor(shard)
        for run in runs(targets):
            start, stop = run[0].start, run[-1].stop
            blocks = self._shards.blocks(shard, start, stop) if by_tensor else iter([self._content(shard)[start:stop]])
            if bad := scatter(blocks, run, digests=by_tensor):
                raise self._damaged(shard, f"tensor {bad!r} has other bytes than were saved")

    def _tensor(self, shard: ShardRecord, record: TensorRecord) -> torch.Tensor:
        """One saved part, compared with its digest, as a view of the memory it lies in."""
        if _is_digested_by_tensor(shard):
            content = self._shards.part(shard, record.start, record.stop)
            if xxhash.xxh3_128_hexdigest(content) != record.digest:
                raise self._damaged(shard, f"tensor {record.name!r} has other bytes than were saved")
        else:
            content = self._content(shard)[record.start : record.stop]
        dtype = self._dtype(record)
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(record.shape)

    def _header(self, shard: ShardRecord) -> memoryview:
        if not _is_digested_by_tensor(shard):
            return self._content(shard)
        content = self._shards.part(shard, 0, min((one.start for one in shard.tensors), default=shard.bytes))
        if xxhash.xxh3_128_hexdigest(content) != shard.header_digest:
            raise self._damaged(shard, "its header has other bytes than were saved")
        return content

    def _content(self, shard: ShardRecord) -> memoryview:
        """All of a shard, compared with its digest when it is first asked for."""
        content = self._compared.get(shard.rank)
        if content is None:
            digester = xxhash.xxh3_128()
            for block in self._shards.blocks(shard, 0, shard.bytes):
                assert isinstance(block, memoryview), "of files all digests are known"
                digester.update(block)
            if digester.hexdigest() != shard.digest:
                raise self._damaged(shard, "it has other bytes than were saved")
            content = self._compared[shard.rank] = self._shards.part(shard, 0, shard.bytes)
        return content

    def _dtype(self, record: TensorRecord) -> torch.dtype:
        try:
            return DTYPES[record.dtype]
        except KeyError:
            raise CheckpointDamaged(f"tensor {record.name!r} is of the unknown type {record.dtype!r}") from None

    def _damaged(self, shard: ShardRecord, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self._shards.what(shard)} is damaged: {reason}")


def _is_digested_by_tensor(shard: ShardRecord) -> bool:
    """Else only the digest of the whole is known."""
    return bool(shard.header_digest)


def _lies_within(offsets: Sequence[int], shape: Sequence[int], record: TensorRecord) -> bool:
    return all(
        theirs <= ours and ours + size <= theirs + length
        for ours, size, theirs, length in zip(offsets, shape, record.offsets, record.shape, strict=True)
    )


def _window(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - zero, high - zero) for low, high, zero in zip(begin, end, origin, strict=True))
