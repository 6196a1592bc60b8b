"""What is remembered of the sets of snapshots in memory."""

from orchestrator.decide.lineage import MemorySet
from orchestrator.snapshot_sets import SnapshotSets
from workers.keeper_messages import HeldSnapshot, Snapshotted


def held(rank: int, step: int, copy_seconds: float) -> HeldSnapshot:
    return HeldSnapshot(rank=rank, generation=3, step=step, digest="", copy_seconds=copy_seconds, stall_seconds=0.01)


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
