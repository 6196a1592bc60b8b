"""One cell tried and judged. Imports torch and Ray, which the processes of a cell are forked with."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from chaos.matrix.agents import acknowledged
from chaos.matrix.cells import Cell
from chaos.matrix.host import RUN_DIR, Host, fired
from chaos.matrix.job import STEPS
from chaos.matrix.judge import Digests, final_digests, look
from chaos.verdict import Outcome, Verdict
from workers.errors import EnvironmentProblem


def undisturbed(cell: Cell, directory: Path, *, seed: int) -> Digests:
    """What a run of as many ranks ends with if nobody attacks it. EnvironmentProblem if it does not end well."""
    directory.mkdir(parents=True)
    ran = Host(cell, directory, seed=seed, undisturbed=True).run()
    if ran.error:
        raise EnvironmentProblem(f"the run that nobody attacks did not finish: {ran.error}; see {directory}/log.txt")
    digests = final_digests(directory / RUN_DIR, STEPS)
    shutil.rmtree(directory)
    return digests


def try_cell(
    cell: Cell,
    directory: Path,
    *,
    seed: int,
    reference: Digests,
    replay: str,
    sabotage: Callable[[], None] = lambda: None,
) -> Verdict:
    """Attack and judge. What the run leaves stays in `directory`, unless everything held."""
    began = time.monotonic()
    directory.mkdir(parents=True)
    ran = Host(cell, directory, seed=seed, sabotage=sabotage).run()
    record = fired(directory, cell.fault_id)
    seen = look(
        directory / RUN_DIR,
        acknowledged(directory),
        keep_last=cell.kept_min,
        steps=STEPS,
        reference=reference,
        finished=not ran.error,
    )
    story = "; ".join(seen.restored)
    if seen.broken:
        outcome, detail = Outcome.BROKEN, "\n".join(seen.broken)
    elif record is None:
        outcome, detail = Outcome.BROKEN, "the fault never fired, so nothing was tried: the matrix itself is wrong"
    elif ran.error:
        outcome, detail = Outcome.UNRECOVERED, f"after the faults stop the run must finish; {ran.error}"
    else:
        outcome, detail = Outcome.HELD, story
    facts = {"restored": list(seen.restored), "fired": None if record is None else record["context"]}
    if outcome is Outcome.HELD:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        detail += f"\n{story}\nall that is left of it: {directory}"
        (directory / "verdict.json").write_text(json.dumps({"cell": cell.name, "detail": detail, **facts}, indent=1))
    return Verdict(
        name=cell.name,
        outcome=outcome,
        detail=detail,
        seconds=round(time.monotonic() - began, 3),
        replay=replay,
        facts=facts,
    )
