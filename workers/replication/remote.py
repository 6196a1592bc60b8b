"""The shards of one set that lie in the memory of other keepers, read from there for a rank that restores it.

Invariants: a shard's record says what lies where, and the digest of each tensor; whoever reads compares. What is read
lies in memory of its own, which a descriptor stands for. Faults survived: a keeper that is gone, or has it no more:
OSError or PeerRefused.
"""

import mmap
import os
import threading
from collections.abc import Mapping

from workers.replication.protocol import Connection, ShardKey
from workers.replication.transfer import Peer

_RECORD_BYTES_MAX = 1 << 30


class RemoteSet:
    """`peers`: who has it, by rank. Not for use by several threads at once."""

    def __init__(self, generation: int, step: int, peers: Mapping[int, Peer]) -> None:
        self._generation = generation
        self._step = step
        self._peers = peers
        self._connections: dict[tuple[str, int], Connection] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(self._peers)

    def describe(self, rank: int, world_size: int) -> int:
        """The shard's record (manifest.pack_shard), as a descriptor."""
        return self._ask("describe", rank, world_size=world_size)

    def read(self, rank: int, start: int, stop: int) -> int:
        """Bytes start to stop of the shard, as a descriptor."""
        return self._ask("read", rank, start=start, stop=stop)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _ask(self, kind: str, rank: int, **fields: int) -> int:
        key = ShardKey(rank=rank, generation=self._generation, step=self._step)
        peer = self._peers[rank]
        address = peer.host, peer.port
        connection = self._connections.pop(address, None) or peer.connect()
        try:
            connection.send(kind, rank=key.rank, generation=key.generation, step=key.step, **fields)
            size = connection.receive("bytes").get("size")
            wanted = fields["stop"] - fields["start"] if kind == "read" else size
            if not isinstance(size, int) or size != wanted or not 0 <= size <= max(_RECORD_BYTES_MAX, wanted):
                raise ConnectionError(f"{size!r} bytes are announced, and {wanted} were asked for")
            received = _receive(connection, size)
        except BaseException:
            connection.close()
            raise
        self._connections[address] = connection
        return received


def _receive(connection: Connection, size: int) -> int:
    fd = os.memfd_create("lastgood-read", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        if size:
            with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
                connection.receive_image(view, threading.Event())
    except BaseException:
        os.close(fd)
        raise
    return fd
