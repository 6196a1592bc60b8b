"""The keeper's side that other keepers connect to: it takes copies of their shards, and gives out those that it has.

Invariants: it listens at the node's own address only, and does nothing for a connection that has not proved to know the
run's secret (workers.replication.protocol). A copy counts only if its digest is the one that was announced. A shard is
described only once all its bytes were compared with the digest that the keeper of its rank found.

Faults survived: garbage, connections that are many, silent, slow or broken (each costs one thread for a bounded time);
what goes wrong with one connection ends that connection.
"""

import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from workers.checkpoint.digests import image_digests
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import ShardRecord, pack_shard, shard_file
from workers.checkpoint.slots import Slot
from workers.errors import CheckpointDamaged, LastgoodError
from workers.replication.copies import Copies
from workers.replication.pace import Pace
from workers.replication.protocol import Connection, PeerRefused, ShardKey, Timeouts
from workers.replication.transfer import receive_shard

logger = logging.getLogger("lastgood")

_STRANGERS_MAX = 64
"""Connections at a time that have not shown that they know the secret."""
_RETRY_SECONDS = 0.1

FindShard = Callable[[ShardKey], Slot | None]
"""A complete shard in this node's memory whose digest is known, through a mapping of its own that the caller closes."""


@dataclasses.dataclass(slots=True)
class _Description:
    """Of one shard, which is read through once, however many ask for it."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    record: bytes = b""


class PeerServer:
    """Serves from its construction until `close`, on threads of its own."""

    def __init__(
        self, host: str, *, secret: bytes, copies: Copies, find: FindShard, timeouts: Timeouts | None = None
    ) -> None:
        if len(secret) < 16:
            raise ValueError("the secret is too short to be one")
        self._secret = secret
        self._copies = copies
        self._find = find
        self._timeouts = timeouts or Timeouts()
        self._free = threading.Semaphore(_STRANGERS_MAX)
        self._closed = threading.Event()
        self._connected: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._described: dict[ShardKey, _Description] = {}  # of one set
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="lastgood-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
        self._listener.close()
        self._thread.join()
        for sock in list(self._connected):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            # Those that have not shown yet that they may come in wait for their turn, in the kernel's queue.
            while not self._free.acquire(timeout=_RETRY_SECONDS):
                if self._closed.is_set():
                    return
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._free.release()
                if self._closed.wait(_RETRY_SECONDS):
                    return
                continue  # the connection was gone again, or there is no descriptor for it now
            self._connected.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="lastgood-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                try:
                    connection = Connection.accept(sock, self._secret, self._timeouts)
                finally:
                    self._free.release()
                self._answer(connection)
        except OSError as error:
            if not self._closed.is_set():
                logger.warning("lastgood: a connection for snapshots ended: %s", error)
        except Exception:
            logger.exception("lastgood: a request for snapshots failed")
        finally:
            self._connected.discard(sock)

    def _answer(self, connection: Connection) -> None:
        while not connection.ended():
            request = connection.receive("put", "describe", "read")
            try:
                key = ShardKey(**{name: _whole(request, name) for name in ("rank", "generation", "step")})
                match request["kind"]:
                    case "put":
                        self._take(connection, key, request)
                    case "describe":
                        connection.send_bytes(self._describe(key, _whole(request, "world_size")))
                    case "read":
                        self._give(connection, key, _whole(request, "start"), _whole(request, "stop"))
            except LastgoodError as refusal:
                connection.send("refused", reason=str(refusal)[:1000])

    def _take(self, connection: Connection, key: ShardKey, request: Mapping[str, Any]) -> None:
        image_bytes, digest = _whole(request, "image_bytes"), str(request.get("digest"))
        if not image_bytes:
            raise PeerRefused("the snapshot is not there any more")
        self._copies.keep((_whole(request, "keep_generation"), _whole(request, "keep_step")))
        arriving = self._copies.begin(key, image_bytes, digest)
        if arriving is not None:
            try:
                connection.send("send")
                receive_shard(connection, self._copies, arriving, digest)
            finally:
                self._copies.discard(arriving)
        connection.send("kept")

    def _describe(self, key: ShardKey, world_size: int) -> bytes:
        with self._lock:
            if any(other.set != key.set for other in self._described):
                self._described = {}
            described = self._described.setdefault(key, _Description())
        with described.lock, contextlib.closing(self._open(key)) as slot:
            described.record = described.record or pack_shard(_record(slot, key.rank, world_size))
            return described.record

    def _give(self, connection: Connection, key: ShardKey, start: int, stop: int) -> None:
        with contextlib.closing(self._open(key)) as slot:
            if not start <= stop <= slot.image_bytes:
                raise PeerRefused(f"bytes {start} to {stop} are not in a shard of {slot.image_bytes}")
            connection.send("bytes", size=stop - start)
            connection.send_image(slot, key, start, stop, pace=Pace(None), cancelled=threading.Event())

    def _open(self, key: ShardKey) -> Slot:
        slot = self._find(key)
        if slot is None:
            raise PeerRefused(f"step {key.step} of rank {key.rank}, generation {key.generation}, is not here")
        return slot


def _record(slot: Slot, rank: int, world_size: int) -> ShardRecord:
    """What lies where in it; CheckpointDamaged if its bytes are not those that were digested."""
    what = f"rank {rank}'s snapshot of step {slot.step}"
    content = slot.image[: slot.image_bytes]
    parsed = parse_header(content, what)
    tensors = parsed.tensors
    whole, by_tensor = image_digests(content, tensors.values())
    if whole != slot.digest:
        raise CheckpointDamaged(f"{what} has changed in memory")
    return ShardRecord(
        file=shard_file(rank, world_size),
        rank=rank,
        bytes=len(content),
        digest=whole,
        header_digest=xxhash.xxh3_128_hexdigest(content[: parsed.data_start]),
        verified_from="memory",
        tensors=tuple(dataclasses.replace(record, digest=by_tensor[name]) for name, record in tensors.items()),
    )


def _whole(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not 0 <= value < 2**62:
        raise PeerRefused(f"{name} is {str(value)[:40]!r}, and should be a whole number")
    return value
