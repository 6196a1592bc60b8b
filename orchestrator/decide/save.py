"""One save as the commit machine (decide/commit.py) sees it."""

from dataclasses import dataclass, field
from enum import Enum

from orchestrator.decide.replicas import Said
from workers.checkpoint.manifest import ShardRecord

Key = tuple[int, int]  # generation and step: ordered as the states of one lineage are


class Phase(Enum):
    COLLECTING = "collecting"
    KEPT = "kept"
    READY = "ready"
    WRITING = "writing"
    COMMITTING = "committing"


@dataclass(slots=True, kw_only=True)
class Save:
    """A set of snapshots of one step. `durable`: some rank's is due to be written; else the set is kept in memory."""

    generation: int
    step: int
    ranks: frozenset[int]
    phase: Phase = Phase.COLLECTING
    durable: bool = False
    snapshotted: set[int] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)  # of the snapshots, by rank
    attempt: int = 0  # the last one that was ordered
    receipts: dict[int, ShardRecord] = field(default_factory=dict)  # of this attempt, by rank
    said: dict[int, Said] = field(default_factory=dict)  # of replicas, by rank; the same in every attempt
    failures: int = 0
    retry_at: float | None = None

    @property
    def key(self) -> Key:
        return self.generation, self.step

    @property
    def complete(self) -> bool:
        return self.snapshotted == self.ranks

    def add(self, rank: int, *, durable: bool, digest: str, said: Said) -> None:
        """A rank's snapshot is in memory. Another one than before begins the set anew: the ranks take it once more,
        for they know more of the step now."""
        if self.phase in (Phase.COLLECTING, Phase.KEPT, Phase.READY):
            self.durable = self.durable or durable
            if self.digests.get(rank, digest) != digest:
                self.phase = Phase.COLLECTING
                self.snapshotted.clear()
                self.digests.clear()
                self.said.clear()
        self.snapshotted.add(rank)
        self.digests[rank], self.said[rank] = digest, said

    @property
    def under_way(self) -> bool:
        return self.phase in (Phase.WRITING, Phase.COMMITTING)

    @property
    def unwritten(self) -> tuple[int, ...]:
        return tuple(sorted(self.ranks - self.receipts.keys()))

    def awaits(self, phase: Phase, attempt: int) -> bool:
        """Whether an answer about this attempt is news."""
        return self.phase is phase and self.attempt == attempt and self.retry_at is None

    def reported(self, attempt: int) -> bool:
        """Take in that a keeper knows of this attempt; whether it is the newest known."""
        if attempt > self.attempt:
            self.attempt = attempt
            self.receipts.clear()
        return attempt == self.attempt
