"""Shards that are still in memory: the slots of one set of snapshots, as this node's keeper holds them.

Invariants: what is read is the slots' own memory, not a copy; its digest is the one that the keeper found when the
snapshot was complete. The keeper frees none of these slots before a newer set is complete on all ranks, which no rank
that still reads can have added to.

Faults survived: a keeper that is lost while it is asked (OSError), or has nothing of this rank (CheckpointDamaged).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workers import failpoint
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import Manifest, ShardRecord, shard_file
from workers.checkpoint.slots import Slot
from workers.errors import CheckpointDamaged
from workers.wire import Channel

_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One rank's snapshot in the memory of `slot`, which is to be closed if it was `mapped_here`."""

    slot: Slot
    mapped_here: bool
    bytes: int
    digest: str


class HeldShards:
    """ShardBytes over the snapshots of one set, by rank; read by `rank`. `alive` is called while a shard is read."""

    def __init__(
        self, rank: int, generation: int, step: int, shards: Mapping[int, HeldShard], alive: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._generation = generation
        self._step = step
        self._shards = shards
        self._alive = alive

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

    def whole(self, shard: ShardRecord) -> memoryview:
        total = -(-shard.bytes // BLOCK_BYTES)
        for index in range(total):
            self._alive()
            failpoint.hit(
                "restore.read", index=index, total=total, rank=self._rank, step=self._step, generation=self._generation
            )
        return self.part(shard, 0, shard.bytes)

    def part(self, shard: ShardRecord, start: int, stop: int) -> memoryview:
        held = self._shards[shard.rank]
        return held.slot.image[start : min(stop, held.bytes)]

    def what(self, shard: ShardRecord) -> str:
        return f"rank {shard.rank}'s snapshot in memory of step {self._step}, generation {self._generation},"

    def close(self) -> None:
        for held in self._shards.values():
            if held.mapped_here:
                held.slot.close()
        self._shards = {}

    def _record(self, rank: int, world_size: int) -> ShardRecord:
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
    generation: int,
    step: int,
    *,
    mapped: Sequence[Slot],
    alive: Callable[[], None],
) -> HeldShards:
    """Ask the keeper for the shards of a set; of slots that are `mapped` already no second mapping is made.

    Raises CheckpointDamaged if this rank's is not among them, OSError if the keeper does not answer.
    """
    keeper.send("fetch", generation=generation, step=step)
    by_memory = {slot.memory_id: slot for slot in mapped}
    shards: dict[int, HeldShard] = {}
    while True:
        answer = keeper.receive(_ANSWER_SECONDS)
        if answer is None:
            raise OSError("the keeper closed the connection")
        message, fds = answer
        if message["kind"] == "handed_out":
            break
        slot = Slot.from_fd(fds[0], populate=False)
        known = by_memory.get(slot.memory_id)
        if known is not None:
            slot.close()
        shards[message["rank"]] = HeldShard(
            slot=known or slot, mapped_here=known is None, bytes=message["bytes"], digest=message["digest"]
        )
    if rank not in shards:
        raise CheckpointDamaged(
            f"the keeper of this node does not hold rank {rank}'s snapshot of step {step}, generation {generation}"
        )
    return HeldShards(rank, generation, step, shards, alive)
