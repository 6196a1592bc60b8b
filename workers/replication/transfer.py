"""One shard from keeper to keeper: sent as a copy, or fetched for a restore. Either counts once its digest is right."""

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
        connection.send(
            "put",
            rank=key.rank,
            generation=key.generation,
            step=key.step,
            image_bytes=slot.image_bytes,
            digest=slot.digest,
            keep_generation=keep[0],
            keep_step=keep[1],
        )
        if connection.receive("send", "kept")["kind"] == "send":
            connection.send_image(slot, key, pace, cancelled)
            connection.receive("kept")


def fetch_shard(peer: Peer, key: ShardKey, copies: Copies) -> None:
    """Bring a shard that a peer has into our memory. OSError or PeerRefused if it does not come."""
    with contextlib.closing(peer.connect()) as connection:
        connection.send("get", rank=key.rank, generation=key.generation, step=key.step)
        shard = connection.receive("shard")
        image_bytes, digest = shard.get("image_bytes"), shard.get("digest")
        if not isinstance(image_bytes, int) or image_bytes <= 0:
            raise ConnectionError(f"a shard of {image_bytes!r} bytes is announced")
        arriving = copies.begin(key, image_bytes, fetched=True)
        if arriving is not None:
            try:
                receive_shard(connection, copies, arriving, digest)
            finally:
                copies.discard(arriving)


def receive_shard(connection: Connection, copies: Copies, arriving: Arriving, digest: object) -> None:
    """Take in an announced shard; PeerRefused if what comes has another digest than was announced."""
    with arriving.slot.image[: arriving.image_bytes] as image:
        found = connection.receive_image(image, arriving.cancelled)
    if found != digest:
        raise PeerRefused(f"the shard of rank {arriving.key.rank} came with other bytes than were announced")
    copies.complete(arriving, found)
