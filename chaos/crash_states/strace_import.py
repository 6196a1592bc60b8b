"""The storage operations of any program, read from what strace wrote down of it.

A program says what it was promised by trying to open `.mark-KIND-NAME` in the recorded directory, which is not there.
What would make the record wrong is refused: files of the directory that are written through shared mappings, or whose
descriptors are copied.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from chaos.crash_states.ops import Op, Resize, SyncDir, SyncFile, Write
from chaos.crash_states.record import Log

_CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,lseek,read,fsync,fdatasync,rename,renameat,renameat2,link,"
    "linkat,unlink,unlinkat,chdir,mkdir,mkdirat,rmdir,truncate,ftruncate,close,dup,dup2,dup3,mmap,fallocate,copy_file_range,"
    "sendfile,sync_file_range"
)
_LINE = re.compile(r"(?:(\d+)\s+)?(\w+)\((.*)\)\s+= (-?\d+|\?)(?:<([^>]*)>)?")
_UNFINISHED = re.compile(r"(\d+)\s+(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(\d+)\s+<\.\.\. \w+ resumed>\s?(.*)$")
_ARGUMENT = re.compile(r'"(?:[^"\\]|\\.)*"(?:\.\.\.)?|\[[^\]]*\]|[^,]+')
_MARK = re.compile(r"\.mark-([a-z]+)-(.*)")


class NotTraceable(Exception):
    """This record, or this machine, does not show what was written; the message says why."""


@dataclass(slots=True)
class _Open:
    node: str
    is_dir: bool
    offset: int = 0
    appends: bool = False


@dataclass(slots=True)
class _Import:
    root: PurePosixPath
    log: Log = field(default_factory=Log)
    files: dict[int, _Open] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    here: str = ""  # the program's working directory

    def take(self, call: str, arguments: Sequence[str], result: int, returned: str | None) -> None:
        if call in ("open", "openat", "creat"):
            self._open(call, arguments, result)
        elif result < 0:
            return
        elif call == "chdir":
            self.here = str(PurePosixPath(self.here) / _bytes(arguments[0]).decode())
        elif call in ("rename", "renameat", "renameat2", "link", "linkat"):
            self._two_names(call, arguments)
        elif call in ("unlink", "rmdir", "unlinkat"):
            path = self._path(arguments, at=call.endswith("at"))
            if path is not None:
                self.log.unlink(path)
        elif call in ("mkdir", "mkdirat"):
            path = self._path(arguments, at=call.endswith("at"))
            if path is not None:
                self.log.make(path, is_dir=True)
        elif call == "truncate":
            path = self._path(arguments, at=False)
            if path is not None:
                self._resize(self.log.node(path), int(arguments[1]))
        else:
            self._on_file(call, arguments, result)

    def _open(self, call: str, arguments: Sequence[str], result: int) -> None:
        path = self._path(arguments, at=call == "openat")
        if path is None:
            self.files.pop(result, None)
            return
        flags = "O_WRONLY|O_CREAT|O_TRUNC" if call == "creat" else arguments[2 if call == "openat" else 1]
        if result < 0:
            if mark := _MARK.fullmatch(path.rpartition("/")[2]):
                self.log.mark(mark[1], name=mark[2])
            return
        if not self.log.knows(path):
            if "O_CREAT" not in flags:
                raise NotTraceable(f"{path} was there before the recording began")
            self.sizes[self.log.make(path)] = 0
        node = self.log.node(path)
        if "O_TRUNC" in flags and self.sizes.get(node):
            self._resize(node, 0)
        self.files[result] = _Open(node, is_dir=node not in self.sizes, appends="O_APPEND" in flags)

    def _on_file(self, call: str, arguments: Sequence[str], result: int) -> None:
        number = arguments[4 if call == "mmap" else 0].partition("<")[0]
        file = self.files.get(int(number)) if number.lstrip("-").isdigit() else None
        if file is None:
            return
        if call == "close":
            del self.files[int(number)]
        elif call in ("fsync", "fdatasync"):
            self.log.add(SyncDir(file.node) if file.is_dir else SyncFile(file.node))
        elif call == "ftruncate":
            self._resize(file.node, int(arguments[1]))
        elif call == "lseek":
            file.offset = result
        elif call == "read":
            file.offset += result
        elif call == "write":
            start = self.sizes[file.node] if file.appends else file.offset
            self._write(file.node, start, _bytes(arguments[1])[:result])
            file.offset = start + result
        elif call == "pwrite64":
            self._write(file.node, int(arguments[3]), _bytes(arguments[1])[:result])
        elif call == "mmap":
            if "PROT_WRITE" in arguments[2] and "MAP_SHARED" in arguments[3]:
                raise NotTraceable(f"{file.node} is written through a shared mapping")
        elif call != "sync_file_range":  # promises nothing about what is durable
            raise NotTraceable(f"{file.node} is changed by {call}, which is not understood")

    def _write(self, node: str, position: int, data: bytes) -> None:
        self.sizes[node] = max(self.sizes[node], position + len(data))
        self.log.add(Write(node, position, data))

    def _resize(self, node: str, size: int) -> None:
        self.sizes[node] = size
        self.log.add(Resize(node, size))

    def _two_names(self, call: str, arguments: Sequence[str]) -> None:
        at = "at" in call
        source, target = self._path(arguments, at=at), self._path(arguments[2 if at else 1 :], at=at)
        if source is None and target is None:
            return
        if source is None or target is None:
            raise NotTraceable(f"{source or target} comes from outside of the recorded directory, or goes there")
        if call.startswith("rename"):
            self.log.rename(source, target)
        else:
            self.log.link(source, target)

    def _path(self, arguments: Sequence[str], *, at: bool) -> str | None:
        """Below the recorded directory; None for a path elsewhere."""
        folder = _plain(arguments[0].partition("<")[2].rstrip(">")).decode() if at else self.here
        if at and arguments[0].startswith("AT_FDCWD"):
            self.here = folder
        path = PurePosixPath(folder) / _bytes(arguments[1 if at else 0]).decode()
        if not path.is_relative_to(self.root):
            return None
        return str(path.relative_to(self.root))


def parse(lines: Iterable[str], root: Path) -> list[Op]:
    """The operations below `root`, which is empty at first. Raises NotTraceable."""
    imported = _Import(PurePosixPath(root))
    for line in _whole(lines):
        match = _LINE.match(line)
        if match is None or match[4] == "?":
            continue
        imported.take(match[2], [part.strip() for part in _ARGUMENT.findall(match[3])], int(match[4]), match[5])
    return imported.log.ops


def trace(command: Sequence[str], root: Path, *, timeout_seconds: float = 120.0) -> list[Op]:
    """Run a program under strace; its operations below `root`. Raises NotTraceable if that cannot be done."""
    strace = shutil.which("strace")
    if strace is None:
        raise NotTraceable("strace is not installed")
    out = root.parent / f"{root.name}.strace"
    options = ["-f", "-y", "-xx", "-qq", "-s", str(1 << 28), "-e", f"trace={_CALLS}", "-o", str(out)]
    try:
        done = subprocess.run(
            [strace, *options, *command], capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
        if done.returncode != 0:
            told = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
            raise NotTraceable(f"the program could not be traced: {told[0]}")
        with open(out, encoding="ascii", errors="replace") as lines:
            return parse(lines, root)
    except subprocess.TimeoutExpired:
        raise NotTraceable(f"the traced program did not end within {timeout_seconds:.0f} s") from None
    finally:
        out.unlink(missing_ok=True)


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Calls that another thread's interrupted, put together where they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        line = line.rstrip("\n")
        if match := _UNFINISHED.match(line):
            begun[match[1]] = line.removesuffix(" <unfinished ...>")
        elif match := _RESUMED.match(line):
            yield begun.pop(match[1], "") + match[2]
        else:
            yield line


def _bytes(argument: str) -> bytes:
    """Of a quoted string."""
    if not (argument.startswith('"') and argument.endswith('"')):
        raise NotTraceable(f"strace cut a string short, or wrote none: {argument[:40]}")
    return _plain(argument[1:-1])


def _plain(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", "")) if "\\x" in text else text.encode()
