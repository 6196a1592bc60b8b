"""All guarantees, in the order in which a reader wants them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from chaos.history import History
from chaos.judge import conduct, keeping, leaks, restores, sameness
from chaos.judge.terms import Terms
from chaos.verdict import Verdict
from orchestrator.observe.ledger import LEDGER_FILE
from workers.errors import CallerError

Check = Callable[[History, Terms], Verdict]

CHECKS: Sequence[Check] = (
    restores.never_torn,
    keeping.never_lost,
    restores.newest_wins,
    sameness.exact,
    sameness.each_sample_once,
    restores.nothing_unverified,
    keeping.retention_floor,
    conduct.recovery_in_time,
    conduct.no_false_alarms,
    conduct.liveness,
    leaks.no_leaks,
)


def judge(run_dir: Path, terms: Terms) -> list[Verdict]:
    """One verdict a guarantee. Raises CallerError for directories that are not those of supervised runs."""
    require_run(run_dir)
    if terms.reference is not None:
        require_run(Path(terms.reference))
    history = History(run_dir)
    replay = f"lastgood chaos judge {run_dir}"
    if terms.reference is not None:
        replay += f" --reference {terms.reference}"
    verdicts = []
    for check in CHECKS:
        began = monotonic()
        verdicts.append(replace(check(history, terms), seconds=monotonic() - began, replay=replay))
    return verdicts


def require_run(run_dir: Path) -> None:
    if not (run_dir / LEDGER_FILE).is_file():
        raise CallerError(f"{run_dir} has no {LEDGER_FILE}; give the storage_path/name of a supervised run")
