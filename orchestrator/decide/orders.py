"""What the commit machine (decide/commit.py) orders; each order names the generation that it is about."""

from dataclasses import dataclass

from orchestrator.decide.replicas import Difference
from workers.checkpoint.manifest import ShardRecord

ALL_STEPS = 2**62
"""A step above all others: releases whatever a generation that is over still holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """The keepers of `ranks` write their snapshot into this attempt's directory, read it back, and send a receipt."""

    generation: int
    step: int
    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Write the manifest of this attempt; `shards` are in the order of ranks."""

    generation: int
    step: int
    attempt: int
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """This attempt is never committed and its directory is an orphan; with `final`, the step is given up."""

    generation: int
    step: int
    attempt: int
    reason: str
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Slots with steps of this generation up to `upto_step` may be reused, except those in `keep`.

    The newest one replaces all that came before it. Slots that are being written to disk stay until that is done.
    """

    generation: int
    upto_step: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """No attempt at this snapshot is ever made."""

    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """The ranks of this attempt do not hold alike what they must: the generation is to end, for nothing that it still
    has in memory can be trusted."""

    generation: int
    step: int
    attempt: int
    differences: tuple[Difference, ...]


Decision = Persist | Commit | Abandon | Release | Skip | Corruption
