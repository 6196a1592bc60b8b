"""A store on object storage in memory, and one that writes down each of its requests.

Both are lastgood's own ObjectStore, with obstore's store in memory behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from obstore.store import MemoryStore as Client

from chaos.crash_states.enumerate import Tree
from chaos.crash_states.requests import Delete, Put, Request, RequestLog
from workers.checkpoint.object_store import Found, ObjectStore, Upload, Version


def bucket_of(tree: Tree) -> ObjectStore:
    """A bucket that holds what a tree does."""
    client = Client()
    for key, content in _objects(tree, ""):
        client.put(key, content)
    return ObjectStore(client)


class RecordingObjectStore(ObjectStore):
    """One process's view of the bucket. `before` is called before a request is sent, and before it is carried out; it
    may raise, or be False: then the request was not sent, or is under way and not carried out."""

    def __init__(self, client: Client, log: RequestLog, before: Callable[[], bool] = lambda: True) -> None:
        super().__init__(client)
        self.client = client
        self.log = log
        self.before = before
        self._contents: dict[tuple[str, Version], bytes] = {}  # by key and version

    def put_object(self, key: str, data: bytes, *, replaces: Version | None = None) -> Version:
        put = Put(key, data, "absent") if replaces is None else Put(key, data, "same", self._contents[key, replaces])
        with self.requesting([put]) as alive:
            version = super().put_object(key, data, replaces=replaces) if alive else (None, None)
        self._contents[key, version] = data
        return version

    def get_object(self, key: str) -> Found:
        found = super().get_object(key)
        self._contents[key, found.version] = found.content
        return found

    def delete_objects(self, keys: Sequence[str]) -> None:
        with self.requesting([Delete(key) for key in keys]) as alive:
            if alive:
                super().delete_objects(keys)

    def mark_id(self) -> str:
        return str(self.log.next_id())  # so that equal runs have equal records

    def begin_upload(self, key: str) -> "RecordedUpload":
        return RecordedUpload(self, key, super().begin_upload(key))

    def put_always(self, key: str, data: bytes) -> None:
        """Whatever is there."""
        with self.requesting([Put(key, data)]) as alive:
            if alive:
                self.client.put(key, data)

    @contextmanager
    def requesting(self, requests: Sequence[Request]) -> Iterator[bool]:
        """They are sent, and carried out in this block, if it is given True; answered also if their condition does not
        hold."""
        numbers = self.log.send(requests) if self.before() else []
        alive = self.before()
        try:
            yield alive
        finally:
            if alive:
                self.log.answer(numbers)


class RecordedUpload:
    """Parts cannot be seen, so only the end is a request of its own."""

    def __init__(self, store: RecordingObjectStore, key: str, inner: Upload) -> None:
        self.store = store
        self.key = key
        self.inner = inner
        self.content = b""

    def write(self, data: memoryview) -> None:
        self.store.before()
        self.inner.write(data)
        self.content += data

    def close(self) -> None:
        with self.store.requesting([Put(self.key, self.content)]) as alive:
            if alive:
                self.inner.close()


class RecordedLedger:
    """The ledger's store. It lies in the run directory, on a file system of its own: each line is there at once."""

    def __init__(self, store: RecordingObjectStore) -> None:
        self._store = store

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def read_bytes(self, path: str) -> bytes:
        return self._store.read_bytes(path)

    def append(self, path: str, data: bytes, *, sync: bool = True) -> None:
        if self._store.before():
            content = (self.read_bytes(path) if self.exists(path) else b"") + data
            self._store.log.answer(self._store.log.send([Put(path, content)]))
            self._store.client.put(path, content)


def _objects(tree: Tree, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name, child in tree.items():
        if isinstance(child, bytes):
            yield prefix + name, child
        else:
            yield from _objects(child, f"{prefix}{name}/")
