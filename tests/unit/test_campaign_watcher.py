"""What a campaign takes a run's ledger to say."""

import json
from pathlib import Path
from typing import Any

from chaos.campaign.watcher import LedgerTail, Observer


def entry(kind: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "seq": 1, "at": 1.0, "kind": kind, **fields}


def observed(*entries: dict[str, Any]) -> Observer:
    observer = Observer()
    for one in entries:
        observer.take(one)
    return observer


BEGUN = [
    entry("generation", generation=1, ranks=2),
    entry("first_step", generation=1, rank=0, step=1),
    entry("first_step", generation=1, rank=1, step=1),
]


def test_a_run_trains_once_all_ranks_have_done_a_step() -> None:
    assert not observed(*BEGUN[:2]).seen(0).training
    assert observed(*BEGUN).seen(0).training


def test_a_failure_is_being_repaired_until_all_ranks_train_again() -> None:
    failed = [*BEGUN, entry("failure", generation=1)]
    assert observed(*failed).seen(0).recovering
    assert not observed(*failed).seen(0).training
    again = [*failed, entry("generation", generation=2, ranks=2), entry("first_step", generation=2, rank=0, step=1)]
    assert observed(*again).seen(0).recovering
    assert not observed(*again, entry("first_step", generation=2, rank=1, step=1)).seen(0).recovering


def test_a_save_is_under_way_from_its_snapshot_to_its_commit() -> None:
    saving = [*BEGUN, entry("snapshot", generation=1, step=5)]
    assert observed(*saving).seen(0).save == 5
    done = observed(*saving, entry("commit", generation=1, step=5, durable_seconds=0.7)).seen(0)
    assert (done.save, done.save_seconds, done.step) == (None, 0.7, 5)
    assert observed(*saving, entry("save_failed", generation=1, step=5)).seen(0).save is None


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    tail = LedgerTail(path)
    assert tail.read() == []
    line = json.dumps(entry("coordinator")) + "\n"
    path.write_text(line + "no json\n" + line[:10])
    assert [one["kind"] for one in tail.read()] == ["coordinator"]
    with open(path, "a") as file:
        file.write(line[10:])
    assert [one["kind"] for one in tail.read()] == ["coordinator"]
    assert tail.read() == []
