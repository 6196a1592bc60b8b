"""Shards that are still in memory: one set of snapshots, as this node's keeper and others hold them.

Invariants: of a shard that is here the slot's own memory is read, not a copy; of one that is elsewhere, what is asked
for is brought. Its digest is the one that the keeper found when the snapshot was complete. The keepers free none of
these slots before a newer set is complete on all ranks, which no rank that still reads can have added to.

Faults survived: a keeper that is lost while it is asked (OSError), or a shard that cannot be had (CheckpointDamaged).
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers import failpoint
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import Manifest, ShardRecord, shard_file, unpack_shard
from workers.checkpoint.slots import Slot
from workers.errors import CheckpointDamaged
from workers.messages import RestoreOrder
from workers.wire import Channel

BRING_BYTES_MAX = 256 << 20
_ANSWER_SECONDS = 120.0
_PART_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One rank's snapshot in the memory of `slot`, which is to be closed if it was `mapped_here`."""

    slot: Slot
    mapped_here: bool
    bytes: int
    digest: str


class HeldShards:
    """ShardBytes over the snapshots of one set, by rank; read by `rank`. `alive` is called while a shard is read.

    `elsewhere`: those that this node's `keeper` has others send, when they are asked for.
    """

    def __init__(
        self,
        rank: int,
        generation: int,
        step: int,
        shards: Mapping[int, HeldShard],
        alive: Callable[[], None],
        elsewhere: Mapping[int, ShardRecord] | None = None,
        keeper: Channel | None = None,
    ) -> None:
        self._rank = rank
        self._generation = generation
        self._step = step
        self._shards = shards
        self._alive = alive
        self._elsewhere = elsewhere or {}
        self._keeper = keeper

    def manifest(self, world_size: int) -> Manifest:
        """What the slots hold, as a manifest describes it; a shard that is not here has no tensors in it.

        No tensor has a digest of its own. Raises CheckpointDamaged if a slot's image is none.
        """
        return Manifest(
            run="",
            generation=self._generation,
            step=self._step,
            attempt=0,
            world_size=world_size,
            shards=tuple(self._record(rank, world_size) for rank in range(world_size)),
            identity={},
            progress={},
            created_at=0.0,
        )

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        if shard.rank in self._elsewhere:
            return self._bring(shard, start, min(stop, shard.bytes))
        held = self._shards[shard.rank]
        return held.slot.image[start : min(stop, held.bytes)]

    def blocks(self, shard: ShardRecord, start: int, stop: int) -> Iterator[memoryview]:
        stop = min(stop, shard.bytes)
        size = BRING_BYTES_MAX if shard.rank in self._elsewhere else BLOCK_BYTES
        total = -(-(stop - start) // size)
        for index in range(total):
            self._alive()
            failpoint.hit(
                "restore.read", index=index, total=total, rank=self._rank, step=self._step, generation=self._generation
            )
            yield self.part(shard, start + index * size, min(start + (index + 1) * size, stop))

    def what(self, shard: ShardRecord) -> str:
        return f"rank {shard.rank}'s snapshot in memory of step {self._step}, generation {self._generation},"

    def close(self) -> None:
        for held in self._shards.values():
            if held.mapped_here:
                held.slot.close()
        self._shards = {}

    def _bring(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        """From another keeper; what is large comes in blocks, so that neither keeper needs memory for all of it."""
        if stop - start <= BRING_BYTES_MAX:
            return self._bring_block(shard, start, stop)
        content = memoryview(mmap.mmap(-1, stop - start))
        for first in range(start, stop, BRING_BYTES_MAX):
            self._alive()
            last = min(first + BRING_BYTES_MAX, stop)
            content[first - start : last - start] = self._bring_block(shard, first, last)
        return content

    def _bring_block(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        assert self._keeper is not None
        self._keeper.send("part", rank=shard.rank, start=start, stop=stop)
        message, fds = _answer(self._keeper, "part", _PART_SECONDS)
        if message["problem"]:
            raise CheckpointDamaged(f"{self.what(shard)} cannot be brought: {message['problem']}")
        return _content(fds[0])

    def _record(self, rank: int, world_size: int) -> ShardRecord:
        if rank in self._elsewhere:
            return self._elsewhere[rank]
        file = shard_file(rank, world_size)
        held = self._shards.get(rank)
        if held is None:
            return ShardRecord(file=file, rank=rank, bytes=0, digest="", verified_from="memory", tensors=())
        parsed = parse_header(held.slot.image[: held.bytes], f"the snapshot of rank {rank}")
        return ShardRecord(
            file=file,
            rank=rank,
            bytes=held.bytes,
            digest=held.digest,
            verified_from="memory",
            tensors=tuple(parsed.tensors.values()),
        )


def fetch(
    keeper: Channel,
    rank: int,
    order: RestoreOrder,
    world_size: int,
    *,
    mapped: Sequence[Slot],
    alive: Callable[[], None],
) -> HeldShards:
    """Ask the keeper for the shards of a set; of slots that are `mapped` already no second mapping is made.

    Raises CheckpointDamaged if this rank's is not among them, or another cannot be had from where it should be;
    OSError if the keeper does not answer.
    """
    keeper.send("fetch", generation=order.generation, step=order.step, world_size=world_size, places=order.places)
    by_memory = {slot.memory_id: slot for slot in mapped}
    shards: dict[int, HeldShard] = {}
    elsewhere: dict[int, ShardRecord] = {}
    what = f"snapshot of step {order.step}, generation {order.generation}"
    while True:
        message, fds = _answer(keeper, ("shard", "remote", "handed_out"), _ANSWER_SECONDS)
        alive()
        if message["kind"] == "handed_out":
            break
        if message["kind"] == "remote":
            elsewhere[message["rank"]] = unpack_shard(bytes(_content(fds[0])), f"rank {message['rank']}'s {what}")
            continue
        slot = Slot.from_fd(fds[0], populate=False)
        known = by_memory.get(slot.memory_id)
        if known is not None:
            slot.close()
        shards[message["rank"]] = HeldShard(
            slot=known or slot, mapped_here=known is None, bytes=message["bytes"], digest=message["digest"]
        )
    if message["problem"]:
        raise CheckpointDamaged(f"some shards of the {what} cannot be had from their keepers: {message['problem']}")
    if rank not in shards and rank not in elsewhere:
        raise CheckpointDamaged(f"the keeper of this node does not hold rank {rank}'s {what}")
    return HeldShards(rank, order.generation, order.step, shards, alive, elsewhere, keeper)


def _answer(keeper: Channel, kinds: str | tuple[str, ...], timeout_seconds: float) -> tuple[dict[str, Any], list[int]]:
    """The next message of these kinds; others are late answers to what was not waited for."""
    while True:
        answer = keeper.receive(timeout_seconds)
        if answer is None:
            raise OSError("the keeper closed the connection")
        if answer[0]["kind"] in kinds:
            return answer


def _content(fd: int) -> memoryview:
    """The bytes of an anonymous file, which lives as long as they are used."""
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size)) if size else memoryview(bytearray())
    finally:
        os.close(fd)
