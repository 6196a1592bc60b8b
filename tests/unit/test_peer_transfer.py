"""Shards from keeper to keeper: what arrives is what was sent, or nothing; and who knows no secret gets nowhere."""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_samples import DEADLINE_SECONDS, HASTY, HOST, PATIENT, SECRET, Keeper, content, key, shard, wait_for

from workers.checkpoint.manifest import unpack_shard
from workers.replication.pace import Pace
from workers.replication.protocol import BLOCK_BYTES, Connection, PeerRefused, ShardKey
from workers.replication.remote import RemoteSet
from workers.replication.transfer import Peer, put_shard

NEVER = threading.Event()
FREE = Pace(None)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def put(peer: Peer, of: ShardKey, image_bytes: int = 10_000, *, keep: tuple[int, int] = (0, 0), **options: Any) -> None:
    slot = shard(of, image_bytes)
    try:
        put_shard(peer, of, slot, keep=keep, **{"pace": FREE, "cancelled": NEVER, **options})
    finally:
        slot.close()


def raw(keeper: Keeper) -> socket.socket:
    return socket.create_connection(keeper.server.address, timeout=DEADLINE_SECONDS)


def ended(sock: socket.socket) -> bool:
    """Whether the other end closes the connection in time; all that still comes is read."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def still_serves(keeper: Keeper) -> None:
    one = key(999, rank=77)
    put(keeper.peer(), one, 100)
    assert keeper.bytes_of(one) == content(one, 100)


def memfds() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("lastgood-slot" in link for link in links)


# ---------------------------------------------------------------- what arrives


def read(peer: Peer, of: ShardKey, start: int, stop: int) -> bytes:
    remote = RemoteSet(of.generation, of.step, {of.rank: peer})
    try:
        return taken(remote.read(of.rank, start, stop))
    finally:
        remote.close()


def taken(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


@pytest.mark.parametrize("image_bytes", [1, 4096, 10_000, 2 * BLOCK_BYTES + 17])
def test_a_copy_has_the_bytes_and_can_be_read_from_there(keeper: Keeper, image_bytes: int) -> None:
    one = key(20, rank=3)
    put(keeper.peer(), one, image_bytes)
    assert keeper.copies.held() == [one]
    assert keeper.bytes_of(one) == content(one, image_bytes)
    assert read(keeper.peer(), one, 0, image_bytes) == content(one, image_bytes)
    assert (
        read(keeper.peer(), one, image_bytes // 3, image_bytes // 2)
        == (content(one, image_bytes)[image_bytes // 3 : image_bytes // 2])
    )


def test_one_connection_serves_many_requests_also_after_a_refused_one(keeper: Keeper) -> None:
    put(keeper.peer(), key(20))
    remote = RemoteSet(1, 20, {0: keeper.peer(), 1: keeper.peer()})
    for start in range(0, 1000, 100):
        assert taken(remote.read(0, start, start + 7)) == content(key(20), 10_000)[start : start + 7]
    with pytest.raises(PeerRefused, match="not here"):
        remote.read(1, 0, 1)
    with pytest.raises(PeerRefused, match="are not in"):
        remote.read(0, 0, 10_001)
    assert taken(remote.read(0, 5, 9)) == content(key(20), 10_000)[5:9]
    remote.close()


def test_a_shard_is_described_once_its_bytes_were_compared(keeper: Keeper) -> None:
    image = torch_free_image()
    of = key(20, rank=1)
    slot = shard(of, len(image), image)
    put_shard(keeper.peer(), of, slot, keep=(0, 0), pace=FREE, cancelled=NEVER)
    slot.close()
    remote = RemoteSet(1, 20, {1: keeper.peer()})
    record = unpack_shard(taken(remote.describe(1, 4)), "it")
    assert (record.rank, record.bytes, record.file) == (1, len(image), "rank-00001-of-00004.safetensors")
    assert record.digest == xxhash.xxh3_128_hexdigest(image)
    (tensor,) = record.tensors
    part = taken(remote.read(1, tensor.start, tensor.stop))
    assert xxhash.xxh3_128_hexdigest(part) == tensor.digest
    remote.close()


def test_a_copy_that_has_changed_in_memory_is_not_described(keeper: Keeper) -> None:
    image = torch_free_image()
    slot = shard(key(20), len(image), image)
    put_shard(keeper.peer(), key(20), slot, keep=(0, 0), pace=FREE, cancelled=NEVER)
    slot.close()
    copy = keeper.copies.open(key(20))
    assert copy is not None
    copy.image[len(image) - 1] ^= 1
    copy.close()
    with pytest.raises(PeerRefused, match="has changed in memory"):
        RemoteSet(1, 20, {0: keeper.peer()}).describe(0, 1)


def torch_free_image() -> bytes:
    data = bytes(range(64))
    metadata = {
        "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0], "global_shape": [16]}}),
        "lastgood": json.dumps({}),
    }
    entries = {"__metadata__": metadata, "w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    return struct.pack("<Q", len(header)) + header + data


def test_a_copy_that_is_there_is_not_sent_again(keeper: Keeper) -> None:
    put(keeper.peer(), key(20))

    class Unused(Pace):
        def delay_seconds(self, size: int) -> float:
            raise AssertionError("bytes are sent")

    put(keeper.peer(), key(20), pace=Unused(None))


def test_bytes_with_another_digest_do_not_count_and_what_is_to_be_kept_stays(keeper: Keeper) -> None:
    put(keeper.peer(), key(20))
    slot = shard(key(22))
    slot.image[5] ^= 1
    with pytest.raises(PeerRefused, match="other bytes"):
        put_shard(keeper.peer(), key(22), slot, keep=(1, 20), pace=FREE, cancelled=NEVER)
    slot.close()
    assert keeper.copies.held() == [key(20)]


class Meddling(Pace):
    """Does something before the second block is sent."""

    def __init__(self, meddle: Any) -> None:
        super().__init__(None)
        self._meddle, self._blocks = meddle, 0

    def delay_seconds(self, size: int) -> float:
        self._blocks += 1
        if self._blocks == 2:
            self._meddle()
        return 0.0


def test_memory_that_is_used_again_while_it_is_sent_makes_no_copy(keeper: Keeper) -> None:
    slot = shard(key(20), 3 * BLOCK_BYTES)

    def reuse() -> None:
        slot.release()
        slot.begin(rank=0, generation=1, step=22)
        slot.image[-4096:] = bytes(4096)

    with pytest.raises(ConnectionAbortedError, match="not there any more"):
        put_shard(keeper.peer(), key(20), slot, keep=(0, 0), pace=Meddling(reuse), cancelled=NEVER)
    slot.close()
    assert keeper.copies.held() == []
    still_serves(keeper)


def test_a_sender_that_dies_on_the_way_leaves_nothing_behind(keeper: Keeper) -> None:
    before = memfds()
    connection = keeper.connect()
    request = {"rank": 0, "generation": 1, "step": 20, "image_bytes": 1 << 20, "digest": "5a" * 16}
    connection.send("put", **request, keep_generation=0, keep_step=0)
    connection.receive("send")
    connection._socket.sendall(bytes(1000))
    connection.close()
    wait_for(lambda: memfds() == before)
    assert keeper.copies.held() == []
    put(keeper.peer(), key(20))


class DyingPeer:
    """Agrees to take a copy, takes some of it, and then closes the connection or says nothing any more."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._listener = socket.create_server((HOST, 0))
        self.peer = Peer(
            host=HOST, port=self._listener.getsockname()[1], secret=SECRET, timeouts=HASTY if silent else PATIENT
        )
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        sock, _ = self._listener.accept()
        connection = Connection.accept(sock, SECRET, PATIENT)
        connection.receive("put")
        connection.send("send")
        sock.recv(1000)
        self._open.append(sock)
        if not self._silent:
            sock.close()

    def close(self) -> None:
        self._thread.join()
        for sock in [*self._open, self._listener]:
            sock.close()


@pytest.mark.parametrize("silent", [False, True])
def test_a_peer_that_dies_or_falls_silent_on_the_way_is_an_error_in_bounded_time(silent: bool) -> None:
    dying = DyingPeer(silent=silent)
    with pytest.raises(TimeoutError if silent else ConnectionError):
        put(dying.peer, key(20), 64 << 20)
    dying.close()


def test_what_there_is_no_memory_for_is_refused_before_it_is_sent() -> None:
    keeper = Keeper(available=10_000)
    put(keeper.peer(), key(20), 8_000)
    with pytest.raises(PeerRefused, match="no memory"):
        put(keeper.peer(), key(20, rank=1), 20_000)
    keeper.close()


# ---------------------------------------------------------------- who gets in


def test_who_knows_another_secret_gets_nothing_in_or_out(keeper: Keeper) -> None:
    put(keeper.peer(), key(20))
    wrong = keeper.peer(secret=SECRET[::-1])
    with pytest.raises(OSError):
        put(wrong, key(22))
    with pytest.raises(OSError):
        read(wrong, key(20), 0, 1)
    assert keeper.copies.held() == [key(20)]


def test_a_server_that_does_not_know_the_secret_is_sent_nothing() -> None:
    listener = socket.create_server((HOST, 0))
    received: list[bytes] = []

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"lgpeer\0\1" + bytes(32))
            received.append(sock.recv(72, socket.MSG_WAITALL))
            sock.sendall(bytes(32))
            received.append(sock.recv(1))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(PermissionError):
        Peer(host=HOST, port=listener.getsockname()[1], secret=SECRET).connect()
    thread.join()
    listener.close()
    assert received[1] == b""
    assert SECRET not in received[0]


def test_a_proof_that_was_overheard_opens_no_other_connection(keeper: Keeper) -> None:
    overheard = b""
    with socket.create_server((HOST, 0)) as between, contextlib.ExitStack() as stack:

        def relay() -> None:
            nonlocal overheard
            sock, _ = between.accept()
            server = stack.enter_context(raw(keeper))
            with sock:
                sock.sendall(server.recv(40, socket.MSG_WAITALL))
                overheard = sock.recv(72, socket.MSG_WAITALL)
                server.sendall(overheard)
                sock.sendall(server.recv(32, socket.MSG_WAITALL))

        thread = threading.Thread(target=relay)
        thread.start()
        Peer(host=HOST, port=between.getsockname()[1], secret=SECRET).connect().close()
        thread.join()
    with raw(keeper) as sock:
        assert len(sock.recv(40, socket.MSG_WAITALL)) == 40
        sock.sendall(overheard)
        assert sock.recv(1) == b"", "the server took an old proof"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=300), st.binary(min_size=64, max_size=64).map(lambda b: b"lgpeer\0\1" + b)))
def test_garbage_ends_the_connection_and_nothing_else(keeper: Keeper, data: bytes) -> None:
    with raw(keeper) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
    assert keeper.copies.held() == []


def test_before_the_secret_is_known_a_flood_costs_no_memory(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.replication.server.Connection.receive", lambda *_: pytest.fail("a request is read"))
    with raw(keeper) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"\xff" * (8 << 20))
    monkeypatch.undo()
    still_serves(keeper)


def test_a_connection_that_says_nothing_is_ended() -> None:
    keeper = Keeper(timeouts=HASTY)
    with raw(keeper) as sock:
        assert ended(sock)
    keeper.close()


def test_strangers_beyond_the_limit_wait_and_hold_up_none_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.replication.server._STRANGERS_MAX", 2)
    keeper = Keeper()
    known = [keeper.connect() for _ in range(4)]
    silent = [raw(keeper) for _ in range(2)]
    for sock in silent:
        assert len(sock.recv(40, socket.MSG_WAITALL)) == 40
    third = raw(keeper)
    assert keeper.server._free._value == 0
    for connection in known:
        connection.send("read", rank=0, generation=1, step=20, start=0, stop=0)
        with pytest.raises(PeerRefused, match="not here"):
            connection.receive("bytes")
        connection.close()
    silent[0].close()
    assert len(third.recv(40, socket.MSG_WAITALL)) == 40
    for sock in (*silent, third):
        sock.close()
    still_serves(keeper)
    keeper.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
REQUESTS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["put", "describe", "read"])},
    optional={
        name: st.integers(-2, 100) | JSON
        for name in (
            "rank",
            "generation",
            "step",
            "image_bytes",
            "digest",
            "keep_generation",
            "keep_step",
            "start",
            "stop",
            "world_size",
        )
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=REQUESTS | JSON)
def test_no_message_of_one_who_knows_the_secret_ends_the_server(keeper: Keeper, message: Any) -> None:
    packet = json.dumps(message).encode()
    connection = keeper.connect()
    connection._socket.sendall(struct.pack("<I", len(packet)) + packet)
    connection._socket.shutdown(socket.SHUT_WR)
    assert ended(connection._socket)
    connection.close()
    assert keeper.copies.held() == []


def test_a_message_that_is_announced_as_huge_is_not_waited_for(keeper: Keeper) -> None:
    connection = keeper.connect()
    connection._socket.sendall(struct.pack("<I", 2**32 - 1))
    assert ended(connection._socket)
    connection.close()
    still_serves(keeper)


def test_a_secret_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        Keeper(secret=b"")


def test_a_closed_server_leaves_no_port_open_and_no_memory_behind() -> None:
    before = memfds()
    keeper = Keeper()
    put(keeper.peer(), key(20))
    address = keeper.server.address
    keeper.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=DEADLINE_SECONDS)
    assert memfds() == before
    assert "lastgood-peers" not in {thread.name for thread in threading.enumerate()}
