"""Whether a storage behaves as the checkpoint protocol relies on (workers.checkpoint.store says how).

Each check uses the product's own storage seam, in a directory of its own. Atomicity cannot be proven, only caught
failing: several threads race for one name, and a watcher looks at files while they are renamed.

Faults survived: an error of the storage in one check, which becomes its result and does not keep the others from
running.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from orchestrator.doctor.facts import Check
from workers.checkpoint.files import closing_file
from workers.checkpoint.store import LocalStore

_RACERS = 8
_RACES = 10
_RENAMES = 100
_RENAMED_BYTES = 256 << 10
_CHECK_SECONDS_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One thing relied on. `run` returns what was seen instead, "" if nothing; an OSError counts too."""

    name: str
    what: str
    run: Callable[[LocalStore], str]


def check_behaviour(store: LocalStore) -> list[Check]:
    """All checks, in an empty directory that is writable. If `create` fails the others are not tried."""
    checks: list[Check] = []
    for behaviour in _BEHAVIOURS:
        try:
            store.create_dir(behaviour.name)
            problem = behaviour.run(store)
        except OSError as error:
            problem = str(error)
        checks.append(Check(name=behaviour.name, what=behaviour.what, problem=problem))
        if problem and behaviour is _CREATE:
            break
    return checks


def not_writable(error: OSError) -> Check:
    """What is known of a storage where no directory for the checks could be made."""
    return Check(name=_CREATE.name, what=_CREATE.what, problem=str(error))


def _create(store: LocalStore) -> str:
    _write(store, "create/file", b"content")
    found = store.read_bytes("create/file")
    return "" if found == b"content" else f"a new file of 7 bytes was read back with {len(found)}, or other ones"


def _exclusive(store: LocalStore) -> str:
    _write(store, "exclusive/file", b"first")
    try:
        _write(store, "exclusive/file", b"second")
    except FileExistsError:
        return ""
    return "a file that existed was created once more"


def _link(store: LocalStore) -> str:
    for name in ("one", "other"):
        _write(store, f"link/{name}.tmp", name.encode())
    store.link("link/one.tmp", "link/name")
    with suppress(FileExistsError):
        store.link("link/other.tmp", "link/name")
        return "a name that was taken was linked once more"
    store.unlink("link/one.tmp")
    found = store.read_bytes("link/name")
    return "" if found == b"one" else f"the linked file holds {found!r}, not what was written"


def _race(store: LocalStore) -> str:
    deadline = time.monotonic() + _CHECK_SECONDS_MAX
    for number in range(_RACES):
        path = f"race/{number}"
        won, errors = _race_for(store, path)
        if errors:
            return str(errors[0])
        if len(won) != 1:
            return f"of {_RACERS} that created one name at the same time, {len(won)} succeeded"
        if store.read_bytes(path) != won[0]:
            return "a name that one of several created holds what another wrote"
        if time.monotonic() > deadline:
            break
    return ""


def _race_for(store: LocalStore, path: str) -> tuple[list[bytes], list[OSError]]:
    """(contents of those that believe to have created it, errors other than that it exists)."""
    start = threading.Barrier(_RACERS)
    won: list[bytes] = []
    errors: list[OSError] = []

    def contend(content: bytes) -> None:
        start.wait()
        try:
            store.create_exclusive(path, content)
            won.append(content)
        except FileExistsError:
            pass
        except OSError as error:
            errors.append(error)

    _together([partial(contend, f"racer {number}".encode()) for number in range(_RACERS)])
    return won, errors


def _rename(store: LocalStore) -> str:
    content = b"\x5a" * _RENAMED_BYTES
    seen: list[str] = []
    deadline = time.monotonic() + _CHECK_SECONDS_MAX
    for number in range(_RENAMES):
        source, target = f"rename/{number}.tmp", f"rename/{number}"
        _write(store, source, content)
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(store, source, target, content, done, seen))
        watcher.start()
        try:
            store.move(source, target)
        finally:
            done.set()
            watcher.join()
        if not seen and (store.exists(source) or store.read_bytes(target) != content):
            seen.append("after a rename the old name is still there, or the file holds something else")
        if seen or time.monotonic() > deadline:
            break
        store.unlink(target)
    return seen[0] if seen else ""


def _watch(store: LocalStore, source: str, target: str, content: bytes, done: threading.Event, seen: list[str]) -> None:
    """Look at both names until the rename is done, and once more."""
    while not seen:
        last = done.is_set()
        try:
            # In this order: a rename in between can only make the second look agree.
            if store.exists(target):
                if store.exists(source):
                    seen.append("while a file was renamed, both names were there")
                elif store.size(target) != len(content):
                    seen.append("while a file was renamed, its new name held a part of it")
            if not store.exists(source) and not store.exists(target):
                seen.append("while a file was renamed, neither name was there")
        except OSError as error:
            seen.append(str(error))
        if last:
            return


def _rename_directory(store: LocalStore) -> str:
    store.create_dir("rename_dir/full")
    store.create_dir("rename_dir/trash")
    _write(store, "rename_dir/full/file", b"content")
    store.rename("rename_dir/full", "rename_dir/trash/full")
    if store.exists("rename_dir/full") or store.read_bytes("rename_dir/trash/full/file") != b"content":
        return "after a directory was renamed the old one is still there, or its file is not in the new one"
    return ""


def _sync_file(store: LocalStore) -> str:
    with closing_file(store.open_new("sync_file/file")) as file:
        file.write_at(memoryview(b"content"), 0)
        file.sync()
    return ""


def _sync_dir(store: LocalStore) -> str:
    _write(store, "sync_dir/file", b"content")
    store.sync_dir("sync_dir")
    return ""


def _listing(store: LocalStore) -> str:
    names = [f"{number:02d}" for number in range(20)]
    for name in names:
        _write(store, f"listing/{name}", b"")
    listed = store.list_dir("listing", fresh=True)
    return "" if listed == names else f"a directory with {len(names)} new files lists {len(listed)}"


def _append(store: LocalStore) -> str:
    for part in (b"one,", b"two,", b"three"):
        store.append("append/file", part)
    found = store.read_bytes("append/file")
    return "" if found == b"one,two,three" else f"after three appends the file holds {found!r}"


_CREATE = Behaviour(name="create", what="files and directories can be created", run=_create)
_BEHAVIOURS = (
    _CREATE,
    Behaviour(name="exclusive", what="a file is created only if its name is free", run=_exclusive),
    Behaviour(name="link", what="hard links, refused where the name is taken", run=_link),
    Behaviour(name="race", what="of several that create one name, one succeeds", run=_race),
    Behaviour(name="rename", what="a file is renamed in one step", run=_rename),
    Behaviour(name="rename_dir", what="directories can be renamed", run=_rename_directory),
    Behaviour(name="sync_file", what="files can be fsynced", run=_sync_file),
    Behaviour(name="sync_dir", what="directories can be fsynced", run=_sync_dir),
    Behaviour(name="listing", what="new files are listed at once", run=_listing),
    Behaviour(name="append", what="files can be appended to", run=_append),
)


def _write(store: LocalStore, path: str, content: bytes) -> None:
    with closing_file(store.open_new(path)) as file:
        file.write_at(memoryview(content), 0)


def _together(works: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
