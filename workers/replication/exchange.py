"""All that a keeper has to do with others: copies of its shards there, of theirs here, and reading for a restore."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from workers.checkpoint.header import parse_header
from workers.checkpoint.slots import Slot
from workers.keeper_messages import CopyOrder, HeldSnapshot
from workers.replication.copies import Copies
from workers.replication.pace import Pace
from workers.replication.protocol import ShardKey
from workers.replication.remote import RemoteSet
from workers.replication.replicator import Copied, Replicator
from workers.replication.server import FindShard, PeerServer
from workers.replication.transfer import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """`host`: this node's address. `secret`: of the run; only keepers have it. `memory_fraction_max`: the part of this
    node's memory that may be in use with the copies in it."""

    host: str
    secret: bytes = field(repr=False)
    bytes_per_second_max: float | None
    memory_fraction_max: float


class Exchange:
    """`find_own` finds the shards of this node's own ranks; `report` is told how each copy that was ordered ended."""

    def __init__(self, settings: ExchangeSettings, *, find_own: FindShard, report: Callable[[Copied], None]) -> None:
        self._settings = settings
        self._find_own = find_own
        self.copies = Copies(self._available)
        self._server = PeerServer(settings.host, secret=settings.secret, copies=self.copies, find=self.find)
        self._replicator = Replicator(find=find_own, pace=Pace(settings.bytes_per_second_max), report=report)
        self.address = self._server.address

    def find(self, key: ShardKey) -> Slot | None:
        """A shard in this node's memory, through a mapping of its own that the caller closes."""
        return self._find_own(key) or self.copies.open(key)

    def copy(self, order: CopyOrder) -> None:
        """Begin to send copies; the newest order counts."""
        peer = self._peer(order.host, order.port)
        for rank in order.ranks:
            key = ShardKey(rank=rank, generation=order.generation, step=order.step)
            self._replicator.send(key, peer, keep=(order.keep_generation, order.keep_step))

    def end_generation(self, generation: int) -> None:
        """Its ranks are gone, and what is here of it may be restored: nothing of it is sent or taken any more."""
        self._replicator.end_generation(generation)
        self.copies.end_generation(generation)

    def held(self) -> list[HeldSnapshot]:
        """The copies that are here, as they would be restored."""
        found = []
        for key in self.copies.held():
            slot = self.copies.open(key)
            if slot is not None:
                found.append(_told(key, slot))
                slot.close()
        return found

    def elsewhere(self, generation: int, step: int, places: Iterable[Sequence[Any]], own: Iterable[int]) -> RemoteSet:
        """The shards of that set that are not here; `places`: (host, port, ranks), `own`: the ranks that are here."""
        here = set(own)
        peers = {rank: self._peer(host, port) for host, port, ranks in places for rank in ranks if rank not in here}
        return RemoteSet(generation, step, peers)

    def close(self) -> None:
        self._server.close()
        self._replicator.close()
        self.copies.close()

    def _peer(self, host: str, port: int) -> Peer:
        return Peer(host=host, port=port, secret=self._settings.secret)

    def _available(self) -> int:
        memory = psutil.virtual_memory()
        return int(memory.available - (1 - self._settings.memory_fraction_max) * memory.total)


def _told(key: ShardKey, slot: Slot) -> HeldSnapshot:
    document = parse_header(slot.image[: slot.image_bytes], f"the copy of rank {key.rank}'s snapshot").document
    return HeldSnapshot(
        rank=key.rank,
        generation=key.generation,
        step=key.step,
        digest=slot.digest,
        replicas=document.get("replicas", {}),
        finished=bool(document.get("progress", {}).get("finished")),
    )
