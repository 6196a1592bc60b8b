"""The one seam to storage: every byte of a run directory is written and read through here.

`Store` is what the checkpoint code relies on; `LocalStore` gives it on POSIX file systems, `object_store.ObjectStore`
on object storage. What a local or shared POSIX file system guarantees, and what is built on it:
- A rename within a file system is atomic; it is durable once the directories are fsynced; file contents only once
  the file is. So: write a temporary file, fsync it, give it its name, fsync the directory, and only then rely on it.
- A hard link is made or refused as a whole, so of several processes exactly one creates a name (`create_exclusive`).
- Nothing that has its final name is ever written again.

Faults survived: a kill or a power loss between any two operations (temporary files are left, never half a named file);
another driver creating the same name; NFS, where link and rename may report failure after success, because the answer
was lost and the request repeated (the outcome is looked at), and listings may be stale (`fresh=True`).

Paths are relative to the root, with "/" between parts; ".." and absolute paths are refused. A test that records or
fails storage operations overrides the primitives: open_new, open_append, create_dir, link, move, unlink, sync_dir,
remove_tree, and the methods of the files that are opened.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from workers import failpoint
from workers.checkpoint.files import (
    AppendFile,
    LocalAppendFile,
    LocalFile,
    NewFile,
    StoreFile,
    WritableFile,
    closing_file,
)

TRASH_DIR = "trash"
"""What is set aside, and about to be deleted."""
_MEMORY_FILE_SYSTEMS = {0x01021994, 0x858458F6}  # tmpfs, ramfs


def is_no_space(error: OSError) -> bool:
    """Whether deleting something may help."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class Store(Protocol):
    """What the checkpoint code needs of storage. Errors are OSErrors, with the path in them."""

    def make_dir(self, path: str) -> None:
        """Create a directory and its parents, durably; an existing one is fine. The root must be there: if it is gone,
        a new one would look like a run that never was."""

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        """Sorted names; empty if there is no such directory. `fresh` defeats stale listings, and needs write access."""

    def exists(self, path: str) -> bool:
        """Whether a file or directory has this name; an error other than absence is raised."""

    def is_dir(self, path: str) -> bool:
        """Whether a directory has this name."""

    def was_made(self, path: str) -> bool:
        """Whether a directory that the run made is there. False if the file system that it is on is not mounted here;
        on object storage, which needs none to be made, whether the storage answers."""

    def size(self, path: str) -> int:
        """Bytes in a file."""

    def read_bytes(self, path: str) -> bytes:
        """A whole small file."""

    def create_exclusive(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        """Create a file durably, once among all processes; FileExistsError if the name has another content.

        points="generation" passes the fault points generation.open, .write, .fsync, .link and .dir_fsync, each before
        its step.
        """

    def write_atomic(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        """Create a file durably, whole or not at all; FileExistsError if the name is taken.

        points="commit" passes the fault points commit.open, .write, .fsync, .rename, .dir_fsync and .parent_fsync.
        """

    def begin(self, path: str, *, direct: bool = False) -> NewFile:
        """Begin a file that gets its name once it is complete; FileExistsError if the name is taken. `direct`: past
        this machine's page cache, where that is possible."""

    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        """Open a file for reading."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def hold(self, path: str, *, generation: int, again: bool = False) -> None:
        """A generation is going to rely on this directory: all of it is durable, and not to be set aside by an earlier
        generation, however late its request arrives. FileNotFoundError if it is gone. `again`: once more, now that the
        generation's file is there, against those who had seen the first hold and no file."""

    def set_aside(self, path: str, *, generation: int, began: Callable[[int], bool]) -> bool:
        """Take a directory out of sight, durably and as a whole; then it can be put back, or dropped. False if a later
        generation holds it, one that `began`; FileNotFoundError if it is gone."""

    def put_back(self, path: str, *, generation: int) -> None:
        """Undo `set_aside`."""

    def drop(self, path: str) -> None:
        """Delete a directory that is set aside, and all in it; nothing happens if it is gone, or was put back."""

    def aside(self, path: str) -> list[str]:
        """Which directories in this one are set aside and not yet dropped: their names."""

    def place(self, path: str) -> str:
        """Where a file or directory lies, for people and for other programs: a path, or a URL."""

    def in_memory(self) -> bool:
        """Whether the root lies on a file system that keeps its files in memory only."""

    def free_bytes(self) -> int:
        """What can still be written, as far as the file system knows; a quota may allow less."""


class LocalStore:
    """A Store in a directory of a local or shared POSIX file system."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._durable_names: set[str] = set()  # of files that are appended to

    def local_path(self, path: str) -> Path:
        """Where a path of this store lies; ValueError if it would lie outside of the root."""
        return self.root / checked_path(path)

    def make_dir(self, path: str) -> None:
        if not self.is_dir("."):
            raise FileNotFoundError(errno.ENOENT, "the run directory has vanished", str(self.root))
        if self.exists(path) and not self.is_dir(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.local_path(path)))
        pure = PurePosixPath(path)
        missing = [str(folder) for folder in (pure, *pure.parents) if not self.exists(str(folder))]
        for folder in reversed(missing):
            self.create_dir(folder)
        for folder in missing:
            self.sync_dir(_parent(folder))

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        local = self.local_path(path)
        try:
            if fresh:
                # An NFS client drops its cached listing when the directory changes by its own hand.
                probe = local / f".probe-{uuid.uuid4().hex}.tmp"
                os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                probe.unlink()
            return sorted(os.listdir(local))
        except FileNotFoundError:
            if not self.root.is_dir():
                raise  # storage that has gone away must not look like a run without checkpoints
            return []

    def exists(self, path: str) -> bool:
        try:
            os.stat(self.local_path(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_dir(self, path: str) -> bool:
        return self.exists(path) and self.local_path(path).is_dir()

    def was_made(self, path: str) -> bool:
        return self.is_dir(path)

    def size(self, path: str) -> int:
        return os.stat(self.local_path(path)).st_size

    def read_bytes(self, path: str) -> bytes:
        return self.local_path(path).read_bytes()

    def create_exclusive(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        temporary = self._write_temporary(path, data, points, context)
        try:
            hit_point(points, "link", context)
            self.link(temporary, path)
        except OSError:
            # Ours after all, if the answer was lost. Equal contents of two drivers differ in the driver's id.
            if not self.exists(path) or self.read_bytes(path) != data:
                raise
        finally:
            self._discard(temporary)
        hit_point(points, "dir_fsync", context)
        self.sync_dir(_parent(path))

    def write_atomic(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        temporary = self._write_temporary(path, data, points, context)
        try:
            hit_point(points, "rename", context)
            self.move(temporary, path)
        except OSError:
            self._discard(temporary)
            raise
        hit_point(points, "dir_fsync", context)
        # The parent too: the directory of a first save is as new as the file in it.
        self.sync_dir(_parent(path))
        hit_point(points, "parent_fsync", context)
        self.sync_dir(_parent(_parent(path)))

    def append(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Append to a file in one write, creating it if need be; a crash may leave a part of `data` at its end."""
        with contextlib.closing(self.open_append(path)) as file:
            file.append(data)
            if sync:
                file.sync()
        # Also if the file was there: whoever created it may have been killed before its name was durable, or did not
        # need it to be.
        if sync and path not in self._durable_names:
            self.sync_dir(_parent(path))
            self._durable_names.add(path)

    def begin(self, path: str, *, direct: bool = False) -> NewFile:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.local_path(path)))
        return _LocalNewFile(self, path, direct=direct)

    def hold(self, path: str, *, generation: int, again: bool = False) -> None:
        if again:
            return
        # Whoever wrote it may have been killed before its names were durable. A late rename is not to be feared: a
        # process that is gone has none under way.
        self.sync_dir(path)
        self.sync_dir(_parent(path))

    def set_aside(self, path: str, *, generation: int, began: Callable[[int], bool]) -> bool:
        target = _aside(path)
        with contextlib.suppress(FileNotFoundError):  # another one empties the trash
            self.remove_tree(target)
        self.rename(path, target)
        return True

    def put_back(self, path: str, *, generation: int) -> None:
        self.rename(_aside(path), path)

    def drop(self, path: str) -> None:
        self.remove_tree(_aside(path))

    def aside(self, path: str) -> list[str]:
        return self.list_dir(TRASH_DIR, fresh=True)

    def rename(self, source: str, target: str) -> None:
        """Rename durably; FileExistsError if the target exists."""
        self.move(source, target)
        self.sync_dir(_parent(target))
        if _parent(source) != _parent(target):
            self.sync_dir(_parent(source))

    def move(self, source: str, target: str) -> None:
        """Rename, not durably yet; FileExistsError if the target exists."""
        local_source, local_target = self.local_path(source), self.local_path(target)
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(local_target))
        try:
            os.rename(local_source, local_target)
        except FileNotFoundError:
            if self.exists(source) or not self.exists(target):
                raise

    def create_dir(self, path: str) -> None:
        """Create one directory, not durably yet; one that is there is fine."""
        local = self.local_path(path)
        try:
            os.mkdir(local)
        except FileExistsError:
            if not local.is_dir():
                raise

    def open_append(self, path: str) -> AppendFile:
        """Open a file to append to, and create it if need be, not durably yet."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return LocalAppendFile(os.open(self.local_path(path), flags, 0o666))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError if it is taken."""
        os.link(self.local_path(source), self.local_path(target))

    def remove_tree(self, path: str) -> None:
        """Delete a directory and all in it, or a file; nothing happens if it is absent."""
        local = self.local_path(path)
        if local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        else:
            local.unlink(missing_ok=True)

    def open_new(self, path: str, *, direct: bool = False) -> WritableFile:
        """Create a file to write, under its name at once; FileExistsError if it is taken."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return LocalFile(os.open(self.local_path(path), flags, 0o666), direct=direct)

    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        return LocalFile(os.open(self.local_path(path), os.O_RDONLY | os.O_CLOEXEC), direct=direct)

    def unlink(self, path: str) -> None:
        """Delete one file."""
        self.local_path(path).unlink()

    def sync_dir(self, path: str) -> None:
        _fsync_directory(self.local_path(path))

    def place(self, path: str) -> str:
        return str(self.local_path(path))

    def in_memory(self) -> bool:
        buffer = (ctypes.c_long * 32)()  # struct statfs begins with the type, and is smaller than this
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.statfs(os.fsencode(self.root), buffer) != 0:
            return False
        return (buffer[0] & 0xFFFFFFFF) in _MEMORY_FILE_SYSTEMS

    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def _write_temporary(self, path: str, data: bytes, points: str, context: Mapping[str, Any]) -> str:
        """A durable file beside `path`, under a name that no other process uses."""
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        hit_point(points, "open", context)
        with closing_file(self.open_new(temporary)) as file:
            try:
                hit_point(points, "write", context, tear=lambda: file.write_at(memoryview(data)[: len(data) // 2], 0))
                file.write_at(memoryview(data), 0)
                hit_point(points, "fsync", context)
                file.sync()
            except OSError:
                self._discard(temporary)  # on a full disk it would only make things worse
                raise
        return temporary

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            self.unlink(temporary)


class _LocalNewFile:
    """A NewFile: written under <name>.tmp, and renamed when it is complete."""

    def __init__(self, store: LocalStore, path: str, *, direct: bool) -> None:
        self._store = store
        self._path = path
        self._temporary = f"{path}.tmp"
        self._file = store.open_new(self._temporary, direct=direct)

    def write_at(self, data: memoryview, position: int) -> None:
        self._file.write_at(data, position)

    def truncate(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)

    def sync(self) -> None:
        self._file.sync()

    def publish(self) -> None:
        self._store.move(self._temporary, self._path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._store.unlink(self._temporary)

    def close(self) -> None:
        self._file.close()


def checked_path(path: str) -> PurePosixPath:
    """A path within a store; ValueError if it would lie outside."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path within the run directory")
    return pure


def make_root(root: Path) -> None:
    """Create a store's root and its parents, durably; an existing one is fine."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _fsync_directory(folder.parent)


def hit_point(points: str, step: str, context: Mapping[str, Any], tear: Callable[[], None] | None = None) -> None:
    """Pass the fault point of a step, if the caller's steps have any."""
    if points:
        failpoint.hit(f"{points}.{step}", tear, **context)


def _aside(path: str) -> str:
    return f"{TRASH_DIR}/{PurePosixPath(path).name}"


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
