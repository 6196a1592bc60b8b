"""A small HTTP server for the run's metrics and its page: a table of routes, GET and HEAD, and 404 for the rest.

It runs on threads of the coordinator's process, so it must survive whatever connects to it:

- A client that says nothing, or says it slowly, is cut off when its time for a request is over.
- More connections than `CONNECTIONS_MAX` are closed at once; streams, which stay open, are fewer, so that there is
  room for a scrape.
- A request that is no HTTP, or too long, is answered with an error, or not at all; a route that raises, with 500.
- A client that does not read is cut off when a write has waited for `WRITE_SECONDS`.

A port that is taken is no reason to fail: the kernel chooses another one, and `Server.port` says which.
"""

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger("lastgood")

CONNECTIONS_MAX = 64
STREAMS_MAX = 16
REQUEST_SECONDS = 10.0
WRITE_SECONDS = 10.0
STREAM_SECONDS = 600.0
_QUEUE = 128
_LOOK_SECONDS = 0.5
_PATH_BYTES_MAX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """`body`: bytes; or parts, which are sent as they come until there are no more, the client goes, or
    `STREAM_SECONDS` have passed. What yields parts is closed then."""

    body: bytes | Iterable[bytes]
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[], Response]


class Server:
    """Listens at once; `start` begins to answer. `port`: 0 for any that is free.

    Raises OSError if nothing can be listened at on `host`. `fallback`: why it is not the port that was asked for; None
    if it is.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        host: str,
        port: int,
        request_seconds: float = REQUEST_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
        streams_max: int = STREAMS_MAX,
    ) -> None:
        self.fallback: str | None = None

        def make(wanted: int) -> _Listener:
            limits = (request_seconds, write_seconds, connections_max, streams_max)
            return _Listener(_address(host, wanted), dict(routes), *limits)

        try:
            self._listener = make(port)
        except OSError as error:
            if port == 0:
                raise
            self.fallback = error.strerror or str(error)
            self._listener = make(0)
        self.host = host
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(_LOOK_SECONDS,), name="lastgood-exporter", daemon=True
        )

    @property
    def target(self) -> str:
        """host:port, as a URL has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def refused(self) -> int:
        """Connections that were closed since there were too many."""
        return self._listener.refused

    @property
    def errors(self) -> int:
        """Requests that a route failed to answer."""
        return self._listener.errors

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop answering; connections that are open end."""
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self._listener.cut_off(everyone=True)


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, address


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # after a restart the port may still be in TIME_WAIT
    request_queue_size = _QUEUE

    def __init__(
        self,
        address: tuple[socket.AddressFamily, tuple[Any, ...]],
        routes: Mapping[str, Route],
        request_seconds: float,
        write_seconds: float,
        connections_max: int,
        streams_max: int,
    ) -> None:
        self.address_family = address[0]
        self.routes = routes
        self.request_seconds = request_seconds
        self.write_seconds = write_seconds
        self.connections_max = connections_max
        self.streams = threading.Semaphore(streams_max)
        self.refused = 0
        self.errors = 0
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__(address[1][:2] if self.address_family == socket.AF_INET else address[1], _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._deadlines) >= self.connections_max
            if not full:
                self._deadlines[request] = time.monotonic() + self.request_seconds
        if full:
            self.refused += 1
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self.refused += 1
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between two connections, and twice a second."""
        self.cut_off()

    def extend(self, request: Any, seconds: float) -> None:
        with self._lock:
            if request in self._deadlines:
                self._deadlines[request] = time.monotonic() + seconds

    def cut_off(self, *, everyone: bool = False) -> None:
        """Connections whose time is over: their threads find them closed, and end."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if everyone or now > deadline]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke says nothing about us."""
        logger.debug("lastgood: a connection to the exporter broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request: scrapes are seconds apart, and a connection that waits is one that is held."""

    server: _Listener
    protocol_version = "HTTP/1.1"
    server_version = "lastgood"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.write_seconds)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        self.close_connection = True
        if len(self.path) > _PATH_BYTES_MAX:
            self._send(_plain(HTTPStatus.REQUEST_URI_TOO_LONG), body)
            return
        try:
            route = self.server.routes.get(urlsplit(self.path).path)
        except ValueError:
            route = None
        if route is None:
            self._send(_plain(HTTPStatus.NOT_FOUND), body)
            return
        try:
            response = route()
        except Exception:
            self.server.errors += 1
            logger.exception("lastgood: the exporter could not answer %s", self.path)
            response = _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(response, body)

    def _send(self, response: Response, body: bool) -> None:
        if isinstance(response.body, bytes):
            self.server.extend(self.request, self.server.request_seconds + self.server.write_seconds)
            self._head(response, {"Content-Length": str(len(response.body))})
            if body:
                self.wfile.write(response.body)
            return
        parts = response.body
        try:
            if not self.server.streams.acquire(blocking=False):
                self._send(_plain(HTTPStatus.SERVICE_UNAVAILABLE), body)
                return
            try:
                self._stream(response, parts, body)
            finally:
                self.server.streams.release()
        finally:
            if close := getattr(parts, "close", None):
                close()

    def _stream(self, response: Response, parts: Iterable[bytes], body: bool) -> None:
        self.server.extend(self.request, STREAM_SECONDS)
        self._head(response, {})
        if not body:
            return
        try:
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()
        except OSError:
            raise
        except Exception:
            self.server.errors += 1
            logger.exception("lastgood: the exporter could not go on with %s", self.path)

    def _head(self, response: Response, more: Mapping[str, str]) -> None:
        self.send_response(response.status)
        headers = {"Content-Type": response.content_type, "Cache-Control": "no-store", "Connection": "close"}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff", **response.headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _plain(status: HTTPStatus) -> Response:
    return Response(body=f"{status.value} {status.phrase}\n".encode(), status=status.value)
