"""The status page of one run, as a server serves it: three documents of the same state."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.observe.page import render
from orchestrator.observe.page.state import RunView
from orchestrator.observe.server import Response, Route


class StatusPage:
    """Entries are taken on one thread and pages asked for on others. `live()`: what the coordinator knows at the
    moment, as `RunView.document` takes it, None if there is none to ask."""

    def __init__(
        self,
        run_dir: Path,
        *,
        live: Callable[[], Mapping[str, Any] | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._view = RunView(run_dir)
        self._live = live
        self._clock = clock
        self._lock = threading.Lock()

    def follow(self, ledger: Ledger) -> None:
        """Take what it has, and what comes."""
        self.take_all(read_ledger(ledger.path))
        ledger.listen(self.take)

    def take(self, entry: Mapping[str, Any]) -> None:
        """The next entry of the ledger; never raises."""
        with self._lock:
            self._view.take(entry)

    def take_all(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            self.take(entry)

    def routes(self) -> dict[str, Route]:
        """For `server.Server`."""
        return {
            "/": lambda: _response(self.page(), "text/html"),
            "/main": lambda: _response(self.main(), "text/html"),
            "/state.json": lambda: _response(self.state_json(), "application/json"),
        }

    def page(self) -> str:
        """The whole page, as HTML."""
        live = self._live()
        with self._lock:
            return render.page(self._view.document(self._clock(), live), self._view.timeline)

    def main(self) -> str:
        """The part of it that changes, which the page asks for again and again."""
        live = self._live()
        with self._lock:
            return render.main(self._view.document(self._clock(), live), self._view.timeline)

    def state_json(self) -> str:
        """The state document; what JSON does not have (infinite intervals) is null."""
        live = self._live()
        with self._lock:
            document = self._view.document(self._clock(), live)
        return json.dumps(finite(document), allow_nan=False)


def _response(text: str, content_type: str) -> Response:
    return Response(body=text.encode(), content_type=f"{content_type}; charset=utf-8")


def finite(value: Any) -> Any:
    """For JSON: what it does not have is null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
