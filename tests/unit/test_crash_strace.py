"""What strace writes becomes the same operations that a recorder would have seen."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.crash_states import peers, strace_import
from chaos.crash_states.ops import ROOT, Link, Make, Mark, Rename, Resize, SyncDir, SyncFile, Unlink, Write
from chaos.crash_states.peers import PEERS, look_at_peer
from chaos.crash_states.strace_import import NotTraceable, parse, trace

R = "/r"
RECORDED = """\
7  openat(AT_FDCWD</>, "/r/.mark-saved-a-1", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
7  openat(AT_FDCWD</>, "/elsewhere/x", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3</elsewhere/x>
7  write(3</elsewhere/x>, "\\x61", 1)       = 1
7  close(3</elsewhere/x>)                  = 0
7  mkdir("/r/d", 0777)                     = 0
7  mkdir("/r/d", 0777)                     = -1 EEXIST (File exists)
7  openat(AT_FDCWD</r>, "\\x64\\x2f\\x78", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 4<\\x2f\\x72>
8  write(4<\\x2f>, "\\x61\\x22\\x2c\\x62", 4 <unfinished ...>
7  fsync(9</somewhere>)                    = 0
8  <... write resumed>)                    = 3
7  lseek(4<\\x2f>, 1, SEEK_SET)             = 1
7  write(4<\\x2f>, "\\x7a", 1)               = 1
7  pwrite64(4<\\x2f>, "\\x79", 1, 10)        = 1
7  ftruncate(4<\\x2f>, 5)                   = 0
7  fdatasync(4<\\x2f>)                      = 0
7  close(4<\\x2f>)                          = 0
7  write(4<pipe:[1]>, "\\x61", 1)           = 1
7  rename("/r/d/x", "/r/d/y")              = 0
7  link("/r/d/y", "/r/d/z")                = 0
7  openat(AT_FDCWD</>, "/r/d", O_RDONLY|O_DIRECTORY) = 5</r/d>
7  fsync(5</r/d>)                          = 0
7  close(5</r/d>)                          = 0
7  openat(AT_FDCWD</>, "/r/d/y", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 5</r/d/y>
7  close(5</r/d/y>)                        = 0
7  openat(AT_FDCWD</>, "/r/d/y", O_WRONLY|O_APPEND) = 5</r/d/y>
7  write(5</r/d/y>, "\\x62", 1)             = 1
7  write(5</r/d/y>, "\\x63", 1)             = 1
7  close(5</r/d/y>)                        = 0
7  unlinkat(AT_FDCWD</r/d>, "z", 0)        = 0
7  +++ exited with 0 +++
"""


def test_a_record_becomes_operations() -> None:
    assert parse(RECORDED.splitlines(), Path(R)) == [
        Mark("saved", {"name": "a-1"}),
        Make(ROOT, "d", "d#1", True),
        Make("d#1", "x", "d#1/x#1"),
        Write("d#1/x#1", 0, b'a",'),
        Write("d#1/x#1", 1, b"z"),
        Write("d#1/x#1", 10, b"y"),
        Resize("d#1/x#1", 5),
        SyncFile("d#1/x#1"),
        Rename("d#1", "x", "d#1", "y", "d#1/x#1"),
        Link("d#1", "z", "d#1/x#1"),
        SyncDir("d#1"),
        Resize("d#1/x#1", 0),
        Write("d#1/x#1", 0, b"b"),
        Write("d#1/x#1", 1, b"c"),
        Unlink("d#1", "z"),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("7  mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 3</r/x>, 0) = 0x7f", "shared mapping"),
        ("7  dup(3</r/x>) = 4</r/x>", "dup"),
        ('7  writev(3</r/x>, [{iov_base="\\x61", iov_len=1}], 1) = 1', "writev"),
        ('7  rename("/elsewhere/x", "/r/y") = 0', "from outside"),
        ('7  openat(AT_FDCWD</>, "/r/old", O_RDONLY) = 4</r/old>', "before the recording"),
        ('7  write(3</r/x>, "\\x61"..., 2) = 2', "cut a string"),
    ],
)
def test_what_would_make_a_record_wrong_is_refused(line: str, told: str) -> None:
    before = '7  openat(AT_FDCWD</>, "/r/x", O_RDWR|O_CREAT, 0666) = 3</r/x>'
    line = line.replace("= 0x7f", "= 139")
    with pytest.raises(NotTraceable, match=told):
        parse([before, line], Path(R))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_traced_program_shows_what_it_wrote(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    code = (
        "import os, sys; os.chdir(sys.argv[1]); f = open('x.tmp', 'wb'); f.write(b'a\\0\\xff\"'); f.flush();"
        "os.fsync(f.fileno()); f.close(); os.rename('x.tmp', 'x')"
    )
    assert trace([sys.executable, "-S", "-c", code, str(root)], root) == [
        Make(ROOT, "x.tmp", "x.tmp#1"),
        Write("x.tmp#1", 0, b'a\0\xff"'),
        SyncFile("x.tmp#1"),
        Rename(ROOT, "x.tmp", ROOT, "x", "x.tmp#1"),
    ]
    with pytest.raises(NotTraceable, match="no such luck"):
        trace([sys.executable, "-S", "-c", "raise SystemExit('no such luck')"], root)
    assert [one.name for one in tmp_path.iterdir()] == ["root"]


def test_without_strace_a_peer_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strace_import.shutil, "which", lambda name: None)
    for name in PEERS:
        assert look_at_peer(name, 1) == {
            "name": name,
            "skipped": "strace is not installed",
            "states": 0,
            "violations": 0,
            "detail": "",
            "kinds": {},
        }


def test_a_peer_is_judged_by_its_own_word(tmp_path: Path) -> None:
    def marked(kind: str) -> Mark:
        return Mark(kind, {"name": "a-1"})

    # It says that a version is saved while nothing of it is durable, and does so properly after that.
    file = [Make(ROOT, "a", "n"), Write("n", 0, b"1")]
    durable: list[Any] = [SyncFile("n"), SyncDir(ROOT)]

    def judge(state: Path, promised: peers.Promised) -> tuple[str, str]:
        there = (state / "a").exists() and (state / "a").read_bytes() == b"1"
        return ("lost", "gone") if any(needed and not there for _, needed in promised.values()) else ("", "")

    def found(*ops: Any) -> list[str]:
        judged = peers._judged(list(ops), peers._versions_by_directory, judge, tmp_path, 1)
        return [kind for kind, _ in judged if kind]

    assert found(marked("begins"), *file, marked("saved"))
    assert not found(marked("begins"), *file, *durable, marked("saved"))
