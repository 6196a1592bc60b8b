"""The keeper: what it writes and when, what it says of it, and whose snapshots it believes."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fakes import DEADLINE_SECONDS, FakeLink, RankEnd
from peer_samples import EXCHANGE

from workers import failpoint
from workers.checkpoint import held, persist
from workers.checkpoint.digests import image_digests
from workers.checkpoint.manifest import CHECKPOINTS_DIR, checkpoint_name
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.store import LocalStore
from workers.errors import CheckpointDamaged
from workers.keeper import Keeper, keeper_address
from workers.keeper_messages import (
    EndGeneration,
    GenerationDrained,
    HeldSnapshot,
    PersistFailed,
    PersistOrder,
    ReleaseOrder,
    ShardPersisted,
    SnapshotSkipped,
    Snapshotted,
)
from workers.messages import RestoreOrder
from workers.rank_memory import RankMemory


class Node:
    """A node with a keeper that can be replaced by a fresh one, as after its death."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / CHECKPOINTS_DIR).mkdir(parents=True, exist_ok=True)
        self.run = uuid.uuid4().hex[:8]
        self.address = keeper_address(self.run, "d", "n1")
        self.start()

    def start(self) -> None:
        self.keeper = Keeper(
            run=self.run,
            driver="d",
            node="n1",
            run_dir=str(self.run_dir),
            coordinator="c",
            takeover_seconds=0.1,
            read_back=persist.ReadBack(),
            exchange=EXCHANGE,
        )
        self.link: Any = self.keeper._link
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.keeper.close()

    def rank(self, **options: Any) -> RankEnd:
        return RankEnd(self.address, **options)

    def order(self, step: int, *, attempt: int = 1, rank: int = 0, generation: int = 1) -> PersistOrder:
        order = PersistOrder(
            rank=rank,
            world_size=1,
            generation=generation,
            step=step,
            attempt=attempt,
            checkpoint=checkpoint_name(step, generation, attempt),
        )
        self.link.command(order)
        return order

    def shard(self, order: PersistOrder) -> Path:
        return self.run_dir / "checkpoints" / order.checkpoint / "shard-00000-of-00001.safetensors"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("workers.keeper.Link", FakeLink)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    node = Node(tmp_path / "run")
    yield node
    node.close()


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.writes = 0

        def gated(*arguments: Any, **options: Any) -> Any:
            self.writes += 1
            self.reached.set()
            assert self.opened.wait(DEADLINE_SECONDS)
            return persist.write_shard(*arguments, **options)

        monkeypatch.setattr("workers.keeper.write_shard", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def inodes(slots: Iterable[Slot]) -> set[int]:
    return {os.fstat(slot.fd).st_ino for slot in slots}


def descriptors_of(wanted: set[int]) -> int:
    """How many descriptors of these slots this process, keeper and rank in one, has: each one's own and its map's."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.stat(f"/proc/self/fd/{fd}").st_ino in wanted
    return found


# ---------------------------------------------------------------- writing


def test_a_run_directory_that_vanished_is_not_made_anew_and_the_save_works_once_it_is_back(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    away = node.run_dir.with_name("away")
    node.run_dir.rename(away)
    node.order(20)
    failed = node.link.wait_for(PersistFailed)
    assert failed.transient
    assert not failed.no_space
    assert "vanished" in failed.error
    assert not node.run_dir.exists()
    away.rename(node.run_dir)
    node.order(20, attempt=2)
    assert node.link.wait_for(ShardPersisted).attempt == 2


def test_an_empty_place_where_the_run_directory_was_is_left_empty(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    (node.run_dir / CHECKPOINTS_DIR).rmdir()
    node.order(20)
    assert node.link.wait_for(PersistFailed).transient
    assert not (node.run_dir / CHECKPOINTS_DIR).exists()


def test_a_full_disk_is_told_as_such(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    full = failpoint.Arm(id="full", point="persist.block", action="enospc")
    monkeypatch.setattr(failpoint, "_armed", (full,))
    monkeypatch.setattr(failpoint, "_marker_dir", node.run_dir / "faults")
    node.order(20)
    failed = node.link.wait_for(PersistFailed)
    assert failed.no_space
    assert failed.transient


def test_a_complete_snapshot_is_written_verified_and_answered_with_a_receipt(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    told = node.link.wait_for(Snapshotted)
    assert told.snapshot == HeldSnapshot(
        rank=0,
        generation=1,
        step=20,
        digest=xxhash.xxh3_128_hexdigest(slot.image[: slot.image_bytes]),
        replicas={"sets": []},
        copy_seconds=0.25,
        stall_seconds=0.125,
    )
    assert slot.digest == told.snapshot.digest
    order = node.order(20)
    receipt = node.link.wait_for(ShardPersisted)
    assert (receipt.rank, receipt.generation, receipt.step, receipt.attempt) == (0, 1, 20, 1)
    assert receipt.snapshot_at == 1.5
    assert receipt.identity == {"world_size": 1}
    assert receipt.progress == {"step": 20}
    assert receipt.replicas == {"sets": []}
    [file] = (node.run_dir / "checkpoints" / order.checkpoint).iterdir()
    assert file.name == receipt.shard.file
    assert file.read_bytes() == bytes(slot.image[: receipt.shard.bytes])
    assert slot.state is SlotState.COMPLETE
    rank.close()


def test_a_repeated_order_is_answered_as_before_and_writes_nothing(node: Node, gate: Gate) -> None:
    gate.opened.set()
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    first = node.link.wait_for(ShardPersisted)
    node.order(20)
    assert node.link.wait_for(ShardPersisted) == first
    assert gate.writes == 1
    rank.close()


def test_an_order_that_comes_again_during_its_write_is_answered_once(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    assert gate.reached.wait(DEADLINE_SECONDS)
    assert slot.state is SlotState.HELD  # the rank cannot reuse it now
    node.order(20)
    gate.opened.set()
    node.link.wait_for(ShardPersisted)
    assert node.link.told(ShardPersisted) == []
    assert node.link.told(PersistFailed) == []
    assert gate.writes == 1
    rank.close()


@pytest.mark.parametrize("step", [20, 40])
def test_an_unknown_snapshot_is_refused_for_good(step: int, node: Node) -> None:
    rank = node.rank()
    if step == 20:
        rank.give_slots()
        rank.snapshot(step=60)
        node.link.wait_for(Snapshotted)
    node.order(step)
    failed = node.link.wait_for(PersistFailed)
    assert (failed.step, failed.error, failed.transient) == (step, "the keeper does not hold that snapshot", False)
    node.order(step)
    assert node.link.wait_for(PersistFailed) == failed
    rank.close()


def test_a_keeper_that_does_not_read_back_says_so_in_its_receipts(node: Node) -> None:
    node.keeper._read_back = None
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    receipt = node.link.wait_for(ShardPersisted)
    assert receipt.shard.verified_from == "nothing"
    rank.close()


@pytest.mark.parametrize(
    ("error", "transient"), [(errno.ENOSPC, True), (errno.EIO, True), (errno.EROFS, False), (errno.EACCES, False)]
)
def test_a_failed_write_says_whether_another_try_may_help_and_keeps_the_snapshot(
    error: int, transient: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)

    def failing(*_arguments: Any, **_options: Any) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr("workers.keeper.write_shard", failing)
        node.order(20)
        failed = node.link.wait_for(PersistFailed)
    assert failed.transient is transient
    assert os.strerror(error) in failed.error
    assert slot.state is SlotState.COMPLETE
    node.order(20, attempt=2)
    assert node.link.wait_for(ShardPersisted).attempt == 2
    rank.close()


def test_one_write_is_under_way_and_of_those_ordered_meanwhile_the_newest_is_next(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots(3)
    for step in (20, 30, 40):
        rank.snapshot(step)
        node.link.wait_for(Snapshotted)
    node.order(20)
    assert gate.reached.wait(DEADLINE_SECONDS)
    skipped = node.order(30)
    following = node.order(40)
    failed = node.link.wait_for(PersistFailed)
    assert (failed.step, failed.attempt) == (skipped.step, skipped.attempt)
    assert "still being written" in failed.error
    node.link.command(following)  # said again, it is neither begun twice nor answered before it is done
    assert gate.writes == 1
    assert [slot.state for slot in rank.slots] == [SlotState.HELD, SlotState.COMPLETE, SlotState.COMPLETE]
    gate.opened.set()
    assert [node.link.wait_for(ShardPersisted).step for _ in range(2)] == [20, 40]
    assert gate.writes == 2
    rank.close()


def test_another_attempt_at_a_step_waits_for_the_write_that_is_given_up(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20, attempt=1)
    assert gate.reached.wait(DEADLINE_SECONDS)
    node.order(20, attempt=2)
    gate.opened.set()
    assert [node.link.wait_for(ShardPersisted).attempt for _ in range(2)] == [1, 2]
    rank.close()


# ---------------------------------------------------------------- ranks come and go


def test_a_torn_slot_is_free_again_for_the_next_rank_and_a_complete_one_is_kept(node: Node) -> None:
    dying = node.rank(generation=1)
    dying.give_slots(3)
    dying.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    dying.slots[1].begin(rank=0, generation=1, step=21)
    os.pwrite(dying.slots[2].fd, b"\xff", 8)  # killed in the middle of the header
    assert dying.slots[2].state is SlotState.TORN
    dying.close()
    successor = node.rank(generation=2)
    assert [slot.state for slot in successor.slots] == [SlotState.COMPLETE, SlotState.FREE, SlotState.FREE]
    assert (successor.slots[0].generation, successor.slots[0].step) == (1, 20)
    node.order(20)  # a dead rank's save is finished all the same
    assert node.link.wait_for(ShardPersisted).step == 20
    successor.close()


def test_a_rank_of_an_older_generation_is_turned_away_and_changes_nothing(node: Node) -> None:
    present = node.rank(generation=3)
    present.give_slots()
    present.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    present.slots[1].begin(rank=0, generation=3, step=21)
    late = node.rank(generation=2)
    assert not late.welcome
    assert present.slots[1].state is SlotState.WRITING
    assert node.rank(rank=1, generation=2).welcome  # each rank has its own
    present.close()
    late.close()


def test_a_skipped_snapshot_is_passed_on(node: Node) -> None:
    rank = node.rank()
    rank.channel.send("skipped", step=20, durable=False, reason="no snapshot slot was free")
    told = node.link.wait_for(SnapshotSkipped)
    assert (told.rank, told.generation, told.step, told.durable) == (0, 1, 20, False)
    assert told.reason == "no snapshot slot was free"
    rank.close()


def test_the_dead_ranks_are_read_to_the_end_before_their_generation_is_drained(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited, join = threading.Event(), threading.Thread.join
    from_rank = node.keeper._from_rank

    def reading(*arguments: Any) -> None:
        assert awaited.wait(DEADLINE_SECONDS)  # as late as can be
        from_rank(*arguments)

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        awaited.set()
        join(thread, timeout)

    monkeypatch.setattr(node.keeper, "_from_rank", reading)
    monkeypatch.setattr(threading.Thread, "join", joining)
    monkeypatch.setattr("workers.keeper._DRAIN_SECONDS", DEADLINE_SECONDS)
    leader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    rank = node.rank(pid=leader.pid)
    for step in range(10):
        rank.channel.send("skipped", step=step, durable=True, reason="")
    rank.channel.close()
    node.link.command(EndGeneration(generation=1))
    *before, last = node.link._events
    assert isinstance(last, GenerationDrained)
    assert [event.step for event in before] == list(range(10))
    assert leader.wait(timeout=DEADLINE_SECONDS) == -signal.SIGKILL


def test_a_rank_of_a_later_generation_is_neither_killed_nor_waited_for(node: Node) -> None:
    leader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    rank = node.rank(pid=leader.pid, generation=2)
    node.link.command(EndGeneration(generation=1))
    assert node.link.wait_for(GenerationDrained).generation == 1
    assert leader.poll() is None
    leader.kill()
    leader.wait()
    rank.close()


# ---------------------------------------------------------------- digests and restores


def test_a_snapshot_is_told_of_once_it_is_digested_and_kept_until_then(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        reached.set()
        assert opened.wait(DEADLINE_SECONDS)
        return image_digests(*arguments)

    monkeypatch.setattr("workers.rank_memory.image_digests", slow)
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    rank.channel.send("skipped", step=21, durable=False, reason="")
    assert reached.wait(DEADLINE_SECONDS)
    node.link.command(ReleaseOrder(generation=1, upto_step=20, keep=()))
    assert slot.state is SlotState.COMPLETE, "freed while it was read"
    assert slot.digest == ""
    assert node.link.introduce().snapshots == ()
    assert node.link.told(Snapshotted) == []
    opened.set()
    node.link.wait_for(SnapshotSkipped)
    assert [type(event) for event in node.link._events] == [Snapshotted], "in the order of the rank"
    rank.close()


def test_each_image_is_digested_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []

    def counted(content: memoryview, tensors: Any) -> Any:
        digested.append(len(content))
        return image_digests(content, tensors)

    monkeypatch.setattr("workers.rank_memory.image_digests", counted)
    rank = node.rank()
    rank.give_slots()
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    assert node.link.wait_for(ShardPersisted).shard.digest == rank.slots[0].digest
    assert len(digested) == 1
    rank.close()


def test_the_snapshots_of_the_dead_are_digested_before_their_generation_is_drained(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, waited = threading.Event(), threading.Event()
    wait = RankMemory.wait

    def slow(*arguments: Any) -> Any:
        assert opened.wait(DEADLINE_SECONDS)
        return image_digests(*arguments)

    def waiting(memory: RankMemory, timeout_seconds: float) -> bool:
        opened.set()
        waited.set()
        return wait(memory, DEADLINE_SECONDS)

    monkeypatch.setattr("workers.rank_memory.image_digests", slow)
    monkeypatch.setattr(RankMemory, "wait", waiting)
    rank = node.rank(pid=2**22 + 1)
    rank.give_slots()
    rank.snapshot(step=20)
    rank.channel.close()
    node.link.command(EndGeneration(generation=1))
    assert waited.is_set()
    assert [type(event) for event in node.link._events] == [Snapshotted, GenerationDrained]


def test_a_later_snapshot_of_the_same_step_takes_the_place_of_the_earlier_one(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    first = rank.snapshot(step=20, value=1.0)
    node.link.wait_for(Snapshotted)
    second = rank.snapshot(step=20, value=2.0)
    assert node.link.wait_for(Snapshotted).snapshot.digest == second.digest
    assert first.state is SlotState.FREE
    node.order(20)
    assert node.link.wait_for(ShardPersisted).shard.digest == second.digest
    rank.close()


def test_a_snapshot_whose_bytes_changed_before_another_keeper_wrote_it_is_not_written(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.close()
    node.start()
    slot.image[slot.image_bytes - 1] ^= 1
    again = node.rank()
    again.slots = rank.slots
    again.hand_over()
    assert node.link.wait_for(Snapshotted).snapshot.digest == slot.digest, "of what the rank had made"
    node.order(20)
    assert "has changed in memory" in node.link.wait_for(PersistFailed).error
    again.close()


def restore_of(step: int) -> RestoreOrder:
    return RestoreOrder(source="memory", generation=1, step=step, checkpoint=None)


def test_the_next_generation_is_handed_the_slots_of_all_ranks_of_the_node(node: Node) -> None:
    dead = [node.rank(rank=rank) for rank in (0, 1)]
    for rank in dead:
        rank.give_slots()
        rank.snapshot(step=20, value=float(rank.rank))
        node.link.wait_for(Snapshotted)
        rank.close()
    successor = node.rank(rank=1, generation=2)
    shards = held.fetch(successor.channel, 1, restore_of(20), 2, mapped=successor.slots, alive=lambda: None)
    manifest = shards.manifest(2)
    assert [shard.rank for shard in manifest.shards if shard.tensors] == [0, 1]
    reader = CheckpointReader(LocalStore(node.run_dir), manifest.name, 1, manifest=manifest, shards=shards)
    assert reader.fetch("model.weight", offsets=(0,), shape=(8,)).tolist() == [1.0] * 8
    opened = descriptors_of(inodes(successor.slots))
    reader.close()
    assert descriptors_of(inodes(successor.slots)) == opened, "the rank's own slots are still in use"
    with pytest.raises(CheckpointDamaged, match=r"does not hold rank 1's snapshot of step 21, generation 1"):
        held.fetch(successor.channel, 1, restore_of(21), 2, mapped=successor.slots, alive=lambda: None)
    successor.close()


# ---------------------------------------------------------------- slots


def test_released_slots_are_free_again_except_the_ones_to_keep(node: Node) -> None:
    rank = node.rank()
    rank.give_slots(4)
    for step in (10, 20, 30, 40):
        rank.snapshot(step)
        node.link.wait_for(Snapshotted)
    node.link.command(ReleaseOrder(generation=1, upto_step=30, keep=(20,)))
    held = {slot.step for slot in rank.slots if slot.state is SlotState.COMPLETE}
    assert held == {20, 40}
    node.link.command(ReleaseOrder(generation=2, upto_step=99, keep=()))  # of another generation
    assert {slot.step for slot in rank.slots if slot.state is SlotState.COMPLETE} == held
    rank.close()


def test_a_slot_that_is_released_during_its_write_is_free_once_that_is_done(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    assert gate.reached.wait(DEADLINE_SECONDS)
    node.link.command(ReleaseOrder(generation=1, upto_step=20, keep=()))
    assert slot.state is SlotState.HELD
    gate.opened.set()
    node.link.wait_for(ShardPersisted)
    assert slot.state is SlotState.FREE
    rank.close()


def test_slots_that_were_replaced_are_dropped_at_once_or_when_their_write_is_done(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots()
    slots = inodes(rank.slots)
    rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    assert gate.reached.wait(DEADLINE_SECONDS)
    rank.give_slots(image_bytes=1 << 18)
    slots |= inodes(rank.slots)
    rank.snapshot(step=21)
    while node.link.wait_for(Snapshotted).snapshot.step != 21:  # that of 20 may have been told twice
        continue
    assert descriptors_of(slots) == 2 * 5  # the rank's two, the keeper's two, and the one being written
    gate.opened.set()
    assert node.link.wait_for(ShardPersisted).step == 20
    assert descriptors_of(slots) == 2 * 5, "the snapshot may still be restored"
    node.link.command(ReleaseOrder(generation=1, upto_step=20, keep=()))
    assert descriptors_of(slots) == 2 * 4
    rank.close()


def test_a_keeper_that_comes_back_takes_the_slots_over_and_tells_what_is_in_them(node: Node, gate: Gate) -> None:
    rank = node.rank()
    rank.give_slots()
    slot = rank.snapshot(step=20)
    node.link.wait_for(Snapshotted)
    node.order(20)
    assert gate.reached.wait(DEADLINE_SECONDS)
    node.close()
    node.start()
    assert slot.state is SlotState.HELD  # by the one that is dead
    again = node.rank()
    again.slots = rank.slots
    again.hand_over()
    told = node.link.wait_for(Snapshotted).snapshot
    assert (told.rank, told.generation, told.step, told.digest) == (0, 1, 20, slot.digest)
    assert slot.state is SlotState.COMPLETE
    gate.opened.set()
    node.order(20, attempt=2)
    assert node.link.wait_for(ShardPersisted).attempt == 2
    again.close()


def test_a_keeper_that_comes_back_tells_of_snapshots_in_the_order_of_time_wherever_they_lie(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    slots = [rank.snapshot(step=20), rank.snapshot(step=21)]
    for _ in slots:
        node.link.wait_for(Snapshotted)
    slots[0].release()
    assert rank.snapshot(step=22) is slots[0]
    node.link.wait_for(Snapshotted)
    node.close()
    node.start()
    again = node.rank()
    again.slots = rank.slots
    again.hand_over()
    assert [node.link.wait_for(Snapshotted).snapshot.step for _ in slots] == [21, 22]
    again.close()


def test_a_keeper_introduces_itself_with_its_snapshots_their_last_attempts_and_its_receipts(node: Node) -> None:
    rank = node.rank()
    rank.give_slots()
    slots = [rank.snapshot(step=20)]
    node.link.wait_for(Snapshotted)
    slots.append(rank.snapshot(step=22, durable=False))
    node.link.wait_for(Snapshotted)
    node.order(20, attempt=3)
    receipt = node.link.wait_for(ShardPersisted)
    joined = node.link.introduce()
    assert (joined.node, joined.pid) == ("n1", os.getpid())
    assert [(held.step, held.attempt, held.durable, held.digest) for held in joined.snapshots] == [
        (20, 3, True, slots[0].digest),
        (22, 0, False, slots[1].digest),
    ]
    assert joined.receipts == (receipt,)
    rank.close()


def test_a_closed_keeper_takes_no_connections_and_leaves_no_records(node: Node, tmp_path: Path) -> None:
    leader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    rank = node.rank(pid=leader.pid)
    pidfd = os.pidfd_open(leader.pid)
    node.close()
    assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0]
    assert leader.wait() == -signal.SIGKILL
    with pytest.raises(ConnectionRefusedError):
        node.rank()
    assert list(tmp_path.rglob("*.groups")) == []
    os.close(pidfd)
    rank.close()
