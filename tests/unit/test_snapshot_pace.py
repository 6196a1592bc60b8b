"""How often ranks are told to take snapshots that stay in memory, and what is remembered of the sets."""

from pathlib import Path

from pulse_samples import a_pulse

from orchestrator.config import RecoveryConfig
from orchestrator.decide.lineage import MemorySet
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.snapshot_pace import SnapshotPace
from orchestrator.snapshot_sets import SnapshotSets
from workers.keeper_messages import HeldSnapshot, Snapshotted
from workers.messages import Command, SnapshotEvery


def open_ledger(directory: Path) -> Ledger:
    ledger = Ledger(directory / "ledger.jsonl")
    ledger.append("coordinator", driver="d", resumed=False, pid=1)
    return ledger


def held(rank: int, step: int, copy_seconds: float) -> HeldSnapshot:
    return HeldSnapshot(rank=rank, generation=3, step=step, digest="", copy_seconds=copy_seconds, stall_seconds=0.01)


def test_each_change_is_told_to_the_ranks_and_logged_with_its_inputs_and_kept_over_a_restart(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    told: list[Command] = []
    pace = SnapshotPace(RecoveryConfig(), ledger, told.append)
    assert pace.steps == 10
    pace.pulse(a_pulse(0.0, step_seconds=(0.1, 0.1, 0.1)))
    pace.snapshotted(held(0, 10, 0.05), running=3)
    pace.snapshotted(held(1, 10, 0.05), running=3)
    assert told == [SnapshotEvery(generation=3, steps=25)]
    (entry,) = [entry for entry in read_ledger(ledger.path) if entry["kind"] == "snapshot_every"]
    logged = {name: entry[name] for name in ("generation", "steps", "copy_seconds", "step_seconds", "overhead_max")}
    assert logged == {"generation": 3, "steps": 25, "copy_seconds": 0.05, "step_seconds": 0.1, "overhead_max": 0.02}
    assert SnapshotPace(RecoveryConfig(), ledger, told.append).steps == 25


def test_a_snapshot_whose_costs_are_not_known_says_nothing_of_them(tmp_path: Path) -> None:
    told: list[Command] = []
    pace = SnapshotPace(RecoveryConfig(), open_ledger(tmp_path), told.append)
    pace.pulse(a_pulse(0.0, step_seconds=(0.1, 0.1, 0.1)))
    pace.snapshotted(held(0, 10, 0.0), running=3)
    assert not told


def test_a_set_is_found_where_its_snapshots_are_with_the_costs_of_its_slowest_rank_and_kept_while_it_is_needed() -> (
    None
):
    sets = SnapshotSets()
    sets.told(Snapshotted(keeper="a", snapshot=held(0, 20, 0.1)), None)
    sets.told(Snapshotted(keeper="b", snapshot=held(1, 20, 0.3)), None)
    for step in range(21, 200):
        sets.told(Snapshotted(keeper="a", snapshot=held(0, step, 0.1)), in_memory=(3, 20))
    assert sets.memory((3, 20)) == MemorySet(generation=3, step=20, where={0: "a", 1: "b"})
    assert sets.costs((3, 20)) == {"copy_seconds": 0.3, "stall_seconds": 0.01}
    assert sets.memory((3, 21)) is None
    assert sets.memory(None) is None
