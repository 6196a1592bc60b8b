"""A store in memory, so that the real recovery can look at many states a second.

Only the primitives differ from LocalStore; what is put together from them is the same code. Nothing is ever lost here.
"""

import errno
import os
from pathlib import Path, PurePosixPath
from typing import Union

from chaos.crash_states.enumerate import Tree
from workers.checkpoint.files import AppendFile, StoreFile, WritableFile
from workers.checkpoint.store import LocalStore

_Folder = dict[str, Union["_Folder", "MemoryFile"]]
_FREE_BYTES = 1 << 40


class MemoryFile:
    """A file's bytes, and an open file of it: WritableFile and AppendFile."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content
        self.direct = False

    def write_at(self, data: memoryview, position: int) -> None:
        before = self.content.ljust(position, b"\0")
        self.content = before[:position] + bytes(data) + before[position + len(data) :]

    def append(self, data: bytes) -> None:
        self.content += data

    def read_into(self, buffer: memoryview, position: int) -> int:
        found = self.content[position : position + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def truncate(self, size_bytes: int) -> None:
        self.content = self.content[:size_bytes].ljust(size_bytes, b"\0")

    def sync(self) -> None:
        return

    def is_cached(self, position: int, size_bytes: int) -> bool:
        return True

    def drop_cache(self) -> None:
        return

    def close(self) -> None:
        return


class MemoryStore(LocalStore):
    """A store that begins with the files of `tree`. Its root is a name only."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(Path("/run-in-memory"))
        self._top = _folder(tree)

    def tree(self) -> Tree:
        """What is there now."""
        return _tree(self._top)

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        found = self._find(path)
        if found is None:
            self._check_folders(path)
            return []
        if isinstance(found, MemoryFile):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return sorted(found)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def is_dir(self, path: str) -> bool:
        return isinstance(self._find(path), dict)

    def size(self, path: str) -> int:
        return len(self._file(path).content)

    def read_bytes(self, path: str) -> bytes:
        return self._file(path).content

    def create_dir(self, path: str) -> None:
        folder, name = self._place(path)
        if not isinstance(folder.setdefault(name, {}), dict):
            raise _taken(path)

    def open_new(self, path: str, *, direct: bool = False) -> WritableFile:
        folder, name = self._place(path)
        if name in folder:
            raise _taken(path)
        file = folder[name] = MemoryFile()
        return file

    def open_append(self, path: str) -> AppendFile:
        if not self.exists(path):
            self.open_new(path)
        return self._file(path)

    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        return self._file(path)

    def link(self, source: str, target: str) -> None:
        file = self._file(source)
        folder, name = self._place(target)
        if name in folder:
            raise _taken(target)
        folder[name] = file

    def move(self, source: str, target: str) -> None:
        if self.exists(target):
            raise _taken(target)
        if not self.exists(source):
            raise _missing(source)
        folder, name = self._place(target)
        source_folder, source_name = self._place(source)
        folder[name] = source_folder.pop(source_name)

    def unlink(self, path: str) -> None:
        self._file(path)
        folder, name = self._place(path)
        del folder[name]

    def remove_tree(self, path: str) -> None:
        self._check_folders(path)
        if self.exists(path):
            folder, name = self._place(path)
            del folder[name]

    def sync_dir(self, path: str) -> None:
        if not self.is_dir(path):
            raise _missing(path)

    def in_memory(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return _FREE_BYTES

    def _find(self, path: str) -> "_Folder | MemoryFile | None":
        if path.startswith("/") or ".." in path:
            self.local_path(path)  # refuses it, if it has to; slow
        found: _Folder | MemoryFile | None = self._top
        for part in path.split("/"):
            if part in ("", "."):
                continue
            if not isinstance(found, dict):
                return None
            found = found.get(part)
        return found

    def _check_folders(self, path: str) -> None:
        if any(isinstance(self._find(str(one)), MemoryFile) for one in PurePosixPath(path).parents):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def _file(self, path: str) -> MemoryFile:
        found = self._find(path)
        if isinstance(found, dict):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if found is None:
            raise _missing(path)
        return found

    def _place(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        found = self._find(folder or ".")
        if not isinstance(found, dict):
            raise _missing(folder)
        return found, name


def _folder(tree: Tree) -> _Folder:
    return {name: MemoryFile(child) if isinstance(child, bytes) else _folder(child) for name, child in tree.items()}


def _tree(folder: _Folder) -> Tree:
    return {name: child.content if isinstance(child, MemoryFile) else _tree(child) for name, child in folder.items()}


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
