"""`lastgood demo`: its options, what reaches which stream, and its exit code.

Ray prints to file descriptor 1 from several places and processes. So before Ray is imported, the real standard output
is set aside for the demo alone, and descriptor 1 points to standard error.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from chaos.demo.plan import SAVE_POINTS
from workers.errors import EnvironmentProblem, GuaranteeBroken, LastgoodError, TrainingFailed

STEPS_MIN = 24
MEMORY_BYTES_BASE = 1 << 30
MEMORY_BYTES_PER_RANK = 1 << 30
DISK_BYTES_PER_RUN = 512 << 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def _known_point(point: str | None) -> str | None:
    if point is not None and point not in SAVE_POINTS:
        raise typer.BadParameter(f"{point!r} is not one of {', '.join(SAVE_POINTS)}")
    return point


def demo(
    seed: Annotated[int, typer.Option(help="Seeds the training and the attack.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each of the two runs.", min=STEPS_MIN)] = 120,
    workers: Annotated[int, typer.Option(help="Ranks, each with one thread.", min=2)] = 2,
    storage: Annotated[
        Path | None, typer.Option(help="Directory for both runs.  [default: a new one in the temporary directory]")
    ] = None,
    kill_at: Annotated[
        str | None, typer.Option(help="The only fault point to kill at.", metavar="POINT", callback=_known_point)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and all else to stderr.")] = False,
) -> None:
    """Train, kill ranks in the middle of saves, and compare with an uninterrupted run, bit by bit.

    Exits with 0 if every claim holds, 3 if one does not, 2 for wrong usage, 5 if this machine cannot run it.
    """
    with _standard_output_set_aside() as stdout:
        narrator_stream = sys.stderr if as_json else stdout
        try:
            root = _storage_root(storage)
            _require_environment(root, workers)
            from chaos.demo.narrator import Narrator
            from chaos.demo.story import Settings, tell

            settings = Settings(storage=root, seed=seed, steps=steps, workers=workers, kill_at=kill_at)
            with _noise_kept_from_terminal(narrator_stream, root / "ray-output.log"):
                report = tell(settings, Narrator(narrator_stream))
        except LastgoodError as error:
            if as_json:
                _print_json(stdout, {"error": str(error)})
            if isinstance(error, TrainingFailed):
                raise GuaranteeBroken(f"a run of the demo did not finish: {error}") from error
            raise
        if as_json:
            _print_json(stdout, report)
        if not all(report["claims"].values()):
            raise typer.Exit(3)


def _print_json(stream: TextIO, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content, indent=2) + "\n")


@contextmanager
def _standard_output_set_aside() -> Iterator[TextIO]:
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as own:
        os.dup2(2, 1)
        try:
            yield own
        finally:
            sys.stdout.flush()
            own.flush()
            os.dup2(own.fileno(), 1)


@contextmanager
def _noise_kept_from_terminal(narrator_stream: TextIO, log: Path) -> Iterator[None]:
    """While a progress bar is drawn on the terminal, what others print to it goes to a file."""
    if not (narrator_stream.isatty() and sys.stderr.isatty() and narrator_stream is not sys.stderr):
        yield
        return
    terminal = os.dup(2)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(terminal, descriptor)
        os.close(terminal)


def _storage_root(storage: Path | None) -> Path:
    if storage is None:
        return Path(tempfile.mkdtemp(prefix="lastgood-demo-"))
    try:
        storage.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=storage):
            return storage.resolve()
    except OSError as error:
        problem = f"cannot write to {storage} ({error.strerror}); choose another directory with --storage"
        raise EnvironmentProblem(problem) from None


def _require_environment(root: Path, workers: int) -> None:
    """Raise EnvironmentProblem with everything that is missing."""
    missing = []
    if sys.platform != "linux":
        missing.append(f"Linux (this is {sys.platform})")
    else:
        import psutil

        needed_bytes = MEMORY_BYTES_BASE + workers * MEMORY_BYTES_PER_RANK
        available_bytes = psutil.virtual_memory().available
        if available_bytes < needed_bytes:
            missing.append(f"{_gib(needed_bytes)} of free memory ({_gib(available_bytes)} available)")
        free_bytes = psutil.disk_usage(str(root)).free
        if free_bytes < 2 * DISK_BYTES_PER_RUN:
            missing.append(f"{_gib(2 * DISK_BYTES_PER_RUN)} of free disk in {root} ({_gib(free_bytes)} available)")
    for module in ("ray.train", "torch", "safetensors"):
        try:
            __import__(module)
        except ImportError as error:
            missing.append(f"the Python package {module.partition('.')[0]} ({error})")
    if missing:
        raise EnvironmentProblem(f"the demo cannot run here; it needs {', and '.join(missing)}")


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
