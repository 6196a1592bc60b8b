"""A ledger of a run on two ranks that fails evenly, as far as costs and failures are read from it."""

from pathlib import Path
from typing import Any

from orchestrator.observe.ledger import Ledger


def write_ledger(run_dir: Path, *, failures: int, up_seconds: float) -> None:
    """Each generation runs so long and then fails; it restores from memory and takes 2 s until it trains again. Steps
    take 0.5 s; a save stalls for 0.5 s and can be restored 3 s after its step."""
    ledger = Ledger(run_dir / "ledger.jsonl")

    def add(kind: str, at: float, **fields: Any) -> None:
        ledger.append(kind, at=at, **fields)

    add("coordinator", 0.0, driver="d", resumed=False)
    at = 0.0
    for number in range(1, failures + 2):
        source = "fresh" if number == 1 else "memory"
        add("generation", at, generation=number, ranks=2, source=source, restored_step=0, checkpoint=None)
        for rank in (0, 1):
            add("first_step", at + 2.5, generation=number, rank=rank, step=1, at_step=at + 2.5)
        for step in (10, 20):
            seconds = {"snapshot_at": at + 2.5 + step * 0.5 + 1.0, "copy_seconds": 1.0, "stall_seconds": 0.5}
            seconds |= {"commit_seconds": 2.0, "interference_seconds": 0.25}
            add("commit", at + 30, generation=number, step=step, bytes=1000, **seconds)
        add("cadence", at + 31, tier="durable", interval_steps=10, inputs={"step_seconds": 0.5})
        at += up_seconds
        if number <= failures:
            add("failure", at, generation=number, rank=0, cause="signal", failed_at=at, step=20)
