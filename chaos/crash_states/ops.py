"""Storage operations, as they were issued and in that order. Names are those of logical files ("nodes"), not of paths:
a file keeps its node when it is renamed, so what is written after that still reaches it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROOT = "/"
"""The node of the root, which is there before anything is recorded."""


@dataclass(frozen=True, slots=True)
class Make:
    """A new, empty file or directory `node` gets a name."""

    folder: str
    name: str
    node: str
    is_dir: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A file gets one more name."""

    folder: str
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Unlink:
    """A name goes: of a file, or of a directory that is empty."""

    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class Rename:
    """One name goes and another one comes, both or neither; what had the target's name loses it."""

    folder: str
    name: str
    target_folder: str
    target: str
    node: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that was created and removed again at once; nobody reads it."""

    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file from `position` on."""

    node: str
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file's length."""

    node: str
    size: int


@dataclass(frozen=True, slots=True)
class SyncFile:
    """Contents and length of a file are durable."""

    node: str


@dataclass(frozen=True, slots=True)
class SyncDir:
    """The names in a directory are durable."""

    folder: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Nothing that happens to storage: what the program had been promised, or had asked for, at this point."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)


NameOp = Make | Link | Unlink | Rename | Leftover
DataOp = Write | Resize
Op = NameOp | DataOp | SyncFile | SyncDir | Mark


def entries(op: NameOp) -> tuple[tuple[str, str], ...]:
    """The (directory, name) pairs that an operation changes."""
    if isinstance(op, Rename):
        return (op.folder, op.name), (op.target_folder, op.target)
    return ((op.folder, op.name),)


def describe(op: Op) -> str:
    """For people."""
    match op:
        case Make():
            return f"{'mkdir' if op.is_dir else 'create'} {_path(op.folder, op.name)}"
        case Link():
            return f"link {_path(op.folder, op.name)}"
        case Unlink():
            return f"unlink {_path(op.folder, op.name)}"
        case Rename():
            return f"rename {_path(op.folder, op.name)} to {_path(op.target_folder, op.target)}"
        case Leftover():
            return f"create and unlink {_path(op.folder, op.name)}"
        case Write():
            return f"write {len(op.data)} bytes at {op.position} of {op.node}"
        case Resize():
            return f"set the length of {op.node} to {op.size}"
        case SyncFile():
            return f"fsync {op.node}"
        case SyncDir():
            return f"fsync the directory {op.folder}"
        case Mark():
            return f"({op.kind})"


def _path(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}".lstrip("/")
