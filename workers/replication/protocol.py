"""What keepers say to each other over TCP: requests and answers between two that know the run's secret.

    server -> client   magic, a random nonce
    client -> server   magic, a nonce of its own, HMAC(secret, "client", both nonces)
    server -> client   HMAC(secret, "server", both nonces)
    client -> server   a request about the shard (rank, generation, step), again and again
        put: digest, image_bytes, keep      answer: send, then the image comes, then kept | kept | refused
             keep a copy
        describe: world_size                answer: bytes (size), and the shard's record | refused
             once all of it was compared with its digest
        read: start, stop                   answer: bytes (size), and these | refused

A request or answer is a length (4 bytes) and that many bytes of JSON, at most 4 KiB.

Invariants: before the other end has proved that it knows the secret, nothing is read but a fixed number of bytes, in a
fixed time, and nothing is allocated; the secret never travels; a proof serves one connection, in one direction. What
arrives counts only once it was compared with a digest. This keeps others on the network out; it hides nothing from
those who can read or change what passes there.

Faults survived: any bytes at all, an end that is slow, silent or gone: OSError, in bounded time, and the connection is
over.
"""

import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import xxhash

from workers.checkpoint.slots import HEADER_BYTES, Slot, SlotState
from workers.errors import EnvironmentProblem
from workers.replication.pace import Pace

BLOCK_BYTES = 4 << 20
_MAGIC = b"lgpeer\0\1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")
_MESSAGE_BYTES_MAX = 4096


class PeerRefused(EnvironmentProblem):
    """The other keeper does not do what it was asked for, and says why; or the shard is not what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """`idle_seconds`: without a byte moving. `answer_seconds`: until an answer, before which memory may be faulted."""

    handshake_seconds: float = 5.0
    idle_seconds: float = 10.0
    answer_seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShardKey:
    """Which shard: ordered as a rank's snapshots are in time."""

    generation: int
    step: int
    rank: int

    @property
    def set(self) -> tuple[int, int]:
        """What the shards of all ranks that belong together have in common."""
        return self.generation, self.step

    @classmethod
    def of(cls, slot: Slot) -> "ShardKey":
        return cls(rank=slot.rank, generation=slot.generation, step=slot.step)


def holds(slot: Slot, key: ShardKey) -> bool:
    """Whether the slot has that shard, complete, and nobody has begun to write into it."""
    return slot.state not in (SlotState.FREE, SlotState.WRITING, SlotState.TORN) and ShardKey.of(slot) == key


class Connection:
    """An authenticated connection; OSError from every method when it is over."""

    def __init__(self, sock: socket.socket, timeouts: Timeouts) -> None:
        self._socket = sock
        self._timeouts = timeouts

    @classmethod
    def open(cls, host: str, port: int, secret: bytes, timeouts: Timeouts) -> "Connection":
        """Connect to a keeper and prove to each other who is there."""
        sock = socket.create_connection((host, port), timeout=timeouts.handshake_seconds)
        try:
            deadline = time.monotonic() + timeouts.handshake_seconds
            theirs = _nonce(_receive_exactly(sock, len(_MAGIC) + _NONCE_BYTES, deadline))
            ours = os.urandom(_NONCE_BYTES)
            _send_all(sock, _MAGIC + ours + _proof(secret, b"client", theirs, ours), deadline)
            _check(_receive_exactly(sock, _PROOF_BYTES, deadline), _proof(secret, b"server", theirs, ours))
        except BaseException:
            sock.close()
            raise
        return cls(sock, timeouts)

    @classmethod
    def accept(cls, sock: socket.socket, secret: bytes, timeouts: Timeouts) -> "Connection":
        """The same from the other side. The socket stays the caller's if this raises."""
        deadline = time.monotonic() + timeouts.handshake_seconds
        ours = os.urandom(_NONCE_BYTES)
        _send_all(sock, _MAGIC + ours, deadline)
        said = _receive_exactly(sock, len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES, deadline)
        theirs = _nonce(said[:-_PROOF_BYTES])
        _check(said[-_PROOF_BYTES:], _proof(secret, b"client", ours, theirs))
        _send_all(sock, _proof(secret, b"server", ours, theirs), deadline)
        return cls(sock, timeouts)

    def send(self, kind: str, **fields: Any) -> None:
        packet = json.dumps({"kind": kind, **fields}).encode()
        _send_all(self._socket, _LENGTH.pack(len(packet)) + packet, time.monotonic() + self._timeouts.idle_seconds)

    def send_bytes(self, data: bytes) -> None:
        """Say how many bytes there are, and send them."""
        self.send("bytes", size=len(data))
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            _send_all(self._socket, block, time.monotonic() + self._timeouts.idle_seconds)

    def ended(self) -> bool:
        """Wait for what comes next; whether it is the end, or nothing for a long time."""
        self._socket.settimeout(self._timeouts.answer_seconds)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True

    def receive(self, *kinds: str) -> dict[str, Any]:
        """The next message, one of `kinds`; PeerRefused if the other end refuses instead."""
        deadline = time.monotonic() + self._timeouts.answer_seconds
        (length,) = _LENGTH.unpack(_receive_exactly(self._socket, _LENGTH.size, deadline))
        if length > _MESSAGE_BYTES_MAX:
            raise ConnectionError(f"a message of {length} bytes is announced")
        try:
            message = json.loads(_receive_exactly(self._socket, length, deadline))
            kind = message["kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConnectionError("what came is no message") from None
        if kind == "refused":
            raise PeerRefused(str(message.get("reason")))
        if kind not in kinds:
            raise ConnectionError(f"{kind!r} came, and one of {kinds} was expected")
        return dict(message)

    def send_image(
        self, slot: Slot, key: ShardKey, start: int, stop: int, *, pace: Pace, cancelled: threading.Event
    ) -> None:
        """Send image[start:stop] straight from the slot's memory, no longer than the slot still holds that shard.

        Whether all that was sent is that shard is for the receiver to tell, by its digest. ConnectionAbortedError if
        the shard is gone, or this was cancelled.
        """
        end = HEADER_BYTES + stop
        position = HEADER_BYTES + start
        while position < end:
            size = min(BLOCK_BYTES, end - position)
            cancelled.wait(pace.delay_seconds(size))
            if cancelled.is_set() or not holds(slot, key):
                why = "the transfer was cancelled" if cancelled.is_set() else "the snapshot is not there any more"
                raise ConnectionAbortedError(why)
            block_end = position + size
            while position < block_end:
                self._wait(select.POLLOUT)
                try:
                    sent = os.sendfile(self._socket.fileno(), slot.fd, position, block_end - position)
                except BlockingIOError:
                    continue
                if sent == 0:
                    raise ConnectionError("the connection takes nothing any more")
                position += sent

    def receive_image(self, image: memoryview, cancelled: threading.Event) -> str:
        """Fill `image`, and return the digest of what came; ConnectionAbortedError if this was cancelled."""
        digest = xxhash.xxh3_128()
        done = 0
        while done < len(image):
            if cancelled.is_set():
                raise ConnectionAbortedError("the transfer was cancelled")
            self._wait(select.POLLIN)
            with image[done : done + BLOCK_BYTES] as rest:
                try:
                    count = self._socket.recv_into(rest)
                except BlockingIOError:
                    continue
                if count == 0:
                    raise ConnectionError(f"the connection ended after {done} of {len(image)} bytes")
                digest.update(rest[:count])
            done += count
        return digest.hexdigest()

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(self._timeouts.idle_seconds * 1000):
            raise TimeoutError(f"nothing has moved for {self._timeouts.idle_seconds} s")


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + server_nonce + client_nonce, "sha256")


def _nonce(said: bytes) -> bytes:
    if not said.startswith(_MAGIC):
        raise ConnectionError("the other end is no keeper of this version")
    return said[len(_MAGIC) :]


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise PermissionError("the other end does not know the run's secret")


def _send_all(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_remaining(deadline))
    sock.sendall(data)


def _receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes before the deadline, however slowly they drip; `size` is small."""
    received = b""
    while len(received) < size:
        sock.settimeout(_remaining(deadline))
        some = sock.recv(size - len(received))
        if not some:
            raise ConnectionError("the other end has closed the connection")
        received += some
    return received


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the other end takes too long")
    return remaining
