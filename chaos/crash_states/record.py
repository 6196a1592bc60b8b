"""A store that does what it is told in a real directory, and writes down each operation.

Names that differ from run to run (those of temporary files) are numbered instead: equal runs have equal records.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.crash_states.ops import (
    ROOT,
    Leftover,
    Link,
    Make,
    Mark,
    Op,
    Rename,
    Resize,
    SyncDir,
    SyncFile,
    Unlink,
    Write,
)
from workers.checkpoint.files import AppendFile, WritableFile
from workers.checkpoint.store import LocalStore

_UNIQUE = re.compile(r"\.([0-9a-f]{32})\.tmp$")


class Log:
    """The operations so far, and which file has which name now. For one run directory, whoever writes to it."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._names: dict[str, dict[str, str]] = {ROOT: {}}
        self._made: dict[str, int] = {}
        self._unique: dict[str, str] = {}
        self._lock = threading.Lock()

    def mark(self, kind: str, **facts: Any) -> None:
        """Something that is no operation happened."""
        self.add(Mark(kind, facts))

    def add(self, *ops: Op) -> None:
        """Write them down."""
        with self._lock:
            self.ops += ops

    def make(self, path: str, *, is_dir: bool = False) -> str:
        """A new file or directory has this name; returns its node."""
        folder, name = self.place(path)
        label = f"{folder}/{name}".lstrip("/")
        with self._lock:
            self._made[label] = self._made.get(label, 0) + 1
            node = f"{label}#{self._made[label]}"
            self._names[folder][name] = node
            if is_dir:
                self._names[node] = {}
        self.add(Make(folder, name, node, is_dir))
        return node

    def link(self, source: str, target: str) -> None:
        """A file has one more name."""
        folder, name = self.place(target)
        node = self._names[folder][name] = self.node(source)
        self.add(Link(folder, name, node))

    def rename(self, source: str, target: str) -> None:
        """A file or directory has another name, in place of what had it before."""
        (folder, name), (target_folder, target_name) = self.place(source), self.place(target)
        node = self._names[target_folder][target_name] = self._names[folder].pop(name)
        self.add(Rename(folder, name, target_folder, target_name, node))

    def unlink(self, path: str) -> None:
        """A name is gone."""
        folder, name = self.place(path)
        del self._names[folder][name]
        self.add(Unlink(folder, name))

    def leftover(self, path: str, name: str) -> None:
        """A file was created in a directory, and removed at once."""
        self.add(Leftover(self.node(path), name))

    def knows(self, path: str) -> bool:
        """Whether there is such a name."""
        try:
            self.node(path)
        except KeyError:
            return False
        return True

    def node(self, path: str) -> str:
        """Which file or directory has this name; KeyError if none."""
        node = ROOT
        for part in self._usual(path).split("/"):
            if part not in ("", "."):
                node = self._names[node][part]
        return node

    def place(self, path: str) -> tuple[str, str]:
        """(directory, name)."""
        folder, _, name = self._usual(path).rpartition("/")
        return self.node(folder), name

    def _usual(self, path: str) -> str:
        match = _UNIQUE.search(path)
        if match is None:
            return path
        base = path[: match.start()]
        if match[1] not in self._unique:
            count = self._made[base] = self._made.get(base, 0) + 1
            self._unique[match[1]] = str(count)
        return f"{base}.{self._unique[match[1]]}.tmp"


class RecordingStore(LocalStore):
    """One process's view of the run directory. `before` is called before each operation, and may raise."""

    file_kind: "type[RecordedFile]"

    def __init__(self, root: Path, log: Log, before: Callable[[], object] = lambda: None) -> None:
        super().__init__(root)
        self.log = log
        self.before = before

    def create_dir(self, path: str) -> None:
        self.before()
        super().create_dir(path)
        if not self.log.knows(path):
            self.log.make(path, is_dir=True)

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        names = super().list_dir(path, fresh=fresh)
        if fresh and self.log.knows(path):
            self.log.leftover(path, ".probe.tmp")
        return names

    def open_new(self, path: str, *, direct: bool = False) -> WritableFile:
        self.before()
        return self.file_kind(super().open_new(path, direct=direct), self, self.log.make(path))

    def open_append(self, path: str) -> AppendFile:
        self.before()
        size = self.size(path) if self.exists(path) else 0
        inner = super().open_append(path)
        return RecordedAppend(inner, self, self.log.node(path) if self.log.knows(path) else self.log.make(path), size)

    def link(self, source: str, target: str) -> None:
        self.before()
        super().link(source, target)
        self.log.link(source, target)

    def move(self, source: str, target: str) -> None:
        self.before()
        super().move(source, target)
        self.log.rename(source, target)

    def unlink(self, path: str) -> None:
        self.before()
        super().unlink(path)
        self.log.unlink(path)

    def remove_tree(self, path: str) -> None:
        self.before()
        paths = self._below(path)
        super().remove_tree(path)
        for one in paths:
            self.log.unlink(one)

    def sync_dir(self, path: str) -> None:
        self.before()
        super().sync_dir(path)
        self.log.add(SyncDir(self.log.node(path)))

    def _below(self, path: str) -> list[str]:
        """Everything that goes with this, the deepest first."""
        if not self.exists(path):
            return []
        below = [f"{path}/{name}" for name in self.list_dir(path)] if self.is_dir(path) else []
        return [deeper for one in below for deeper in self._below(one)] + [path]


class RecordedFile:
    """A WritableFile."""

    def __init__(self, inner: WritableFile, store: RecordingStore, node: str) -> None:
        self.inner = inner
        self.store = store
        self.node = node

    @property
    def direct(self) -> bool:
        return self.inner.direct

    @direct.setter
    def direct(self, wanted: bool) -> None:
        self.inner.direct = wanted

    def write_at(self, data: memoryview, position: int) -> None:
        self.store.before()
        self.inner.write_at(data, position)
        self.store.log.add(Write(self.node, position, bytes(data)))

    def truncate(self, size_bytes: int) -> None:
        self.store.before()
        self.inner.truncate(size_bytes)
        self.store.log.add(Resize(self.node, size_bytes))

    def sync(self) -> None:
        self.store.before()
        self.inner.sync()
        self.store.log.add(SyncFile(self.node))

    def read_into(self, buffer: memoryview, position: int) -> int:
        return self.inner.read_into(buffer, position)

    def is_cached(self, position: int, size_bytes: int) -> bool:
        return self.inner.is_cached(position, size_bytes)

    def drop_cache(self) -> None:
        self.inner.drop_cache()

    def close(self) -> None:
        self.inner.close()


class RecordedAppend:
    """An AppendFile."""

    def __init__(self, inner: AppendFile, store: RecordingStore, node: str, size: int) -> None:
        self._inner = inner
        self._store = store
        self._node = node
        self._size = size

    def append(self, data: bytes) -> None:
        self._store.before()
        self._inner.append(data)
        self._store.log.add(Write(self._node, self._size, data))
        self._size += len(data)

    def sync(self) -> None:
        self._store.before()
        self._inner.sync()
        self._store.log.add(SyncFile(self._node))

    def close(self) -> None:
        self._inner.close()


RecordingStore.file_kind = RecordedFile
