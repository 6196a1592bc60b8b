"""Where the checkpoints of a run lie whose directory is at hand: in it, or where its ledger says."""

from pathlib import Path

from orchestrator.observe.ledger import LEDGER_FILE, read_ledger
from workers.checkpoint.place import open_store
from workers.checkpoint.store import Store


def store_of(run_dir: Path) -> Store:
    """The store of the run's newest driver."""
    return open_store(run_dir, checkpoint_storage_of(run_dir))


def checkpoint_storage_of(run_dir: Path) -> str | None:
    """RecoveryConfig.checkpoint_storage of the run's newest driver."""
    ledger = run_dir / LEDGER_FILE
    urls = (
        [entry.get("checkpoint_storage") for entry in read_ledger(ledger) if entry["kind"] == "coordinator"]
        if ledger.exists()
        else []
    )
    return urls[-1] if urls and isinstance(urls[-1], str) else None
