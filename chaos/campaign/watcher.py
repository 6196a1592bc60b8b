"""What the ledger says of a run as it goes: the observations that decide when the next fault is due."""

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from chaos.campaign.schedule import Seen

_SAVE_SECONDS_DEFAULT = 0.2
_SAVES_REMEMBERED = 20


class LedgerTail:
    """New lines of a ledger that another process writes, each once, whole ones only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._position += whole
        entries = []
        for line in data[:whole].splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and "kind" in entry:
                entries.append(entry)
        return entries


class Observer:
    """Folds entries into what the pacer wants to see. Steps finished come from the coordinator, through `at_step`."""

    def __init__(self) -> None:
        self.finished = False
        self.stopped: str | None = None
        self._generation = self._ranks = 0
        self._first: set[int] = set()
        self._failed = False
        self._save: int | None = None
        self._step = -1
        self._durable: deque[float] = deque(maxlen=_SAVES_REMEMBERED)

    def take(self, entry: dict[str, Any]) -> None:
        match entry["kind"]:
            case "generation":
                self._generation, self._ranks = entry["generation"], entry["ranks"]
                self._first.clear()
                self.stopped = None
            case "first_step" if entry["generation"] == self._generation:
                self._first.add(entry["rank"])
                self._failed = self._failed and len(self._first) < self._ranks
                self._step = max(self._step, entry["step"])
            case "failure":
                self._failed = True
                self._first.clear()
            case "snapshot":
                self._save = entry["step"]
            case "commit":
                self._save = None
                self._step = max(self._step, entry["step"])
                self._durable.append(entry["durable_seconds"])
            case "save_failed":
                self._save = None
            case "finished":
                self.finished = True
            case "stopped":
                self.stopped = entry["reason"]

    def at_step(self, step: int) -> None:
        self._step = max(self._step, step)

    def seen(self, at: float) -> Seen:
        return Seen(
            at=at,
            step=self._step,
            training=0 < self._ranks == len(self._first),
            recovering=self._failed,
            save=self._save,
            save_seconds=statistics.median(self._durable) if self._durable else _SAVE_SECONDS_DEFAULT,
        )
