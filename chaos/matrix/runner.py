"""Runs the cells of a matrix, several at a time, and remembers each verdict: a run that is interrupted goes on where it
was. Cells are tried in an order drawn from the seed, so that a matrix that is cut short has tried some of everything.
"""

import gc
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from chaos.matrix.cells import Cell
from chaos.verdict import Outcome, Verdict
from orchestrator.observe.ledger import LEDGER_FILE
from workers import processes
from workers.errors import EnvironmentProblem

VERDICTS_FILE = "verdicts.jsonl"
CELLS_DIR = "cells"
_TIMELINES_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`out`: where verdicts, evidence and the report go. `supervised`: which form."""

    out: Path
    seed: int
    jobs: int
    supervised: bool = False

    @property
    def memory(self) -> Path:
        """The verdicts so far."""
        return self.out / ("verdicts-ray.jsonl" if self.supervised else VERDICTS_FILE)


def chosen(cells: Iterable[Cell], only: str | None) -> list[Cell]:
    """Those whose names contain `only`, or match it as a pattern of a shell; all of them without it."""
    if only is None:
        return list(cells)
    wanted = only.lower()
    return [cell for cell in cells if wanted in cell.name.lower() or fnmatchcase(cell.name.lower(), wanted)]


def run_cells(
    cells: Sequence[Cell], settings: Settings, *, replay: Callable[[Cell], str], told: Callable[[Verdict], None]
) -> list[Verdict]:
    """The verdicts of all cells, in their order. `told` hears of each when it is known, also of those of before."""
    done = _remembered(settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    with settings.memory.open("a", buffering=1) as memory:

        def keep(verdict: Verdict) -> None:
            done[verdict.name] = verdict
            memory.write(json.dumps({"seed": settings.seed, **asdict(verdict)}) + "\n")
            told(verdict)

        for cell in cells:
            if cell.name in done:
                told(done[cell.name])
            elif cell.impossible:
                keep(Verdict(name=cell.name, outcome=Outcome.SKIPPED, detail=cell.impossible))
        missing = [cell for cell in cells if cell.name not in done]
        random.Random(settings.seed).shuffle(missing)
        if missing:
            if settings.supervised:
                from chaos.matrix.supervised import try_supervised

                try_supervised(missing, settings, replay, keep)
            else:
                _try_all(missing, settings, replay, keep)
    return [done[cell.name] for cell in cells]


def _try_all(
    cells: Sequence[Cell], settings: Settings, replay: Callable[[Cell], str], keep: Callable[[Verdict], None]
) -> None:
    _warm_up()
    from chaos.matrix.trial import try_cell, undisturbed

    scratch = settings.out / CELLS_DIR
    shutil.rmtree(scratch / "reference", ignore_errors=True)
    with ProcessPoolExecutor(
        settings.jobs, mp_context=get_context("fork"), initializer=processes.die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        firsts = {cell.world_size: cell for cell in cells}
        asked = {
            size: pool.submit(undisturbed, cell, scratch / "reference" / str(size), seed=settings.seed)
            for size, cell in firsts.items()
        }
        references = {size: future.result() for size, future in asked.items()}
        futures = []
        for cell in cells:
            directory = scratch / folder(cell.name)
            shutil.rmtree(directory, ignore_errors=True)  # of a matrix that was interrupted
            futures.append(
                pool.submit(
                    try_cell,
                    cell,
                    directory,
                    seed=settings.seed,
                    reference=references[cell.world_size],
                    replay=replay(cell),
                )
            )
        try:
            for future in as_completed(futures):
                keep(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    shutil.rmtree(scratch / "reference", ignore_errors=True)


def evidence(verdicts: Iterable[Verdict], settings: Settings) -> list[tuple[str, Path]]:
    """Names and run directories of those that did not hold, the first few."""
    runs = [
        (verdict.name, settings.out / CELLS_DIR / folder(verdict.name) / "run")
        for verdict in verdicts
        if verdict.outcome in (Outcome.BROKEN, Outcome.UNRECOVERED)
    ]
    return [(name, run) for name, run in runs if (run / LEDGER_FILE).exists()][:_TIMELINES_MAX]


def folder(name: str) -> str:
    """Where a cell's evidence lies."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def _warm_up() -> None:
    """Import all that a cell's processes need, as a zygote does: forked, they begin at once."""
    from workers.checkpoint import huge_pages
    from workers.forks import ONE_THREAD
    from workers.zygote import PRELOAD, preload

    os.environ.update(ONE_THREAD)

    problem = preload((*PRELOAD, "chaos.matrix.trial"))
    if problem is not None:
        raise EnvironmentProblem(f"the matrix cannot fork its processes: {problem}")
    gc.collect()
    gc.freeze()
    huge_pages.gather_private()


def _remembered(settings: Settings) -> dict[str, Verdict]:
    """Verdicts of an earlier run with the same seed; a last line that was cut short is left out."""
    try:
        lines = settings.memory.read_text().splitlines()
    except FileNotFoundError:
        return {}
    found = {}
    for line in lines:
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if entry.pop("seed") == settings.seed:
            found[entry["name"]] = Verdict(**{**entry, "outcome": Outcome(entry["outcome"])})
    return found
