"""All storage goes through one seam: what the kernel saw of a save is what the store was asked for, and no more."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from fakes import fill

from workers.checkpoint.slots import Slot

SCRIPT = Path(__file__).parent / "seam_script.py"
CALLS = (
    "open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,"
    "write,writev,pwrite64,pwritev,pwritev2,ftruncate,truncate,fsync,fdatasync,fallocate,copy_file_range,sendfile"
)
# What a call may do -> what the store was asked for then. Some of its methods take several calls.
EXPLAINED = {
    "write": {"write_at", "append"},
    "truncate": {"truncate"},
    "fsync": {"sync", "sync_dir", "append"},
    "create": {"open_new", "append"},
    "open": {"open_existing", "read_bytes", "list_dir", "sync_dir", "remove_tree", "append"},
    "rename": {"move"},
    "link": {"link"},
    "unlink": {"unlink"},
    "rmdir": {"remove_tree"},
}
KINDS = {
    "writev": "write",
    "pwrite64": "write",
    "pwritev": "write",
    "pwritev2": "write",
    "ftruncate": "truncate",
    "fdatasync": "fsync",
    "renameat": "rename",
    "renameat2": "rename",
    "linkat": "link",
    "unlinkat": "unlink",
    "mkdirat": "mkdir",
}


def trace(tmp_path: Path, *options: str) -> tuple[set[tuple[str, str]], list[list[str]]]:
    """What the kernel saw below the run directory, as (kind, path), and what the store was asked."""
    strace = shutil.which("strace")
    if strace is None:
        need = "this test needs strace"
        if os.environ.get("CI") == "true":
            pytest.fail(need)
        pytest.skip(need)
    run_dir = tmp_path / "run"
    for name in ("generations", "checkpoints"):
        (run_dir / name).mkdir(parents=True)
    slot = Slot.create(1 << 17)
    fill(slot, rank=0, generation=1, step=10)
    (tmp_path / "image").write_bytes(slot.image[: slot.image_bytes])
    slot.close()
    log = tmp_path / "asked"
    tracing = [strace, "-f", "-ff", "-y", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={CALLS}"]
    subprocess.run(
        [*tracing, sys.executable, str(SCRIPT), str(run_dir), str(tmp_path / "image"), str(log), *options],
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    lines = [line for file in tmp_path.glob("trace.*") for line in file.read_text(errors="replace").splitlines()]
    return set(below(lines, run_dir)), [line.split() for line in log.read_text().splitlines()]


def below(lines: Iterable[str], run_dir: Path) -> Iterable[tuple[str, str]]:
    for line in lines:
        match = re.match(r"(\w+)\((.*)\) += ", line)
        if match is None or str(run_dir) not in match[2]:
            continue
        call, arguments = match.groups()
        kind = KINDS.get(call, call)
        if call in ("open", "openat", "creat"):
            kind = "create" if "O_CREAT" in arguments else "open"
        if call == "unlinkat" and "AT_REMOVEDIR" in arguments:
            kind = "rmdir"
        paths = re.findall(rf'["<]{re.escape(str(run_dir))}/?([^">]*)', arguments)
        names = re.findall(r'"([^"]*)"', arguments)
        if call == "unlinkat" and names and not names[0].startswith("/"):
            paths = [f"{paths[0]}/{names[0]}"]  # relative to an open directory
        yield kind, " ".join(dict.fromkeys(paths))


def is_explained(kind: str, path: str, asked: list[list[str]]) -> bool:
    if kind == "mkdir" or (kind == "fsync" and any(one[0] == "make_dir" for one in asked)):
        made = [one[1] for one in asked if one[0] == "make_dir"]
        if any(f"{one}/".startswith(f"{path}/") or (kind == "fsync" and path in ("", ".")) for one in made):
            return True
    folder, _, name = path.rpartition("/")
    if name.startswith(".probe-") and kind in ("create", "unlink"):
        return ["list_dir", folder] in asked
    if kind in ("unlink", "open", "rmdir") and any(
        one[0] == "remove_tree" and f"{path}/".startswith(f"{one[1]}/") for one in asked
    ):
        return True
    return any(one[0] in EXPLAINED.get(kind, ()) and " ".join(one[1:]) in (path, path or ".") for one in asked)


def test_a_save_touches_storage_only_as_the_store_was_asked_to(tmp_path: Path) -> None:
    seen, asked = trace(tmp_path)
    unexplained = sorted((kind, path) for kind, path in seen if not is_explained(kind, path, asked))
    assert not unexplained
    # And the other way round, or the trace would prove nothing.
    wanted = {"write_at": "write", "sync": "fsync", "move": "rename", "link": "link", "open_new": "create"}
    for operation, *paths in asked:
        if operation in wanted:
            assert (wanted[operation], " ".join(paths)) in seen
    assert {"write_at", "sync", "sync_dir", "move", "link", "unlink", "append", "truncate", "remove_tree"} <= {
        one[0] for one in asked
    }


def test_what_goes_past_the_store_is_seen(tmp_path: Path) -> None:
    seen, asked = trace(tmp_path, "rogue")
    unexplained = {(kind, path) for kind, path in seen if not is_explained(kind, path, asked)}
    assert unexplained == {("create", "rogue"), ("write", "rogue")}
