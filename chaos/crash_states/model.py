"""What a POSIX file system owes after a power loss, and all that it may do beyond that.

Owed: bytes and length of a file that was fsynced, as of its last fsync; names in a directory that was fsynced, as of
its last fsync. A rename is atomic: durable as soon as one of its directories is. An operation on a name that is durable
has whatever came before it on the same name behind it.

Not owed, so anything may be left: every other operation on a name, in any subset (so in any order: where two are about
the same name the later one counts); an fsync of a file does not make its name durable, and one of a directory not the
directory's own name. Of bytes that were written and not fsynced each block of 4096 is, on its own, there, or not, or
zeros where the file had none before (allocated, never written), or torn: its front is there, and behind that is what
was there before, or nothing. Changes of length are there or not.

A real file system leaves fewer states. What holds for all of these holds there.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaos.crash_states.ops import (
    ROOT,
    DataOp,
    Leftover,
    Link,
    Make,
    Mark,
    NameOp,
    Op,
    Rename,
    Resize,
    SyncDir,
    SyncFile,
    Unlink,
    Write,
    entries,
)

BLOCK_BYTES = 4096
SECTOR_BYTES = 512

Names = Mapping[str, str]
"""Name to node, of one directory."""


class Fate(enum.IntEnum):
    """What becomes of a block, or of a change of length (LOST or DONE)."""

    LOST = 0
    DONE = 1
    ZERO = 2
    TORN = 3
    CUT = 4  # torn, and the file ends there


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a write that is within one block."""

    position: int
    data: bytes


Part = Piece | Resize


@dataclass(frozen=True, slots=True)
class Situation:
    """The power may go now: after `operations` of them, the last of which was `last`.

    names, contents: what is durable. name_ops, parts: what is not, in order; parts by file.
    """

    operations: int
    last: Op | None
    names: Mapping[str, Names]
    folders: frozenset[str]
    contents: Mapping[str, bytes]
    name_ops: tuple[NameOp, ...]
    parts: Mapping[str, tuple[Part, ...]]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for situations that allow the same states, whatever led to them."""
        return (
            frozenset((folder, frozenset(names.items())) for folder, names in self.names.items()),
            frozenset(self.contents.items()),
            self.name_ops,
            frozenset(self.parts.items()),
        )


class Disk:
    """Takes operations one by one."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, str]] = {ROOT: {}}
        self._folders = {ROOT}
        self._contents: dict[str, bytes] = {}
        self._name_ops: list[NameOp] = []
        self._parts: dict[str, list[Part]] = {}
        self._operations = 0
        self._last: Op | None = None

    def apply(self, op: Op) -> None:
        """One operation was issued."""
        self._operations += 1
        self._last = op
        match op:
            case Make() | Link() | Unlink() | Rename() | Leftover():
                if isinstance(op, Make):
                    self._new(op)
                if not (isinstance(op, Leftover) and op in self._name_ops):
                    self._name_ops.append(op)
            case Write() | Resize():
                self._parts.setdefault(op.node, []).extend(parts_of(op))
            case SyncFile():
                parts = self._parts.pop(op.node, [])
                self._contents[op.node] = content(self._contents[op.node], parts, [Fate.DONE] * len(parts))
            case SyncDir():
                self._sync_dir(op.folder)
            case Mark():
                pass

    def situation(self) -> Situation:
        """If the power went now."""
        return Situation(
            operations=self._operations,
            last=self._last,
            names={folder: dict(names) for folder, names in self._names.items()},
            folders=frozenset(self._folders),
            contents=dict(self._contents),
            name_ops=tuple(self._name_ops),
            parts={node: tuple(parts) for node, parts in self._parts.items() if parts},
        )

    def _new(self, op: Make) -> None:
        if op.is_dir:
            self._names[op.node] = {}
            self._folders.add(op.node)
        else:
            self._contents[op.node] = b""

    def _sync_dir(self, folder: str) -> None:
        """Of the operations that touch it, and of all that came before those on the same names."""
        forced: list[NameOp] = []
        pending: list[NameOp] = []
        touched: set[tuple[str, str]] = set()
        for op in reversed(self._name_ops):
            if any(where == folder for where, _ in entries(op)) or touched.intersection(entries(op)):
                forced.append(op)
                touched.update(entries(op))
            else:
                pending.append(op)
        for op in reversed(forced):
            replay(op, self._names)
        self._name_ops = pending[::-1]


def replay(op: NameOp, names: Mapping[str, dict[str, str]]) -> None:
    """Change the names as the operation does. What it removes may be missing: an earlier one may have been lost."""
    match op:
        case Make() | Link():
            names[op.folder][op.name] = op.node
        case Unlink():
            names[op.folder].pop(op.name, None)
        case Rename():
            names[op.folder].pop(op.name, None)
            names[op.target_folder][op.target] = op.node
        case Leftover():
            pass


def parts_of(op: DataOp) -> list[Part]:
    """What of an operation on bytes may be lost on its own."""
    if isinstance(op, Resize):
        return [op]
    parts: list[Part] = []
    done = 0
    while done < len(op.data):
        position = op.position + done
        size = min(len(op.data) - done, BLOCK_BYTES - position % BLOCK_BYTES)
        parts.append(Piece(position, op.data[done : done + size]))
        done += size
    return parts


def fates(part: Part) -> tuple[Fate, ...]:
    """What may become of it."""
    return (Fate.LOST, Fate.DONE) if isinstance(part, Resize) else tuple(Fate)


def middle(part: Part) -> int:
    """Where a torn block is torn: on a sector's boundary, if it has one; what is smaller anywhere."""
    size = len(part.data) if isinstance(part, Piece) else 0
    half = size // 2
    return half // SECTOR_BYTES * SECTOR_BYTES if half >= SECTOR_BYTES else half


def content(
    before: bytes, parts: Sequence[Part], fate_of: Iterable[Fate], torn_at: Sequence[int] | None = None
) -> bytes:
    """A file's bytes, if this becomes of the parts. `torn_at`: where each would be torn; in its middle if not given."""
    result = bytearray(before)
    for index, (part, fate) in enumerate(zip(parts, fate_of, strict=True)):
        if fate is Fate.LOST:
            continue
        if isinstance(part, Resize):
            _reach(result, part.size)
            del result[part.size :]
            continue
        end = part.position + len(part.data)
        if fate is Fate.DONE:
            _reach(result, part.position)
            result[part.position : end] = part.data
        elif fate is Fate.ZERO:
            _reach(result, end)
        else:
            cut = middle(part) if torn_at is None else torn_at[index]
            if fate is Fate.TORN:
                _reach(result, end)
            else:
                _reach(result, part.position)
            result[part.position : part.position + cut] = part.data[:cut]
    return bytes(result)


def _reach(content: bytearray, size: int) -> None:
    if len(content) < size:
        content.extend(bytes(size - len(content)))


def situations(ops: Iterable[Op]) -> Iterator[Situation]:
    """Before the first operation, and after each."""
    disk = Disk()
    yield disk.situation()
    for op in ops:
        disk.apply(op)
        yield disk.situation()
