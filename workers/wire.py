"""Messages between processes of one node: JSON over SOCK_SEQPACKET, with file descriptors beside it.

One message is one packet, so that nothing is ever half read. A packet larger than the socket's buffer cannot be sent:
long texts (tracebacks) are cut by the sender, and large things travel as a memfd.
"""

import json
import os
import select
import socket
import struct
from typing import Any

from workers.errors import EnvironmentProblem

MESSAGE_BYTES_MAX = 1 << 16
_FDS_MAX = 16


class Channel:
    """One end of a connection. Not for use by several threads at once in the same direction."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """Send one message; raises OSError if the other end is gone."""
        packet = json.dumps({"kind": kind, **fields}).encode()
        if len(packet) > MESSAGE_BYTES_MAX:
            raise ValueError(f"message {kind!r} has {len(packet)} bytes; at most {MESSAGE_BYTES_MAX} fit a packet")
        socket.send_fds(self.socket, [packet], list(fds))

    def receive(self, timeout_seconds: float | None = None) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its file descriptors; None at the end of the stream.

        Raises TimeoutError when nothing came in time.
        """
        if timeout_seconds is not None:
            poller = select.poll()
            poller.register(self.socket, select.POLLIN)
            if not poller.poll(max(0.0, timeout_seconds) * 1000):
                raise TimeoutError
        try:
            packet, fds, _, _ = socket.recv_fds(self.socket, MESSAGE_BYTES_MAX, _FDS_MAX)
        except ConnectionResetError:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        return (json.loads(packet), fds) if packet else None

    def close(self) -> None:
        self.socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)


def listen(address: str) -> socket.socket:
    """Listen on an abstract address: it needs no file, has no length trouble with deep temp dirs, and cannot be left
    behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen(64)
    return listener


def accept(listener: socket.socket) -> Channel | None:
    """Accept a connection; None if its peer is another user (abstract addresses have no permissions)."""
    connection, _ = listener.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        connection.close()
        return None
    return Channel(connection)


def connect(address: str) -> Channel:
    """Connect to an abstract address; raises OSError while nobody listens, EnvironmentProblem if another user does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{address}")
    except OSError:
        sock.close()
        raise
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        sock.close()
        raise EnvironmentProblem(f"the keeper's socket {address!r} belongs to user {uid}, not to this user")
    return Channel(sock)
