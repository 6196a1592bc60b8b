"""Ledgers of runs that never ran: a clock that a test moves, and the entries that a coordinator would write."""

from typing import Any

Entries = list[dict[str, Any]]


class MadeUpRun:
    """Two ranks, steps of one second, a fixed start; `entries` is its ledger so far, `now` its clock."""

    def __init__(self, *, ranks: int = 2, began: float = 1000.0) -> None:
        self.entries: Entries = []
        self.now = began
        self.ranks = ranks
        self.driver = 0
        self.generation = 0
        self.step = 0

    def add(self, kind: str, **fields: Any) -> None:
        at = fields.pop("at", self.now)
        self.entries.append({"v": 1, "seq": len(self.entries) + 1, "at": at, "kind": kind, **fields})

    def drive(self) -> None:
        """A new driver's coordinator is there."""
        self.driver += 1
        self.add("coordinator", driver=f"d{self.driver}", resumed=False, pid=1)

    def coordinator_again(self) -> None:
        self.add("coordinator", driver=f"d{self.driver}", resumed=True, pid=2)

    def begin(self, restored: int = 0, source: str = "fresh") -> None:
        """The next generation's file is in place."""
        self.generation += 1
        self.step = restored
        self.add(
            "generation",
            generation=self.generation,
            driver=f"d{self.driver}",
            reason="start" if self.generation == 1 else "failure",
            restored_step=restored,
            source=source,
            checkpoint=None,
            parent_generation=None,
            ranks=self.ranks,
            nodes=1,
            from_copies=[],
            skip=[],
        )

    def restore(self, seconds: float) -> None:
        """Ranks restore at the same time, the last one for so long."""
        self.now += seconds
        for rank in range(self.ranks):
            fields = {"source": "memory", "checkpoint": None, "step": self.step, "seconds": seconds}
            self.add("restored", generation=self.generation, rank=rank, **fields)

    def first_step(self) -> None:
        self.step += 1
        for rank in range(self.ranks):
            fields = {"step": self.step, "at_step": self.now}
            self.add("first_step", generation=self.generation, rank=rank, **fields)

    def train(self, steps: int, step_seconds: float = 1.0) -> None:
        """Says nothing of it."""
        self.step += steps
        self.now += steps * step_seconds

    def progress(self, stall_seconds: float = 0.0) -> None:
        fields = {"step": self.step, "at_step": self.now, "step_seconds": 1.0, "stall_seconds": stall_seconds}
        self.add("progress", generation=self.generation, **fields)

    def snapshot(self, stall: float = 0.0, attempt: int = 1) -> None:
        fields = {"step": self.step, "attempt": attempt, "copy_seconds": 0.0, "stall_seconds": stall}
        self.add("snapshot", generation=self.generation, **fields)

    def commit(self, *, step: int | None = None, interference: float = 0.0, samples: int | None = None) -> None:
        """Of this step, or an earlier one."""
        step = self.step if step is None else step
        self.add(
            "commit",
            generation=self.generation,
            step=step,
            attempt=1,
            checkpoint=f"step-{step:09}-g{self.generation:04}-a01",
            bytes=1000,
            samples=samples,
            verified_from=["device"],
            snapshot_at=self.now,
            copy_seconds=0.0,
            stall_seconds=0.0,
            durable_seconds=0.1,
            verify_seconds=0.05,
            commit_seconds=0.2,
            interference_seconds=interference,
        )

    def fail(self, cause: str = "signal", *, noticed_after: float = 0.0, rank: int = 1) -> None:
        """Strikes now, and is noticed so much later; the ledger knows of all steps."""
        failed_at = self.now
        self.now += noticed_after
        self.add(
            "failure",
            generation=self.generation,
            rank=rank,
            cause=cause,
            exit_code=None,
            failed_at=failed_at,
            noticed_at=self.now,
            step=self.step,
            error=None,
            echoes=[],
            detail={},
            restore_failed=None,
        )

    def finish(self) -> None:
        self.add("finished", generation=self.generation, step=self.step, protected=True)

    def stop(self, driver: int | None = None) -> None:
        self.add(
            "stopped", driver=f"d{driver or self.driver}", reason="it did", error_type="TrainingFailed", report=None
        )
