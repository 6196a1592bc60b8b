"""What the coordinator makes of the words of keepers: copies ordered, and what can be restored without a node."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.copying import Copying
from orchestrator.decide.lineage import GenerationRecord, MemorySet
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.roster import KeeperRoster
from workers.keeper_messages import CopyOrder, DropCopies, HeldSnapshot, KeeperJoined, ReleaseOrder, ShardCopied


class Rig:
    """Three keepers, a, b and c, with one rank each."""

    def __init__(self, tmp_path: Path, *, enabled: bool = True) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.ledger = Ledger(tmp_path / "ledger.jsonl")
        self.ledger.append("coordinator", driver="d", resumed=False, pid=1)
        self.now = 0.0
        self.keepers = KeeperRoster(lambda: "abc", lambda keeper, command: self.posted.append((keeper, command)))
        for port, node in enumerate("abc"):
            self.keepers.joined(
                KeeperJoined(
                    keeper=f"k{node}", node=node, pid=1, snapshots=(), receipts=(), host="10.0.0.1", port=port + 1
                )
            )
        self.copying = Copying(enabled=enabled, ledger=self.ledger, keepers=self.keepers, clock=lambda: self.now)
        self.start(1)

    def start(self, number: int, *, parent: int | None = None, step: int = 0) -> None:
        self.records = [
            *getattr(self, "records", []),
            GenerationRecord(
                number=number,
                driver="d",
                parent=None,
                parent_generation=parent,
                restored_step=step,
                source="memory" if parent else "fresh",
                reason="",
                created_at=0.0,
                world_size=3,
            ),
        ]
        self.keepers.placed(number, dict(enumerate("abc")))
        self.copying.generation_started(self.records)

    def complete(self, step: int, generation: int = 1) -> None:
        where = dict(enumerate(("ka", "kb", "kc")))
        self.copying.complete(MemorySet(generation=generation, step=step, where=where))

    def copied(self, step: int, *ranks: int, generation: int = 1, error: str | None = None) -> None:
        for rank in ranks:
            self.copying.copied(
                ShardCopied(keeper="", rank=rank, generation=generation, step=step, bytes=100, seconds=0.5, error=error)
            )

    def holds_finished(self, keeper: str, rank: int, step: int, *, finished: bool) -> None:
        self.copying.holds(keeper, [replace(held(rank, step), finished=finished)])

    def holds(self, keeper: str, *shards: tuple[int, int], generation: int = 1, replicas: Any = None) -> None:
        self.copying.holds(keeper, [held(rank, step, generation, replicas) for rank, step in shards])

    def taken(self, kind: type[Any]) -> list[tuple[str, Any]]:
        found = [(keeper, command) for keeper, command in self.posted if isinstance(command, kind)]
        self.posted.clear()
        return found

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in read_ledger(self.ledger.path) if entry["kind"] == kind]


def held(rank: int, step: int, generation: int = 1, replicas: Any = None) -> HeldSnapshot:
    return HeldSnapshot(rank=rank, generation=generation, step=step, digest=f"{rank}-{step}", replicas=replicas or {})


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_each_keeper_is_told_where_to_send_its_shards(rig: Rig) -> None:
    rig.complete(10)
    orders = rig.taken(CopyOrder)
    assert [(keeper, order.ranks, order.port) for keeper, order in orders] == [
        ("ka", (0,), 2),
        ("kb", (1,), 3),
        ("kc", (2,), 1),
    ]
    assert {(order.generation, order.step, order.keep_step) for _, order in orders} == {(1, 10, 0)}


def test_without_replication_nothing_is_sent_and_all_memory_is_released(tmp_path: Path) -> None:
    rig = Rig(tmp_path, enabled=False)
    rig.complete(10)
    rig.copying.release(ReleaseOrder(generation=1, upto_step=12, keep=(12,)))
    assert {type(command) for _, command in rig.posted} == {ReleaseOrder}
    assert {command.spare for _, command in rig.taken(ReleaseOrder)} == {()}


def test_memory_that_copies_need_is_spare_until_a_newer_set_is_copied(rig: Rig) -> None:
    rig.complete(10)
    rig.copied(10, 0, 1, 2)
    rig.complete(12)
    rig.posted.clear()
    rig.copying.release(ReleaseOrder(generation=1, upto_step=14, keep=(14,)))
    assert {command.spare for _, command in rig.taken(ReleaseOrder)} == {(10, 12)}
    rig.copied(12, 0, 1, 2)
    dropped = [command for _, command in rig.posted if isinstance(command, DropCopies)]
    assert dropped == [DropCopies(generation=1, step=12)] * 3
    assert {command.spare for _, command in rig.taken(ReleaseOrder)} == {(12,)}


def test_the_ledger_says_now_and_then_how_far_copies_are(rig: Rig) -> None:
    for step in (10, 12, 14):
        rig.complete(step)
        rig.now += 2.0
        rig.copied(step, 0, 1, 2)
    rig.now += 60.0
    rig.complete(16)
    rig.copied(16, 0, 1, 2)
    assert [(entry["step"], entry["bytes"]) for entry in rig.entries("replicated")] == [(10, 300), (16, 300)]
    assert rig.entries("replicated")[0]["seconds"] == 2.0


def test_a_copy_that_fails_is_in_the_ledger_once_and_the_next_set_is_copied(rig: Rig) -> None:
    rig.complete(10)
    rig.complete(12)
    rig.posted.clear()
    rig.copied(10, 0, error="refused")
    assert {order.step for _, order in rig.taken(CopyOrder)} == {12}
    rig.copied(12, 0, error="refused")
    assert [entry["step"] for entry in rig.entries("copy_failed")] == [10]


# ---------------------------------------------------------------- a node is lost


def lose_a(rig: Rig) -> None:
    rig.copying.generation_ending()
    rig.keepers.node_lost("a")
    rig.copying.keeper_lost("ka")


def test_the_newest_set_that_is_whole_without_the_lost_node_is_restored(rig: Rig) -> None:
    lose_a(rig)
    rig.holds("kb", (1, 10), (1, 12), (1, 14), (0, 10), (0, 12))
    rig.holds("kc", (2, 12), (2, 14), (1, 12))
    memory = rig.copying.restorable(3)
    assert memory == MemorySet(generation=1, step=12, where={0: "kb", 1: "kb", 2: "kc"})
    assert rig.copying.digests(memory) == {0: "0-12", 1: "1-12", 2: "2-12"}
    assert rig.copying.addresses(memory) == (("10.0.0.1", 2, (0, 1)), ("10.0.0.1", 3, (2,)))


def test_nothing_is_restored_from_memory_if_a_shard_is_nowhere(rig: Rig) -> None:
    lose_a(rig)
    rig.holds("kb", (1, 12), (0, 10))
    rig.holds("kc", (2, 12))
    assert rig.copying.restorable(3) is None


def test_a_rank_s_own_keeper_is_asked_rather_than_the_one_with_the_copy(rig: Rig) -> None:
    rig.copying.generation_ending()
    for keeper, shards in (("ka", ((0, 12), (2, 12))), ("kb", ((1, 12), (0, 12))), ("kc", ((2, 12), (1, 12)))):
        rig.holds(keeper, *shards)
    memory = rig.copying.restorable(3)
    assert memory is not None
    assert memory.where == {0: "ka", 1: "kb", 2: "kc"}


def test_what_a_lost_keeper_had_said_does_not_count(rig: Rig) -> None:
    rig.copying.generation_ending()
    for keeper, rank in (("ka", 0), ("kb", 1), ("kc", 2)):
        rig.holds(keeper, (rank, 12))
    assert rig.copying.restorable(3) is not None
    rig.keepers.node_lost("a")
    rig.copying.keeper_lost("ka")
    assert rig.copying.restorable(3) is None


def test_a_keeper_that_has_not_spoken_yet_is_waited_for_and_a_late_snapshot_counts(rig: Rig) -> None:
    rig.copying.generation_ending()
    rig.holds("ka", (0, 12))
    rig.holds("kb", (1, 12))
    assert rig.copying.silent()
    rig.holds("kc")
    assert not rig.copying.silent()
    assert rig.copying.restorable(3) is None
    rig.copying.snapshotted("kc", held(2, 12))
    assert rig.copying.restorable(3) is not None


def test_sets_that_are_not_to_be_used_are_passed_over(rig: Rig) -> None:
    rig.copying.generation_ending()
    for keeper, rank in (("ka", 0), ("kb", 1), ("kc", 2)):
        rig.holds(keeper, (rank, 10), (rank, 12))
    rig.copying.drop(1, 12)
    memory = rig.copying.restorable(3)
    assert memory is not None
    assert memory.step == 10
    rig.copying.drop(1)
    assert rig.copying.restorable(3) is None


def test_what_was_found_bad_is_not_used_after_the_coordinators_restart_either(rig: Rig) -> None:
    rig.ledger.append("memory_dropped", generation=1, step=12, reason="bad")
    again = Copying(enabled=True, ledger=rig.ledger, keepers=rig.keepers)
    again.generation_started(rig.records)
    for keeper, rank in (("ka", 0), ("kb", 1), ("kc", 2)):
        again.holds(keeper, [held(rank, 10), held(rank, 12)])
    memory = again.restorable(3)
    assert memory is not None
    assert memory.step == 10


def test_a_timeline_that_was_rolled_back_is_not_restored(rig: Rig) -> None:
    rig.start(2, parent=1, step=10)
    rig.copying.generation_ending()
    for keeper, rank in (("ka", 0), ("kb", 1), ("kc", 2)):
        rig.holds(keeper, (rank, 10), (rank, 12))
    memory = rig.copying.restorable(3)
    assert memory is not None
    assert memory.step == 10


def test_another_number_of_ranks_restores_nothing_from_memory(rig: Rig) -> None:
    rig.copying.generation_ending()
    for keeper, rank in (("ka", 0), ("kb", 1), ("kc", 2)):
        rig.holds(keeper, (rank, 10))
    assert rig.copying.restorable(2) is None


def test_after_the_coordinators_restart_the_set_that_is_with_two_keepers_stays(rig: Rig) -> None:
    joined = [
        KeeperJoined(
            keeper=f"k{node}",
            node=node,
            pid=1,
            receipts=(),
            snapshots=(held(rank, 12), held(rank, 14)),
            copies=(held((rank - 1) % 3, 12),),
        )
        for rank, node in enumerate("abc")
    ]
    rig.copying.rebuild(rig.records, joined)
    rig.copying.release(ReleaseOrder(generation=1, upto_step=14, keep=(14,)))
    assert {command.spare for _, command in rig.taken(ReleaseOrder)} == {(12,)}


@pytest.mark.parametrize("last", [False, True])
def test_two_saves_of_one_step_are_not_restored_as_one_set(last: bool, rig: Rig) -> None:
    """A rank was killed before it had saved the last step again as finished: the others would end, and it train on."""
    rig.holds_finished("ka", 0, 40, finished=True)
    rig.holds_finished("kb", 1, 40, finished=True)
    rig.holds_finished("kc", 2, 40, finished=last)
    assert (rig.copying.restorable(3) is not None) == last
