"""From a snapshot in memory to a verified shard on storage. Runs in the keeper, without torch.

Protocol, in this order: write the image to <name>.tmp past the page cache; set its exact length; fsync; rename; fsync
the directory; read the file back and compare with the digests of the snapshot. Only then is there a receipt. Reading
back may be slowed down, or left out: then the shard says so.

Faults survived: a kill at any point (a .tmp, or a file without a receipt, is left in an attempt that nothing
restores); a full disk (the .tmp is removed and the error raised, for another attempt); a device that stores other bytes
than it was given; file systems without O_DIRECT. A name that exists is never written to.
"""

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import xxhash

from workers import failpoint
from workers.checkpoint import header
from workers.checkpoint.digests import BLOCK_BYTES, FileDigests, file_digests
from workers.checkpoint.files import closing_file
from workers.checkpoint.manifest import ShardRecord, VerifiedFrom, checkpoint_dir, shard_file
from workers.checkpoint.pace import Pace
from workers.checkpoint.store import Store
from workers.errors import CheckpointDamaged


class ShardNotVerified(CheckpointDamaged):
    """The bytes read back from storage are not the bytes of the snapshot; this attempt must not be committed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """How a shard is read back. bytes_per_second_max: None for as fast as the device gives.

    Reading needs the device, and hardly anything else: it goes past the page cache, where the training's data may be.
    As long as it lasts the next save waits, and a failure loses the steps since the save before. So it is fast unless
    the device is needed for something better.
    """

    bytes_per_second_max: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A durable shard, and how long it took: until it was durable, and then until it had been read back."""

    shard: ShardRecord
    durable_seconds: float
    verify_seconds: float


def write_shard(
    store: Store,
    checkpoint: str,
    rank: int,
    world_size: int,
    image: memoryview,
    image_bytes: int,
    context: Mapping[str, Any],
    *,
    digests: tuple[str, dict[str, str]],
    read_back: ReadBack | None,
) -> WrittenShard:
    """Persist one rank's image into the directory of `checkpoint` (a name) and verify it, if it is to be read back.

    `image` is page-aligned, at least `image_bytes` rounded up to 4096 long, and must not change meanwhile. `context`
    goes to the fault points. `digests` are those of the image, see `image_digests`. Raises CheckpointDamaged if the
    image is torn, ShardNotVerified (it names the tensor) if the storage returns other bytes, FileExistsError if this
    attempt's shard was written before, and OSErrors.
    """
    directory = checkpoint_dir(checkpoint)
    path = f"{directory}/{shard_file(rank, world_size)}"
    began = time.monotonic()
    content = image[:image_bytes]
    parsed = header.parse_header(content, what=f"the snapshot for {path}")
    if parsed.image_bytes != image_bytes:
        raise CheckpointDamaged(f"the snapshot for {path} has {image_bytes} bytes, its header {parsed.image_bytes}")
    whole, by_tensor = digests
    if by_tensor.keys() != parsed.tensors.keys():
        raise CheckpointDamaged(f"the digests given for {path} are of other tensors than its header has")
    failpoint.hit("persist.make_dir", **context)
    store.make_dir(directory)
    persist(store, path, image, image_bytes, context=context)
    durable = time.monotonic()
    verified_from: VerifiedFrom = "nothing"
    if read_back is not None:
        failpoint.hit("persist.readback", **context)
        rate = read_back.bytes_per_second_max
        found = file_digests(store, path, pace=None if rate is None else Pace(rate))
        if (found.bytes, found.digest) != (image_bytes, whole):
            raise ShardNotVerified(_difference(store, path, found, image_bytes, parsed, by_tensor))
        verified_from = found.verified_from
    verified = time.monotonic()
    failpoint.hit("persist.receipt", **context)
    shard = ShardRecord(
        file=shard_file(rank, world_size),
        rank=rank,
        bytes=image_bytes,
        digest=whole,
        header_digest=xxhash.xxh3_128_hexdigest(content[: parsed.data_start]),
        verified_from=verified_from,
        tensors=tuple(dataclasses.replace(record, digest=by_tensor[name]) for name, record in parsed.tensors.items()),
    )
    return WrittenShard(shard=shard, durable_seconds=durable - began, verify_seconds=verified - durable)


def persist(store: Store, path: str, image: memoryview, image_bytes: int, *, context: Mapping[str, Any]) -> None:
    """Write image[:image_bytes] durably under a new name. See `write_shard` for the arguments and errors."""
    rounded = -(-image_bytes // header.PAGE_BYTES) * header.PAGE_BYTES
    if len(image) < rounded:
        raise ValueError(f"the image has {len(image)} bytes of memory, and {rounded} are needed to write whole pages")
    failpoint.hit("persist.create", **context)
    total = -(-rounded // BLOCK_BYTES)
    with closing_file(store.begin(path, direct=True)) as file:
        try:
            for index in range(total):
                start = index * BLOCK_BYTES
                block = image[start : min(start + BLOCK_BYTES, rounded)]
                tear = partial(file.write_at, block[: len(block) // 2 // header.PAGE_BYTES * header.PAGE_BYTES], start)
                failpoint.hit("persist.block", tear, index=index, total=total, **context)
                file.write_at(block, start)
            failpoint.hit("persist.truncate", **context)
            file.truncate(image_bytes)
            failpoint.hit("persist.fsync", **context)
            file.sync()
        except OSError:
            # After a failed fsync the pages count as clean, so this file is never to be trusted; or the disk is full.
            file.discard()
            raise
        failpoint.hit("persist.rename", **context)
        file.publish()
    failpoint.hit("persist.dir_fsync", **context)
    store.sync_dir(path.rpartition("/")[0] or ".")


def _difference(
    store: Store, path: str, found: FileDigests, image_bytes: int, written: header.ShardHeader, digests: dict[str, str]
) -> str:
    """What is wrong with a shard that was read back; it is read again to find where."""
    if found.bytes != image_bytes:
        return f"{path} was read back with {found.bytes} bytes, and {image_bytes} were written"
    again = file_digests(store, path, written.tensors.values())
    bad = sorted(name for name, digest in digests.items() if again.tensors[name] != digest)
    if bad:
        where = f"in tensor {bad[0]!r}" + (f" and {len(bad) - 1} more" if bad[1:] else "")
    else:
        where = "in its header" if again.digest == found.digest else "but with other ones again the second time"
    return f"{path} was read back with other bytes than were written, {where}"
