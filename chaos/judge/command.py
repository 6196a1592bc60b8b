"""`lastgood chaos judge`: judge a run by what it left behind, as often as you like."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chaos.verdict import counts, exit_code


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(judge)


def judge(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: storage_path/name.")],
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR", help="The same training, undisturbed, to compare with.  [default: the campaign's]"
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps that the run was to finish.", min=1)] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="Checkpoints that retention was to keep.  [default: the campaign's, or 1]", min=1)
    ] = None,
    recovery_seconds_max: Annotated[
        float | None, typer.Option(help="How long a restart may take.  [default: the campaign's, or 120]", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge a recorded run against lastgood's guarantees; reads only.

    Exits with 0 if all held that could be judged, 3 if a guarantee of safety is broken, 4 if the run never came back.
    """
    from chaos.history import unreadable
    from chaos.judge.judge import judge as judge_run
    from chaos.judge.judge import require_run
    from chaos.judge.table import print_verdicts
    from chaos.judge.terms import read_terms

    require_run(run_dir)
    terms = read_terms(run_dir).changed(
        reference=None if reference is None else str(reference),
        steps=steps,
        keep_last=keep_last,
        recovery_seconds_max=recovery_seconds_max,
    )
    verdicts, lost = judge_run(run_dir, terms), unreadable(run_dir)
    for what in lost:
        print(f"cannot be read, and what it said is not judged: {what}", file=sys.stderr)
    if as_json:
        content = {
            "run_dir": str(run_dir),
            "unreadable": lost,
            "counts": counts(verdicts),
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(content, indent=2))
    else:
        print_verdicts(str(run_dir), verdicts)
    raise typer.Exit(exit_code(verdicts))
