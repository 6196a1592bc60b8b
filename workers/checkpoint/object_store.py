"""A Store on object storage: S3 and what speaks its protocol, Google Cloud Storage, Azure.

What such storage guarantees, and what is built on it:
- An object appears whole or not at all, and is durable once its request is answered. So there is nothing to fsync, no
  temporary file and no rename: a shard is uploaded under its own name, which only its attempt uses.
- A request can ask that there be no object yet, or that it still be the one that was read (If-None-Match, If-Match).
  So of several processes exactly one creates a name, and nobody overwrites what he has not seen.
- There are no directories, and no rename of many objects at once. So a directory is put out of sight by its *mark*, an
  object trash/<path>: "aside" says that it is out of sight and may be put back, "dropping" that it is being deleted,
  and an empty mark that it is gone. The last one stays for an hour, in case a request for it is still under way. Only
  what lies in one of the run's own directories, as checkpoints do, can be marked.
- Listings show what was written before them (all of the named ones do so since 2020).

Faults survived: a kill between any two requests; another driver doing the same; an answer that is lost, so that the
repeated request finds its own work (contents are compared); and a request of a process that is gone, which arrives
late, when others have long gone on. The last one is why a generation *holds* what it relies on: it writes "held" and
its number into the mark, and what demands that there be no mark, or an older one, is refused from then on. An upload
that was begun and never completed leaves parts that cost money and that nobody sees: buckets should have a rule that
removes them. Errors of the network are no damage: they have an errno of their own. A shard is sent in parts of 8 MiB,
of which S3 takes 10,000.
"""

import contextlib
import dataclasses
import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.files import NewFile, StoreFile
from workers.checkpoint.store import TRASH_DIR, checked_path, hit_point

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_TRIES_MAX = 20
_GONE = b""
_GONE_SECONDS = 3600.0
_UPLOADS_AT_ONCE = 4
_NO_LIMIT_BYTES = 1 << 62


class Upload(Protocol):
    """An object that is being uploaded."""

    def write(self, data: memoryview) -> Any:
        """The next bytes."""

    def close(self) -> None:
        """That was all: the object appears."""


Version = tuple[str | None, str | None]
"""Tells an object's contents apart: its entity tag, and its generation where the storage counts them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """An object's content, and what to give to `put_object` so that it replaces just this."""

    content: bytes
    version: Version


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """state: "held", "aside", "dropping", "gone", or "" for one that nobody can read. generation: whose it is."""

    state: str
    generation: int
    version: Version

    @property
    def hides(self) -> bool:
        """Whether the directory is out of sight."""
        return self.state in ("aside", "dropping", "gone")


class ObjectStore:
    """A Store in a bucket, or below a prefix of one, that an obstore `client` reaches.

    Whoever records requests, or makes them fail, overrides put_object, delete_objects and begin_upload.
    """

    def __init__(self, client: "Client", url: str = "") -> None:
        self._client = client
        self._url = url

    # Requests that change something

    def put_object(self, key: str, data: bytes, *, replaces: Version | None = None) -> Version:
        """Create an object, or replace the version that was read. Returns its version; FileExistsError if there is one
        already, or another."""
        expected = {name: value for name, value in zip(("e_tag", "version"), replaces or (), strict=False) if value}
        with _os_errors(key):
            result = self._client.put(key, data, mode="create" if replaces is None else expected)  # type: ignore[arg-type]
        return result["e_tag"], result["version"]

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
            return Found(bytes(result.bytes()), (result.meta["e_tag"], result.meta["version"]))

    def list_dir(self, path: str, *, fresh: bool = False) -> list[str]:
        if self._is_hidden(path):
            return []
        # The marks after the names: what goes meanwhile has one.
        names = self._children(path)
        return sorted(names - {name for name, mark in self._marks(path) if mark.hides})

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return self.is_dir(path)
        return True

    def is_dir(self, path: str) -> bool:
        return bool(self._children(path)) and not self._is_hidden(path)

    def was_made(self, path: str) -> bool:
        self._children(path)
        return True

    def place(self, path: str) -> str:
        return f"{self._url}/{_key(path)}".rstrip("/")

    def size(self, path: str) -> int:
        with _os_errors(path):
            return int(self._client.head(_key(path))["size"])

    def read_bytes(self, path: str) -> bytes:
        return self.get_object(_key(path)).content

    def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
        return _ObjectFile(self._client, _key(path), self.size(path))

    def aside(self, path: str) -> list[str]:
        return sorted(name for name, mark in self._marks(path, prune=True) if mark.state in ("aside", "dropping"))

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

    def begin(self, path: str, *, direct: bool = False) -> NewFile:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return _NewObject(self.begin_upload(_key(path)), path)

    def hold(self, path: str, *, generation: int, again: bool = False) -> None:
        if not self.is_dir(path) or not self._mark(path, "held", generation):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def set_aside(self, path: str, *, generation: int, began: Callable[[int], bool]) -> bool:
        if not self.is_dir(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._mark(path, "aside", generation, began)

    def put_back(self, path: str, *, generation: int) -> None:
        mark = self._read_mark(path)
        if mark is not None and (mark.state, mark.generation) == ("aside", generation):
            self._replace_mark(path, "held", mark)

    def drop(self, path: str) -> None:
        mark = self._read_mark(path)
        if mark is None or not mark.hides:
            return  # it was put back
        if mark.state == "aside":
            with contextlib.suppress(FileExistsError):
                self._replace_mark(path, "dropping", mark)
            mark = self._read_mark(path)
            if mark is None or mark.state == "held":
                return
        self.delete_objects(self._below(path))
        if mark.state != "gone":
            with contextlib.suppress(FileExistsError):  # another one does the same
                self.put_object(_mark_key(path), _GONE, replaces=mark.version)

    # Inside

    def mark_id(self) -> str:
        """Another one for each mark: where equal contents have equal tags, a late request could not tell them apart."""
        return uuid.uuid4().hex

    def _mark(self, path: str, wanted: str, generation: int, began: Callable[[int], bool] = lambda _: True) -> bool:
        """Write a mark, unless there is one that says otherwise and may."""
        if _key(path).count("/") != 1:
            raise ValueError(f"{path!r} cannot be set aside or held: it has to be a directory in one of the run's own")
        for _ in range(_TRIES_MAX):
            mark = self._read_mark(path)
            if mark is not None:
                if mark.state == "aside" and wanted == "aside" and mark.generation == generation:
                    return True
                if mark.hides and not (mark.state == "aside" and wanted == "aside"):
                    return False
                # A generation that never began relies on nothing. If it begins now it looks again, and finds this.
                if mark.generation > generation and began(mark.generation):
                    return False
            with contextlib.suppress(FileExistsError):
                if mark is None:
                    self.put_object(_mark_key(path), self._mark_content(wanted, generation))
                else:
                    self._replace_mark(path, wanted, mark, generation)
                return True
        raise OSError(errno.EBUSY, "others change its mark all the time", path)

    def _replace_mark(self, path: str, state: str, mark: Mark, generation: int | None = None) -> None:
        content = self._mark_content(state, mark.generation if generation is None else generation)
        self.put_object(_mark_key(path), content, replaces=mark.version)

    def _mark_content(self, state: str, generation: int) -> bytes:
        return json.dumps({"state": state, "generation": generation, "id": self.mark_id()}).encode() + b"\n"

    def _read_mark(self, path: str) -> Mark | None:
        try:
            found = self.get_object(_mark_key(path))
        except FileNotFoundError:
            return None
        if found.content == _GONE:
            return Mark("gone", -1, found.version)
        try:
            values = json.loads(found.content)
            return Mark(str(values["state"]), int(values["generation"]), found.version)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return Mark("", -1, found.version)  # nobody's that knows lastgood

    def _is_hidden(self, path: str) -> bool:
        # Others have no mark: a request less for each.
        mark = self._read_mark(path) if _key(path).count("/") == 1 else None
        return mark is not None and mark.hides

    def _marks(self, path: str, *, prune: bool = False) -> list[tuple[str, Mark]]:
        """Of what lies in one of the run's own directories, by name. `prune`: delete those that have had their time."""
        if _key(path) == "" or "/" in _key(path):
            return []
        with _os_errors(path):
            entries = self._client.list_with_delimiter(f"{TRASH_DIR}/{_key(path)}")["objects"]
        found, old = [], []
        for entry in entries:
            name = entry["path"].rpartition("/")[2]
            if entry["size"] > len(_GONE):
                if mark := self._read_mark(f"{_key(path)}/{name}"):
                    found.append((name, mark))
                continue
            found.append((name, Mark("gone", -1, (entry["e_tag"], entry["version"]))))
            if time.time() - entry["last_modified"].timestamp() > _GONE_SECONDS:
                old.append(entry["path"])
        if prune and old:
            self.delete_objects(old)
        return found

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
            data = memoryview(self._client.get_range(self._key, start=position, length=count))
        buffer[: len(data)] = data
        return len(data)

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
        raise OSError(errno.EREMOTEIO, _first_line(error), path) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
