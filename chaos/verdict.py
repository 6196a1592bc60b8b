"""What chaos runs come to: one verdict for each thing that was tried and judged."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """BROKEN: a guarantee of safety was violated. UNRECOVERED: none was, but the run never came back or never finished.
    SKIPPED: this machine could not do it, and the verdict says why."""

    HELD = "held"
    BROKEN = "broken"
    UNRECOVERED = "unrecovered"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that was tried.

    name: unique in its report, e.g. "rank 1, persist.fsync, SIGKILL". detail: what was seen, for people; for anything
    but HELD it quotes the guarantee and points at the evidence. replay: the command that tries it again. facts: JSON
    values for scripts.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    replay: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many there are of each outcome, all outcomes named."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome.value: found[outcome] for outcome in Outcome}


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """0 if all that could be tried held, 3 if a guarantee is broken, else 4 if something never recovered."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.BROKEN in outcomes:
        return 3
    return 4 if Outcome.UNRECOVERED in outcomes else 0
