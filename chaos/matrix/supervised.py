"""The matrix on real supervised runs: one Ray, the demo's training, and a run of it for each cell.

It covers what the fast form leaves out (Ray, agents with their zygotes, the hang detector, copies in flight beside the
training, intervals that are tuned) and takes some ten seconds a cell instead of one. There is one driver a run, so
stories in which the driver dies are left to the fast form.
"""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig

from chaos.demo.job import train_loop
from chaos.matrix.cells import Cell
from chaos.matrix.judge import Digests, final_digests, look
from chaos.matrix.runner import CELLS_DIR, Settings, folder
from chaos.verdict import Outcome, Verdict
from orchestrator import RecoveryConfig, SupervisedTrainer
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from workers import failpoint
from workers.errors import EnvironmentProblem, LastgoodError
from workers.failpoint import Arm

_STEPS = 24
_SAVE_EVERY = 2
_POLL_SECONDS = 0.02
_BATCH_PER_RANK = 4


def try_supervised(
    cells: Sequence[Cell], settings: Settings, replay: Callable[[Cell], str], keep: Callable[[Verdict], None]
) -> None:
    """Try them one after the other; `keep` hears of each."""
    scratch = settings.out / CELLS_DIR
    references: dict[tuple[int, bool], Digests] = {}
    with _local_ray(max(cell.world_size for cell in cells)):
        for cell in cells:
            kind = (cell.world_size, _tunes(cell))
            if kind not in references:
                references[kind] = _undisturbed(cell, scratch / "reference" / "-".join(map(str, kind)), settings.seed)
            directory = scratch / folder(cell.name)
            shutil.rmtree(directory, ignore_errors=True)
            keep(_try(cell, directory, seed=settings.seed, reference=references[kind], replay=replay(cell)))
    shutil.rmtree(scratch / "reference", ignore_errors=True)


def _undisturbed(cell: Cell, directory: Path, seed: int) -> Digests:
    shutil.rmtree(directory, ignore_errors=True)
    try:
        _trainer(cell, directory, seed, ()).fit()
    except LastgoodError as error:
        raise EnvironmentProblem(f"the run that nobody attacks did not finish: {error}") from error
    return final_digests(directory / "run", _STEPS)


def _try(cell: Cell, directory: Path, *, seed: int, reference: Digests, replay: str) -> Verdict:
    began = time.monotonic()
    run_dir = directory / "run"
    trainer = _trainer(cell, directory, seed, cell.arms(first=True))
    error = ""
    with _killing_on_cue(trainer, cell, run_dir / "faults"):
        try:
            trainer.fit()
        except LastgoodError as problem:
            error = f"{type(problem).__name__}: {problem}"
    ledger = read_ledger(run_dir / LEDGER_FILE)
    told = [entry for entry in ledger if entry["kind"] == "commit"]
    seen = look(run_dir, told, keep_last=cell.kept_min, steps=_STEPS, reference=reference, finished=not error)
    marker = run_dir / "faults" / f"{cell.fault_id}.json"
    story = "; ".join(seen.restored)
    if seen.broken:
        outcome, detail = Outcome.BROKEN, "\n".join(seen.broken)
    elif not marker.exists():
        outcome, detail = Outcome.BROKEN, "the fault never fired, so nothing was tried: the matrix itself is wrong"
    elif error:
        outcome, detail = Outcome.UNRECOVERED, f"after the faults stop the run must finish; {error}"
    else:
        outcome, detail = Outcome.HELD, story
    facts: dict[str, Any] = {"restored": list(seen.restored), "fired": None}
    with suppress(OSError, ValueError):
        facts["fired"] = json.loads(marker.read_bytes())["context"]
    if outcome is Outcome.HELD:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        detail += f"\n{story}\nall that is left of it: {directory}"
    seconds = round(time.monotonic() - began, 3)
    return Verdict(name=cell.name, outcome=outcome, detail=detail, seconds=seconds, replay=replay, facts=facts)


def _tunes(cell: Cell) -> bool:
    """Whether its point is only passed where intervals are tuned."""
    return cell.point == "cadence.decide"


def _trainer(cell: Cell, directory: Path, seed: int, arms: tuple[Arm, ...]) -> SupervisedTrainer:
    size = cell.world_size
    return SupervisedTrainer(
        train_loop,
        train_loop_config={"seed": seed, "steps": _STEPS, "global_batch_size": _BATCH_PER_RANK * size},
        scaling_config=ScalingConfig(num_workers=size),
        run_config=RunConfig(name="run", storage_path=str(directory)),
        recovery=RecoveryConfig(
            cadence="auto" if _tunes(cell) else _SAVE_EVERY, keep_last=cell.keep_last, failpoints=arms
        ),
    )


@contextmanager
def _killing_on_cue(trainer: SupervisedTrainer, cell: Cell, faults: Path) -> Iterator[None]:
    """When the coordinator pauses at the point, kill the rank that the cell names, and let it go on."""
    over = threading.Event()
    pids: dict[int, int] = {}

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            if (faults / "host.json").exists():
                with suppress(ProcessLookupError, KeyError):
                    os.kill(pids[cell.victim_rank or 0], signal.SIGKILL)
                failpoint.release("host", faults)
                return
            # While the coordinator is at the point it answers nobody, so this was asked for before.
            for rank in trainer.status().get("ranks", ()):
                if rank["pid"]:
                    pids[rank["rank"]] = rank["pid"]

    if cell.fault_id != "host":
        yield
        return
    watching = threading.Thread(target=watch, name="matrix-cue", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


@contextmanager
def _local_ray(ranks: int) -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=max(ranks, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()
