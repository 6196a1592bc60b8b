"""Why a generation ended: the causes that its ranks' ends show, and which of them came first. Pure.

A failure has one first cause; what follows within moments (collective errors on the other ranks, above all) are echoes
of it. decide/causes.py says what each kind of cause means for the run.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.messages import RankError, RankExited

_REAP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why one rank ended, or why its generation had to.

    `rank`: -1 if no single rank is to blame. `exit_code`: None if no process ended by itself. `at`: Unix time, of the
    exception if there was one, else of the exit. `detail`: further facts for the ledger, JSON values.
    """

    rank: int
    kind: str
    exit_code: int | None
    at: float
    error: RankError | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A generation's end: what came first, and what followed from it. `step`: the last one that any rank finished.
    `exit`: of the rank to blame, None if its agent has not told it."""

    generation: int
    first: Cause
    echoes: tuple[Cause, ...]
    step: int
    exit: RankExited | None = None


def earliest(cause: Cause) -> float:
    """When it began, as far as can be told: a process that ends is reaped only after its memory is given back."""
    without_a_word = cause.exit_code is not None and cause.error is None
    # SIGABRT is how a library gives up, often because a peer is gone. Nobody else's failure sends the other signals, or
    # makes a process exit without an exception.
    return cause.at - _REAP_SECONDS if without_a_word and cause.exit_code != -signal.SIGABRT else cause.at


def cause_of(rank: int, event: RankExited) -> Cause:
    if event.out_of_memory:
        kind = "oom"
    elif event.error is not None:
        kind = event.error.cause
    elif event.exit_code < 0:
        kind = "signal"
    else:
        kind = "exit"
    return Cause(
        rank=rank,
        kind=kind,
        exit_code=event.exit_code,
        at=min(event.at, event.error.at) if event.error else event.at,
        error=event.error,
        detail={**event.detail, **(event.error.detail if event.error else {})},
    )
