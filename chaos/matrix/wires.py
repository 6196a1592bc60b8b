"""What stands in for Ray's actor calls: the coordinator behind a socket, and a Link that calls it there.

As with an actor, calls fail while the coordinator is dead, and go to its successor once that listens.
"""

import asyncio
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from workers.link import Link

_RETRY_SECONDS = 0.01


class SocketLink(Link):
    """A Link whose coordinator is an address; each of its threads has a connection of its own."""

    _here = threading.local()

    def _call(self, method: str, *arguments: Any) -> Any:
        gone_since: float | None = None
        while not self._closed:
            try:
                connections = self._here.__dict__.setdefault("connections", {})
                if self._member not in connections:
                    connections[self._member] = Client(self._coordinator, family="AF_UNIX")
                connections[self._member].send((method, (self._member, *arguments)))
                return connections[self._member].recv()
            except (OSError, EOFError):
                connections.pop(self._member, None)
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > self._lost_after_seconds:
                    self._report_lost("the coordinator is gone")
                    return None
                time.sleep(_RETRY_SECONDS)
        return None


def ask(address: str, method: str, *arguments: Any) -> Any:
    """One call; OSError or EOFError while nobody answers."""
    with Client(address, family="AF_UNIX") as connection:
        connection.send((method, arguments))
        return connection.recv()


async def serve(coordinator: Any, address: str) -> None:
    """Answer calls of this object's coroutines, for ever."""
    loop = asyncio.get_running_loop()
    listener = Listener(address, family="AF_UNIX", backlog=64)

    def answer(connection: Connection) -> None:
        try:
            while True:
                method, arguments = connection.recv()
                call = asyncio.run_coroutine_threadsafe(getattr(coordinator, method)(*arguments), loop)
                connection.send(call.result())
        except (OSError, EOFError):
            return  # the member is gone, or calls again

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    await asyncio.Event().wait()
