"""Small real file systems for tests, where the user may mount them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs at `directory`; unmounted afterwards. Skips where mounting is not permitted, unless CI is root."""
    directory.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    if mounted is not None:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"a tmpfs cannot be mounted: {mounted}")
        pytest.skip(f"a tmpfs cannot be mounted: {mounted}")
    try:
        yield directory
    finally:
        _run("umount", "--lazy", str(directory))  # what still has a file open there must not keep it


def remount(directory: Path, mode: str) -> bool:
    """`mode`: "ro" or "rw"; False if something is being written just now."""
    return _run("mount", "-o", f"remount,{mode}", str(directory)) is None


def fill(directory: Path) -> None:
    """Leave no room at all on the file system of `directory`."""
    with open(directory / "ballast", "wb", buffering=0) as ballast:
        for block_bytes in (65536, 4096):
            try:
                while True:
                    ballast.write(b"\0" * block_bytes)
            except OSError:
                continue


def _run(*command: str) -> str | None:
    """What went wrong, None if nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
