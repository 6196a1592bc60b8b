"""One guarantee: its name, its promise in plain words, and how a check's findings become a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chaos.verdict import Outcome, Verdict

_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """`promise`: a sentence that every failure quotes. `broken_as`: UNRECOVERED where time, not safety, is at stake."""

    name: str
    promise: str
    broken_as: Outcome = Outcome.BROKEN

    def judged(self, violations: Sequence[str], seen: str, **facts: Any) -> Verdict:
        """Held if there are no violations; each says what happened and where it is recorded. `seen`: what was looked
        at, for people."""
        if not violations:
            return Verdict(name=self.name, outcome=Outcome.HELD, detail=seen, facts=facts)
        shown = list(violations[:_SHOWN_MAX])
        if len(violations) > _SHOWN_MAX:
            shown.append(f"and {len(violations) - _SHOWN_MAX} more")
        return Verdict(
            name=self.name,
            outcome=self.broken_as,
            detail=f'"{self.promise}" does not hold: {"; ".join(shown)}',
            facts={**facts, "violations": list(violations)},
        )

    def skipped(self, reason: str) -> Verdict:
        """The history does not say."""
        return Verdict(name=self.name, outcome=Outcome.SKIPPED, detail=f'"{self.promise}" was not judged: {reason}')
