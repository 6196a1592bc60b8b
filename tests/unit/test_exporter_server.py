"""The exporter's HTTP server against clients that behave, and against those that do not."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.observe.server import Response, Route, Server

DEADLINE_SECONDS = 20.0


@contextmanager
def serving(routes: dict[str, Route], **limits: float) -> Iterator[Server]:
    server = Server(routes, host="127.0.0.1", port=0, **limits)  # type: ignore[arg-type]
    server.start()
    try:
        yield server
    finally:
        server.close()


def hello() -> Response:
    return Response(body=b"hello\n")


def get(server: Server, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=DEADLINE_SECONDS)


def is_closed(client: socket.socket) -> bool:
    """Waits until the server has closed it."""
    try:
        while client.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_known_paths_are_answered_and_all_others_are_not_found() -> None:
    with serving({"/": hello, "/metrics": hello}) as server:
        assert get(server, "/") == (200, b"hello\n")
        assert get(server, "/metrics?name=x") == (200, b"hello\n")
        for path in ("/nothing", "/metrics/", "/../etc/passwd", "/" + "a" * 3000, "//[", "/%00"):
            assert get(server, path)[0] in (404, 414)
        assert get(server, "/metrics", "HEAD") == (200, b"")
        assert get(server, "/metrics", "POST")[0] == 501


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe" * 50 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(300)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"",
    ],
)
def test_garbage_hurts_nobody_else(sent: bytes) -> None:
    with serving({"/": hello}) as server:
        with connect(server) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert is_closed(client)
        assert get(server, "/") == (200, b"hello\n")


def test_a_client_that_dribbles_is_cut_off_when_its_time_is_over() -> None:
    with serving({"/": hello}, request_seconds=0.2) as server, connect(server) as client:
        client.sendall(b"GET / HT")
        assert is_closed(client)


def test_a_client_that_does_not_read_is_cut_off_and_others_are_answered_meanwhile() -> None:
    closed = threading.Event()

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
        finally:
            closed.set()

    routes: dict[str, Route] = {"/events": lambda: Response(body=endless()), "/": hello}
    with serving(routes, write_seconds=0.2) as server, connect(server) as client:
        client.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert get(server, "/") == (200, b"hello\n")
        assert closed.wait(DEADLINE_SECONDS)


def test_too_many_connections_are_closed_and_there_is_room_again_afterwards() -> None:
    with serving({"/": hello}, connections_max=3) as server:
        held = [connect(server) for _ in range(3)]
        until(lambda: len(server._listener._deadlines) == 3)
        with connect(server) as one_more:
            assert is_closed(one_more)
        assert server.refused == 1
        for client in held:
            client.close()
        until(lambda: not server._listener._deadlines)
        assert get(server, "/") == (200, b"hello\n")


def test_streams_end_with_their_client_and_leave_room_for_scrapes() -> None:
    more, closed = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        try:
            yield b"data: 1\n\n"
            while not more.wait(0.01):
                yield b":\n"
        finally:
            closed.set()

    routes: dict[str, Route] = {
        "/events": lambda: Response(body=parts(), content_type="text/event-stream"),
        "/": hello,
    }
    with serving(routes, streams_max=1) as server:
        with connect(server) as client:
            client.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while b"data: 1" not in received:
                received += client.recv(65536)
            assert b"text/event-stream" in received
            closed.clear()
            assert get(server, "/events")[0] == 503
            assert get(server, "/") == (200, b"hello\n")
            closed.clear()
        assert closed.wait(DEADLINE_SECONDS)
        more.set()


def test_a_route_that_raises_is_an_error_of_its_own() -> None:
    def broken() -> Response:
        raise RuntimeError("no")

    with serving({"/broken": broken, "/": hello}) as server:
        assert get(server, "/broken")[0] == 500
        assert server.errors == 1
        assert get(server, "/") == (200, b"hello\n")


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with serving({"/": hello}) as first:
        second = Server({"/": hello}, host="127.0.0.1", port=first.port)
        second.start()
        try:
            assert second.port not in (0, first.port)
            assert second.fallback is not None and "in use" in second.fallback
            assert get(second, "/") == (200, b"hello\n")
        finally:
            second.close()
        assert first.fallback is None


def test_a_port_can_be_taken_again_after_the_server_has_gone() -> None:
    with serving({"/": hello}) as first:
        port = first.port
        assert get(first, "/")[0] == 200
    again = Server({"/": hello}, host="127.0.0.1", port=port)
    again.close()
    assert (again.port, again.fallback) == (port, None)


def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(OSError):
        Server({}, host="192.0.2.1", port=0)
