"""What a run is judged by besides its own records: what was asked of it, and the run to compare with.

A campaign leaves them in the run directory, so that `lastgood chaos judge` needs no options there.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workers.errors import CallerError

TERMS_FILE = "terms.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """reference: run directory of the same training, undisturbed; None skips what needs it.
    steps: how many the run was to finish; None for as many as it did.
    recovery_seconds_max: how long a restart may take, from the last fault in it until all ranks train again.
    keep_last, keep_last_min: as in the run's RecoveryConfig.
    exact: whether the run was to end with the reference's bits; not so where faults change what is computed.
    """

    reference: str | None = None
    steps: int | None = None
    recovery_seconds_max: float = 120.0
    keep_last: int = 1
    keep_last_min: int = 1
    exact: bool = True

    def changed(self, **changes: Any) -> "Terms":
        """With those that are not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def write_terms(run_dir: Path, terms: Terms) -> None:
    (run_dir / TERMS_FILE).write_text(json.dumps(asdict(terms), indent=2) + "\n", encoding="utf-8")


def read_terms(run_dir: Path) -> Terms:
    """Those that a campaign left, or the default ones; CallerError if the file is not one of ours."""
    path = run_dir / TERMS_FILE
    try:
        return Terms(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Terms()
    except (ValueError, TypeError) as error:
        raise CallerError(f"{path} does not hold the terms of a campaign: {error}") from None
