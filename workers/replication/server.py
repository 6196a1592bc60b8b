"""The keeper's side that other keepers connect to: it takes copies of their shards, and gives out those that it has.

Invariants: it listens at the node's own address only, and does nothing for a connection that has not proved to know the
run's secret (workers.replication.protocol). A copy counts only if its digest is the one that was announced. Faults
survived: garbage, connections that are many, silent, slow or broken (each costs one thread for a bounded time); what
goes wrong with one connection ends that connection.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from workers.checkpoint.slots import Slot
from workers.errors import EnvironmentProblem
from workers.replication.copies import Copies
from workers.replication.pace import Pace
from workers.replication.protocol import Connection, PeerRefused, ShardKey, Timeouts
from workers.replication.transfer import receive_shard

logger = logging.getLogger("lastgood")

_CONNECTIONS_MAX = 64
_RETRY_SECONDS = 0.1

FindShard = Callable[[ShardKey], Slot | None]
"""A complete shard in this node's memory whose digest is known, through a mapping of its own that the caller closes."""


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
        self._free = threading.Semaphore(_CONNECTIONS_MAX)
        self._closed = threading.Event()
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

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(_RETRY_SECONDS):
                    return
                continue  # the connection was gone again, or there is no descriptor for it now
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="lastgood-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                self._answer(Connection.accept(sock, self._secret, self._timeouts))
        except OSError as error:
            logger.warning("lastgood: a connection for snapshots ended: %s", error)
        except Exception:
            logger.exception("lastgood: a request for snapshots failed")
        finally:
            self._free.release()

    def _answer(self, connection: Connection) -> None:
        request = connection.receive("put", "get")
        try:
            key = ShardKey(**{name: _whole(request, name) for name in ("rank", "generation", "step")})
            if request["kind"] == "put":
                self._take(connection, key, request)
            else:
                self._give(connection, key)
        except EnvironmentProblem as refusal:
            connection.send("refused", reason=str(refusal)[:1000])

    def _take(self, connection: Connection, key: ShardKey, request: Mapping[str, Any]) -> None:
        image_bytes, digest = _whole(request, "image_bytes"), request.get("digest")
        self._copies.keep((_whole(request, "keep_generation"), _whole(request, "keep_step")))
        if not image_bytes:
            raise PeerRefused("the snapshot is not there any more")
        arriving = self._copies.begin(key, image_bytes)
        if arriving is None:
            connection.send("kept")
            return
        try:
            connection.send("send")
            receive_shard(connection, self._copies, arriving, digest)
        finally:
            self._copies.discard(arriving)
        connection.send("kept")

    def _give(self, connection: Connection, key: ShardKey) -> None:
        found = self._find(key)
        if found is None:
            raise PeerRefused(f"step {key.step} of rank {key.rank} is not here")
        with contextlib.closing(found):
            connection.send("shard", digest=found.digest, image_bytes=found.image_bytes)
            connection.send_image(found, key, Pace(None), threading.Event())


def _whole(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not 0 <= value < 2**62:
        raise PeerRefused(f"{name} is {str(value)[:40]!r}, and should be a whole number")
    return value
