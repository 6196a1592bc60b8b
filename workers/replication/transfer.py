"""One shard from keeper to keeper, to be kept there as a copy; it counts once its digest was compared."""

import contextlib
import threading
from dataclasses import dataclass, field

from workers.checkpoint.slots import Slot
from workers.replication.copies import Arriving, Copies, SetKey
from workers.replication.pace import Pace
from workers.replication.protocol import Connection, PeerRefused, ShardKey, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How to reach another keeper; `secret` is the run's."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def connect(self) -> Connection:
        return Connection.open(self.host, self.port, self.secret, self.timeouts)


def put_shard(peer: Peer, key: ShardKey, slot: Slot, *, keep: SetKey, pace: Pace, cancelled: threading.Event) -> None:
    """Have a peer keep a copy of the shard that the slot holds, beside one of the set `keep`.

    Returns once the peer has compared the digest. OSError or PeerRefused if there is no copy, or no word of it came.
    """
    with contextlib.closing(peer.connect()) as connection:
        image_bytes = slot.image_bytes
        connection.send(
            "put",
            rank=key.rank,
            generation=key.generation,
            step=key.step,
            image_bytes=image_bytes,
            digest=slot.digest,
            keep_generation=keep[0],
            keep_step=keep[1],
        )
        if connection.receive("send", "kept")["kind"] == "send":
            connection.send_image(slot, key, 0, image_bytes, pace=pace, cancelled=cancelled)
            connection.receive("kept")


def receive_shard(connection: Connection, copies: Copies, arriving: Arriving, digest: str) -> None:
    """Take in an announced shard; PeerRefused if what comes has another digest than was announced."""
    with arriving.slot.image[: arriving.image_bytes] as image:
        found = connection.receive_image(image, arriving.cancelled)
    if found != digest:
        raise PeerRefused(f"the shard of rank {arriving.key.rank} came with other bytes than were announced")
    copies.complete(arriving, found)
