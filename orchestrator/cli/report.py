"""`lastgood report`: where a run's time went, what failures cost, and how often it should have saved.

Reads only, on a run that is alive, finished or dead; needs neither Ray nor torch. docs/report.md has the fields.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from workers.errors import CallerError, EnvironmentProblem

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: storage_path/name.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report there, as one HTML file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(run_dir: RunDir, output: Output = None, as_json: Json = False) -> None:
    """Say where a run's time went, what each failure cost, and how often it should have saved.

    Prints a summary; -o writes the whole report, with plots, as one HTML file.
    """
    from orchestrator.cli.report_text import write
    from orchestrator.observe.page.status_page import finite
    from orchestrator.observe.run_report.facts import facts_of
    from orchestrator.observe.run_report.render import report_page

    ledger = run_dir / LEDGER_FILE
    if not ledger.is_file():
        raise CallerError(f"{run_dir} has no {LEDGER_FILE}; RUN_DIR is the storage_path/name of a supervised run")
    facts = facts_of(run_dir.absolute(), read_ledger(ledger), time.time())
    if output is not None:
        try:
            output.write_text(report_page(facts), encoding="utf-8")
        except OSError as error:
            problem = f"cannot write {output} ({error.strerror}); choose another file with --output"
            raise EnvironmentProblem(problem) from None
    if as_json:
        print(json.dumps(finite(facts.document), allow_nan=False))
    else:
        write(facts)
        if output is not None:
            print(f"report    {output}")
