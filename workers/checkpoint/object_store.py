"""A Store on object storage: S3 and what speaks its protocol, Google Cloud Storage, Azure.

What such storage guarantees, and what is built on it:
- An object appears whole or not at all, and is durable once its request is answered. So there is nothing to fsync, no
  temporary file and no rename: a shard is uploaded under its own name, which only its attempt uses.
- A request can ask that there be no object yet, or that it still be the one that was read (If-None-Match, If-Match).
  So of several processes exactly one creates a name, and nobody overwrites what he has not seen.
- There are no directories, and no rename of many objects at once. So a directory is put out of sight by its *mark*, an
  object trash/<path> that says "aside". Readers pass over what is marked; the mark goes last, after all else. Only
  what lies in one of the run's own directories, as checkpoints do, can be marked, which saves looking everywhere.
- Listings show what was written before them (all of the named ones do so since 2020).

Faults survived: a kill between any two requests; another driver doing the same; an answer that is lost, so that the
repeated request finds its own work (contents are compared); and a request of a process that is gone, which arrives
late, when others have long gone on. The last one is why a generation *holds* what it relies on: it writes "held" and
its number into the mark, and an earlier generation's "aside", which demands that there be no mark or an older one, is
refused. An upload that was begun and never completed leaves parts that cost money and that nobody sees: buckets should
have a rule that removes them.

A file that is appended to is a row of objects, <path>/00000001 and so on, of which the last is replaced at each append.
"""

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import NewFile, StoreFile
from workers.checkpoint.store import TRASH_DIR, checked_path, hit_point

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_SEGMENT_BYTES = 256 << 10
_TRIES_MAX = 20
_UPLOADS_AT_ONCE = 4
_NO_LIMIT_BYTES = 1 << 62


class Upload(Protocol):
    """An object that is being uploaded."""

    def write(self, data: memoryview) -> Any:
        """The next bytes."""

    def close(self) -> None:
        """That was all: the object appears."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """An object's content, and what to give to `put_object` so that it replaces just this."""

    content: bytes
    version: str


class ObjectStore:
    """A Store in a bucket, or below a prefix of one, that an obstore `client` reaches.

    Whoever records requests, or makes them fail, overrides put_object, delete_objects and begin_upload.
    """

    def __init__(self, client: "Client", url: str = "") -> None:
        self._client = client
        self._url = url
        self._tails: dict[str, tuple[int, Found | None]] = {}  # of files that are appended to: number, last segment

    # Requests that change something

    def put_object(self, key: str, data: bytes, *, replaces: str | None = None) -> str:
        """Create an object, or replace the version that was read. Returns its version; FileExistsError if there is one
        already, or another."""
        with _os_errors(key):
            result = self._client.put(key, data, mode="create" if replaces is None else {"e_tag": replaces})
        return result["e_tag"] or ""

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete them, in no order; those that are gone are fine."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError), _os_errors(key):
                self._client.delete(key)

    def begin_upload(self, key: str) -> Upload:
        """An object that appears when it is closed."""
        import obstore

        with _os_errors(key):
            return obstore.open_writer(self._client, key, buffer_size=BLOCK_BYTES, max_concurrency=_UPLOADS_AT_ONCE)

    # Looking

    def get_object(self, key: str) -> Found:
        """An object; FileNotFoundError if there is none."""
        with _os_errors(key):
            result = self._client.get(key)
            return Found(bytes(result.bytes()), result.meta["e_tag"] or "")

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        if self._is_aside(path):
            return []
        return sorted(self._children(path) - set(self.aside(path)))

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return self.is_dir(path)
        return True

    def is_dir(self, path: str) -> bool:
        return bool(self._children(path)) and not self._is_aside(path)

    def was_made(self, path: str) -> bool:
        self._children(path)
        return True

    def place(self, path: str) -> str:
        return f"{self._url}/{_key(path)}".rstrip("/")

    def size(self, path: str) -> int:
        with _os_errors(path):
            return int(self._client.head(_key(path))["size"])

    def read_bytes(self, path: str) -> bytes:
        try:
            return self.get_object(_key(path)).content
        except FileNotFoundError:
            segments = sorted(self._children(path))
            if not segments:
                raise
            return b"".join(self.get_object(f"{_key(path)}/{name}").content for name in segments)

    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        return _ObjectFile(self._client, _key(path), self.size(path))

    def aside(self, path: str) -> list[str]:
        if "/" in _key(path):
            return []
        marks = f"{TRASH_DIR}/{_key(path)}"
        return sorted(name for name in self._children(marks) if self._is_aside(f"{_key(path)}/{name}"))

    def in_memory(self) -> bool:
        return False

    def free_bytes(self) -> int:
        return _NO_LIMIT_BYTES

    # Changing

    def make_dir(self, path: str) -> None:
        _key(path)  # there are none to make

    def sync_dir(self, path: str) -> None:
        _key(path)  # what was answered is durable

    def create_exclusive(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        hit_point(points, "link", context)
        try:
            self.put_object(_key(path), data)
        except FileExistsError:
            # Ours after all, if the answer was lost. Equal contents of two drivers differ in the driver's id.
            if self.get_object(_key(path)).content != data:
                raise

    def write_atomic(self, path: str, data: bytes, *, points: str = "", context: Mapping[str, Any] = {}) -> None:
        hit_point(points, "rename", context)
        self.put_object(_key(path), data)

    def append(self, path: str, data: bytes, *, sync: bool = True) -> None:
        for _ in range(_TRIES_MAX):
            number, last = self._tails.get(path) or self._find_tail(path)
            if last is not None and last.content and len(last.content) + len(data) > _SEGMENT_BYTES:
                number, last = number + 1, None
            content = (last.content if last is not None else b"") + data
            key = f"{_key(path)}/{number:08d}"
            try:
                version = self.put_object(key, content, replaces=last.version if last is not None else None)
            except FileExistsError:
                # Another one appended, or this is an answer that was lost.
                self._tails.pop(path, None)
                found = self.get_object(key)
                if found.content != content:
                    continue
                version = found.version
            self._tails[path] = number, Found(content, version)
            return
        raise OSError(errno.EBUSY, "others append to it all the time", path)

    def begin(self, path: str, *, direct: bool = False) -> NewFile:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return _NewObject(self.begin_upload(_key(path)), path)

    def hold(self, path: str, *, generation: int) -> None:
        if not self.is_dir(path) or not self._mark(path, "held", generation):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def set_aside(self, path: str, *, generation: int) -> bool:
        if not self.is_dir(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._mark(path, "aside", generation)

    def put_back(self, path: str, *, generation: int) -> None:
        found = self._read_mark(path)
        if found is not None and _state(found) == ("aside", generation):
            self.put_object(_mark_key(path), _mark_content("held", generation), replaces=found.version)

    def drop(self, path: str) -> None:
        self.delete_objects(self._below(path))
        self.delete_objects([_mark_key(path)])

    # Inside

    def _mark(self, path: str, wanted: str, generation: int) -> bool:
        """Write a mark, unless there is one that says otherwise and may."""
        if _key(path).count("/") != 1:
            raise ValueError(f"{path!r} cannot be set aside or held: it has to be a directory in one of the run's own")
        for _ in range(_TRIES_MAX):
            found = self._read_mark(path)
            if found is not None:
                state, by = _state(found)
                if state == wanted and by == generation:
                    return True
                if by > generation or (state == "aside" and wanted == "held"):
                    return False
            content = _mark_content(wanted, generation)
            with contextlib.suppress(FileExistsError):
                self.put_object(_mark_key(path), content, replaces=found.version if found is not None else None)
                return True
        raise OSError(errno.EBUSY, "others change its mark all the time", path)

    def _read_mark(self, path: str) -> Found | None:
        try:
            return self.get_object(_mark_key(path))
        except FileNotFoundError:
            return None

    def _is_aside(self, path: str) -> bool:
        found = self._read_mark(path) if _key(path).count("/") == 1 else None
        return found is not None and _state(found)[0] == "aside"

    def _children(self, path: str) -> set[str]:
        """First parts of the names below a path."""
        prefix = _key(path)
        with _os_errors(path):
            found = self._client.list_with_delimiter(prefix or None)
        keys = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return {key.rstrip("/").rpartition("/")[2] for key in keys}

    def _below(self, path: str) -> list[str]:
        with _os_errors(path):
            return sorted(entry["path"] for chunk in self._client.list(_key(path)) for entry in chunk)

    def _find_tail(self, path: str) -> tuple[int, Found | None]:
        segments = sorted(self._children(path))
        if not segments:
            return 1, None
        return int(segments[-1]), self.get_object(f"{_key(path)}/{segments[-1]}")


class _NewObject:
    """A NewFile. The last write is kept back until its end is known."""

    def __init__(self, upload: Upload, path: str) -> None:
        self._upload = upload
        self._path = path
        self._sent = 0
        self._last = memoryview(b"")

    def write_at(self, data: memoryview, position: int) -> None:
        if position != self._sent + len(self._last):
            raise ValueError(f"{self._path} is written at {position}, and ends at {self._sent + len(self._last)}")
        self._send()
        self._last = data

    def truncate(self, size_bytes: int) -> None:
        if not self._sent <= size_bytes <= self._sent + len(self._last):
            raise ValueError(f"{self._path} cannot be given {size_bytes} bytes: {self._sent} are on their way")
        self._last = self._last[: size_bytes - self._sent]

    def sync(self) -> None:
        self._send()

    def publish(self) -> None:
        self._send()
        with _os_errors(self._path):
            self._upload.close()

    def discard(self) -> None:
        self._last = memoryview(b"")

    def close(self) -> None:
        self._last = memoryview(b"")

    def _send(self) -> None:
        if self._last:
            with _os_errors(self._path):
                self._upload.write(self._last)
        self._sent += len(self._last)
        self._last = memoryview(b"")


class _ObjectFile:
    """A StoreFile of an object; it cannot be changed. Nothing of it is in this machine's page cache."""

    direct = True

    def __init__(self, client: "Client", key: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._size = size_bytes

    def read_into(self, buffer: memoryview, position: int) -> int:
        count = min(len(buffer), self._size - position)
        if count <= 0:
            return 0
        with _os_errors(self._key):
            buffer[:count] = memoryview(self._client.get_range(self._key, start=position, length=count))
        return count

    def is_cached(self, position: int, size_bytes: int) -> bool:
        return False

    def drop_cache(self) -> None:
        return

    def close(self) -> None:
        return


def _key(path: str) -> str:
    pure = checked_path(path)
    return "" if str(pure) == "." else str(pure)


def _mark_key(path: str) -> str:
    return f"{TRASH_DIR}/{_key(path)}"


def _mark_content(state: str, generation: int) -> bytes:
    return json.dumps({"state": state, "generation": generation}).encode() + b"\n"


def _state(mark: Found) -> tuple[str, int]:
    try:
        values = json.loads(mark.content)
        return str(values["state"]), int(values["generation"])
    except (ValueError, KeyError, TypeError):
        return "", -1  # nobody's that knows lastgood


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """What obstore raises, as the OSErrors that a Store raises."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _first_line(error), path) from error
    except exceptions.NotSupportedError as error:
        raise OSError(errno.EOPNOTSUPP, _first_line(error), path) from error
    except exceptions.BaseError as error:
        raise OSError(errno.EIO, _first_line(error), path) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
