"""The ledger: what happened in a run, in the order in which the coordinator learnt of it. One JSON object a line.

Invariants:
- Lines are only ever appended, each with one write. Nothing that decides relies on the ledger being complete: it is
  evidence, for people and for judges.
- Recording never stops a run: lines that the storage refuses (a full disk) are counted, and the next one says how many
  are lost. Lines that it does not take at once (a stalled disk) are waited for `_PATIENCE_SECONDS` once, and then
  written in their order when it does.

Faults survived: a kill or power loss in the middle of a line (the torn line is closed when the ledger is opened again,
and readers pass over it); two writers for a moment, while an old coordinator is being stopped.

docs/ledger.md lists the kinds and their fields.
"""

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from workers import failpoint
from workers.checkpoint.store import LocalStore

_PATIENCE_SECONDS = 1.0
_IDLE_SECONDS = 10.0
LEDGER_FILE = "ledger.jsonl"
LEDGER_THREAD = "lastgood-ledger"
FORMAT_VERSION = 1

DURABLE_KINDS = frozenset(
    {
        "generation",
        "failure",
        "skip",
        "corruption",
        "restored",
        "commit",
        "memory_dropped",
        "quarantine",
        "probation",
        "unprotected",
        "protected_again",
        "fault",
        "deleted",
        "finished",
        "stopped",
    }
)
"""Kinds that are on disk before `append` returns, unless the disk stalls. The rest may be lost to a power failure,
never to a kill."""


class LedgerStore(Protocol):
    """What the ledger needs of storage: see LocalStore."""

    def exists(self, path: str) -> bool: ...

    def read_bytes(self, path: str) -> bytes: ...

    def append(self, path: str, data: bytes, *, sync: bool = True) -> None: ...


class Ledger:
    """Appends to the ledger at `path`, whose directory exists. Safe to use from several threads.

    `store` is that directory, if it is to be written through another one than usual.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, store: LedgerStore | None = None) -> None:
        self.path = path
        self._store: LedgerStore = store if store is not None else LocalStore(path.parent)
        self._name = path.name
        self._clock = clock
        self._lock = threading.Lock()
        self._lost = 0
        self._lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._behind: _Line | None = None
        self._listeners: list[Callable[[Mapping[str, Any]], None]] = []
        data = self._store.read_bytes(self._name) if self._store.exists(self._name) else b""
        self._torn = bool(data) and not data.endswith(b"\n")
        self._seq = max((entry["seq"] for entry in entries_in(data.splitlines())), default=0)

    def append(self, kind: str, **fields: Any) -> None:
        """Record an event. `at` among the fields is when it happened, in Unix seconds; now, if it is not given.

        Values that JSON does not have become strings. Raises ValueError for the reserved fields v and seq.
        """
        if reserved := fields.keys() & {"v", "seq", "lost"}:
            raise ValueError(f"a ledger entry sets {', '.join(sorted(reserved))} itself")
        with self._lock:
            self._seq += 1
            at = fields.pop("at", None)
            entry = {"v": FORMAT_VERSION, "seq": self._seq, "at": self._clock() if at is None else at, "kind": kind}
            line = _Line(entry=_plain(entry | fields), durable=kind in DURABLE_KINDS)
            self._lines.put(line)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name=LEDGER_THREAD, daemon=True)
                self._writer.start()
        behind = self._behind
        if behind is None or behind.done.is_set():
            # If it takes longer, later ones are not waited for until this one is there.
            self._behind = None if line.done.wait(_PATIENCE_SECONDS) else line

        for listener in self._listeners:
            listener(line.entry)

    def listen(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Have it called with each entry from now on, on the thread that appends it."""
        self._listeners.append(listener)

    def _write_all(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._lines.empty():
                        self._writer = None
                        return
                continue
            try:
                self._write(line)
            finally:
                line.done.set()

    def _write(self, line: "_Line") -> None:
        entry = {**line.entry, "lost": self._lost} if self._lost else line.entry
        data = json.dumps(entry, allow_nan=False).encode() + b"\n"
        data = b"\n" + data if self._torn else data
        try:
            tear = partial(self._store.append, self._name, data[: len(data) // 2], sync=False)
            failpoint.hit("ledger.append", tear, event=entry["kind"])
            self._store.append(self._name, data, sync=line.durable)
            failpoint.hit("ledger.appended", event=entry["kind"])
        except OSError:
            # How much of the line is there is unknown; a newline before the next one separates them.
            self._torn = True
            self._lost += 1
        else:
            self._torn = False
            self._lost = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    entry: dict[str, Any]
    durable: bool
    done: threading.Event = field(default_factory=threading.Event)


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """All entries that are whole, in the order of the file; FileNotFoundError if there is no ledger."""
    return parse_ledger(path.read_bytes())


def parse_ledger(data: bytes) -> list[dict[str, Any]]:
    """The same, of a ledger's content."""
    return list(entries_in(data.splitlines()))


def committed_checkpoints(entries: Iterable[dict[str, Any]]) -> frozenset[str]:
    """Names of the checkpoints that the ledger says were committed and not deleted since."""
    names: set[str] = set()
    for entry in entries:
        if entry["kind"] == "commit" and "checkpoint" in entry:
            names.add(str(entry["checkpoint"]))
        elif entry["kind"] == "deleted":
            names.discard(str(entry.get("checkpoint")))
    return frozenset(names)


def begun_generations(entries: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Numbers of the generations that the ledger says were created and not found void, or whose ranks it heard of."""
    kinds = ("generation", "restored", "first_step")
    return frozenset(entry["generation"] for entry in entries if entry["kind"] in kinds)


def entries_in(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """Those of the lines that are whole entries."""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        wanted = (("seq", int), ("at", int | float), ("kind", str))
        if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in wanted):
            yield entry


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
