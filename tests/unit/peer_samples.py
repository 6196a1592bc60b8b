"""Keepers as far as copies go: a server with its memory, and slots of its own ranks."""

import time
from collections.abc import Callable
from typing import Any

import xxhash

from workers.checkpoint.slots import Slot
from workers.replication.copies import Copies
from workers.replication.exchange import ExchangeSettings
from workers.replication.protocol import Connection, ShardKey, Timeouts
from workers.replication.server import PeerServer
from workers.replication.transfer import Peer

SECRET = b"0123456789abcdef-of-this-run"
HOST = "127.0.0.1"
PATIENT = Timeouts(handshake_seconds=20.0, idle_seconds=20.0, answer_seconds=20.0)
HASTY = Timeouts(handshake_seconds=0.2, idle_seconds=0.2, answer_seconds=0.2)
DEADLINE_SECONDS = 20.0


EXCHANGE = ExchangeSettings(host=HOST, secret=SECRET, bytes_per_second_max=None, memory_fraction_max=1.0)


def key(step: int, *, rank: int = 0, generation: int = 1) -> ShardKey:
    return ShardKey(rank=rank, generation=generation, step=step)


def content(of: ShardKey, image_bytes: int) -> bytes:
    pattern = f"rank {of.rank} generation {of.generation} step {of.step} ".encode()
    return (pattern * (image_bytes // len(pattern) + 1))[:image_bytes]


def shard(of: ShardKey, image_bytes: int = 10_000, image: bytes | None = None) -> Slot:
    """A complete slot with its digest, as a rank and its keeper leave it."""
    slot = Slot.create(image_bytes)
    slot.begin(rank=of.rank, generation=of.generation, step=of.step)
    slot.image[:image_bytes] = image or content(of, image_bytes)
    slot.complete(image_bytes)
    slot.set_digest(xxhash.xxh3_128_hexdigest(slot.image[:image_bytes]))
    return slot


class Keeper:
    """`available`: how much memory it believes to have."""

    def __init__(self, *, secret: bytes = SECRET, timeouts: Timeouts = PATIENT, available: int = 1 << 40) -> None:
        self.copies = Copies(lambda: available)
        self.server = PeerServer(HOST, secret=secret, copies=self.copies, find=self.copies.open, timeouts=timeouts)
        self.timeouts = timeouts

    def peer(self, secret: bytes = SECRET, timeouts: Timeouts | None = None) -> Peer:
        host, port = self.server.address
        return Peer(host=host, port=port, secret=secret, timeouts=timeouts or self.timeouts)

    def connect(self) -> Connection:
        return self.peer().connect()

    def bytes_of(self, of: ShardKey) -> bytes | None:
        slot = self.copies.open(of)
        if slot is None:
            return None
        found = bytes(slot.image[: slot.image_bytes])
        assert slot.digest == xxhash.xxh3_128_hexdigest(found)
        slot.close()
        return found

    def close(self) -> None:
        self.server.close()
        self.copies.close()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found
