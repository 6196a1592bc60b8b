"""Keepers of several nodes: copies of each other's shards, and shards read from there by ranks that restore."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEADLINE_SECONDS, FakeLink, RankEnd, make_orders
from peer_samples import EXCHANGE

from workers.checkpoint.held import HeldShards, fetch
from workers.checkpoint.manifest import CHECKPOINTS_DIR, checkpoint_name
from workers.checkpoint.persist import ReadBack
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import SlotState
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState, NamedTensor
from workers.errors import CheckpointDamaged
from workers.heartbeat import HeartbeatPage
from workers.keeper import Keeper, keeper_address
from workers.keeper_messages import (
    CopyOrder,
    DropCopies,
    EndGeneration,
    GenerationDrained,
    PersistOrder,
    ReleaseOrder,
    ShardCopied,
    ShardPersisted,
    Snapshotted,
)
from workers.messages import RestoreOrder
from workers.orders import RankOrders
from workers.snapshots import SnapshotWriter


class Nodes:
    """A keeper a node, and one rank on each, of the same number."""

    def __init__(self, run_dir: Path, count: int) -> None:
        self.run, self.run_dir = uuid.uuid4().hex[:8], run_dir
        (run_dir / CHECKPOINTS_DIR).mkdir(parents=True)
        self.keepers = [
            Keeper(
                run=self.run,
                driver="d",
                node=f"n{number}",
                run_dir=str(run_dir),
                coordinator="c",
                takeover_seconds=0.1,
                read_back=ReadBack(),
                exchange=EXCHANGE,
            )
            for number in range(count)
        ]
        self.ranks = [self.rank(number, number) for number in range(count)]
        self.closed: set[int] = set()
        for rank in self.ranks:
            rank.give_slots(3)

    def rank(self, rank: int, node: int, generation: int = 1) -> RankEnd:
        return RankEnd(keeper_address(self.run, "d", f"n{node}"), rank=rank, generation=generation)

    def link(self, node: int) -> Any:
        return self.keepers[node]._link

    def snapshot(self, step: int) -> None:
        """On all ranks; each holds another value."""
        for number, rank in enumerate(self.ranks):
            rank.snapshot(step, value=step + number / 8)
            self.link(number).wait_for(Snapshotted)

    def copy(self, node: int, to: int, step: int, *, keep: tuple[int, int] = (0, 0)) -> ShardCopied:
        self.link(node).command(self.copy_order(node, to, step, keep))
        copied: ShardCopied = self.link(node).wait_for(ShardCopied)
        return copied

    def copy_order(self, node: int, to: int, step: int, keep: tuple[int, int] = (0, 0)) -> CopyOrder:
        joined = self.keepers[to]._introduce()
        return CopyOrder(
            ranks=(node,),
            generation=1,
            step=step,
            host=joined.host,
            port=joined.port,
            keep_generation=keep[0],
            keep_step=keep[1],
        )

    def copies(self, node: int) -> list[tuple[int, int]]:
        return [(one.rank, one.step) for one in self.keepers[node]._introduce().copies]

    def places(self, *nodes: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """As if the shard of rank 0 were on the first of `nodes`, and so on."""
        addresses = [self.keepers[node]._exchange.address for node in nodes]
        return tuple((host, port, (rank,)) for rank, (host, port) in enumerate(addresses))

    def fetch(self, rank: RankEnd, step: int, *nodes: int) -> HeldShards:
        order = RestoreOrder(
            source="memory", generation=1, step=step, checkpoint=None, places=self.places(*nodes) if nodes else ()
        )
        return fetch(rank.channel, rank.rank, order, len(self.ranks), mapped=rank.slots, alive=lambda: None)

    def lose(self, node: int) -> None:
        self.closed.add(node)
        self.ranks[node].close()
        self.keepers[node].close()

    def close(self) -> None:
        for number in range(len(self.keepers)):
            if number not in self.closed:
                self.lose(number)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr("workers.keeper.Link", FakeLink)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nodes = Nodes(tmp_path / "run", 3)
    yield nodes
    nodes.close()


def values(nodes: Nodes, shards: HeldShards, rank: int, of: int) -> float:
    """What the reader of `rank` finds in the tensor of rank `of`; the bytes are compared with their digests."""
    manifest = shards.manifest(len(nodes.ranks))
    tensors = {tensor.name: tensor for tensor in manifest.shards[of].tensors}
    reader = CheckpointReader(LocalStore(nodes.run_dir), manifest.name, of, manifest=manifest, shards=shards)
    (name,) = tensors
    found = reader.fetch(name, offsets=(0,), shape=(8,))
    return float(found[0])


def test_where_shards_lie_travels_to_the_rank(tmp_path: Path) -> None:
    places = (("10.0.0.1", 4711, (0, 2)), ("10.0.0.2", 4712, (1,)))
    restore = RestoreOrder(source="memory", generation=1, step=10, checkpoint=None, places=places)
    orders = make_orders(tmp_path, restore=restore, replicate_snapshots=True)
    assert RankOrders.from_json(json.loads(json.dumps(orders.to_json()))) == orders


def test_a_copy_is_sent_on_order_and_told_of_by_both_keepers(nodes: Nodes) -> None:
    nodes.snapshot(10)
    copied = nodes.copy(0, 1, 10)
    assert (copied.rank, copied.generation, copied.step, copied.error) == (0, 1, 10, None)
    assert copied.bytes > 0
    assert nodes.copies(1) == [(0, 10)]
    nodes.link(1).command(EndGeneration(generation=1))
    drained = nodes.link(1).wait_for(GenerationDrained)
    assert [(one.rank, one.step) for one in drained.held] == [(1, 10), (0, 10)]
    assert drained.held[1].digest == nodes.keepers[0]._introduce().snapshots[0].digest


def test_a_keeper_that_is_gone_is_told_of_as_one_that_has_no_copy(nodes: Nodes) -> None:
    nodes.snapshot(10)
    order = nodes.copy_order(0, 1, 10)
    nodes.lose(1)
    nodes.link(0).command(order)
    assert nodes.link(0).wait_for(ShardCopied).error


def test_older_copies_go_when_they_are_not_needed_any_more(nodes: Nodes) -> None:
    for step, keep in ((10, (0, 0)), (12, (1, 10))):
        nodes.snapshot(step)
        assert nodes.copy(0, 1, step, keep=keep).error is None
    assert nodes.copies(1) == [(0, 10), (0, 12)]
    nodes.link(1).command(DropCopies(generation=1, step=12))
    assert nodes.copies(1) == [(0, 12)]


def test_a_rank_restores_on_another_node_from_its_own_keeper_and_from_copies(nodes: Nodes) -> None:
    nodes.snapshot(10)
    nodes.copy(0, 1, 10)
    nodes.lose(0)
    moved = nodes.rank(0, 2, generation=2)
    shards = nodes.fetch(moved, 10, 1, 1, 2)  # rank 0's is a copy on node 1
    assert [values(nodes, shards, 0, of) for of in range(3)] == [10.0, 10.125, 10.25]
    shards.close()
    beside_the_copy = nodes.rank(0, 1, generation=2)
    shards = nodes.fetch(beside_the_copy, 10, 1, 1, 2)
    assert [values(nodes, shards, 0, of) for of in range(3)] == [10.0, 10.125, 10.25]
    shards.close()
    moved.close()
    beside_the_copy.close()


def test_a_large_shard_is_brought_in_blocks(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.checkpoint.held.BRING_BYTES_MAX", 1000)
    nodes.snapshot(10)
    moved = nodes.rank(0, 2, generation=2)
    shards = nodes.fetch(moved, 10, 0, 1, 2)
    record = shards.manifest(3).shards[0]
    slot = next(slot for slot in nodes.ranks[0].slots if slot.step == 10)
    assert b"".join(shards.blocks(record, 0, record.bytes)) == bytes(slot.image[: record.bytes])
    assert record.bytes > 4000
    assert values(nodes, shards, 0, 0) == 10.0
    shards.close()
    moved.close()


def test_a_shard_that_cannot_be_had_is_an_error_and_no_other_shard_takes_its_place(nodes: Nodes) -> None:
    nodes.snapshot(10)
    rank = nodes.rank(0, 0, generation=2)
    with pytest.raises(CheckpointDamaged, match="not here"):
        nodes.fetch(rank, 10, 0, 2, 2)  # rank 1's is not on node 2
    places = nodes.places(0, 1, 2)
    nodes.lose(1)
    order = RestoreOrder(source="memory", generation=1, step=10, checkpoint=None, places=places)
    with pytest.raises(CheckpointDamaged, match="ConnectionRefused"):
        fetch(rank.channel, 0, order, 3, mapped=rank.slots, alive=lambda: None)
    rank.close()


def test_a_keeper_that_dies_while_a_rank_reads_is_an_error(nodes: Nodes) -> None:
    nodes.snapshot(10)
    rank = nodes.rank(0, 0, generation=2)
    shards = nodes.fetch(rank, 10, 0, 1, 2)
    nodes.lose(1)
    with pytest.raises(CheckpointDamaged, match="cannot be brought"):
        values(nodes, shards, 0, 1)
    assert values(nodes, shards, 0, 2) == 10.25
    shards.close()
    rank.close()


def test_a_copy_whose_bytes_have_changed_is_not_restored(nodes: Nodes) -> None:
    nodes.snapshot(10)
    nodes.copy(0, 1, 10)
    slot = nodes.keepers[1]._exchange.copies.open(nodes.keepers[1]._exchange.copies.held()[0])
    assert slot is not None
    slot.image[slot.image_bytes - 1] ^= 1
    slot.close()
    rank = nodes.rank(0, 2, generation=2)
    with pytest.raises(CheckpointDamaged, match="changed in memory"):
        nodes.fetch(rank, 10, 1, 1, 2)
    rank.close()
    beside_it = nodes.rank(0, 1, generation=2)
    shards = nodes.fetch(beside_it, 10, 1, 1, 2)
    with pytest.raises(CheckpointDamaged, match="other bytes than were saved"):
        values(nodes, shards, 0, 0)
    shards.close()
    beside_it.close()


def test_a_lost_nodes_shard_is_written_from_its_copy(nodes: Nodes) -> None:
    nodes.snapshot(10)
    nodes.copy(0, 1, 10)
    nodes.lose(0)
    nodes.link(1).command(
        PersistOrder(rank=0, world_size=3, generation=1, step=10, attempt=1, checkpoint=checkpoint_name(10, 1, 1))
    )
    receipt = nodes.link(1).wait_for(ShardPersisted)
    assert (receipt.rank, receipt.step) == (0, 10)
    assert receipt.shard.file == "rank-00000-of-00003.safetensors"
    assert nodes.copies(1) == [(0, 10)]
    slot = nodes.keepers[1]._exchange.copies.open(nodes.keepers[1]._exchange.copies.held()[0])
    assert slot is not None
    assert slot.state is SlotState.COMPLETE
    slot.close()


def test_spare_memory_is_used_again_only_for_a_snapshot_that_has_no_other(nodes: Nodes) -> None:
    for step in (10, 12):
        nodes.snapshot(step)
    link, rank = nodes.link(0), nodes.ranks[0]
    link.command(ReleaseOrder(generation=1, upto_step=12, keep=(12,), spare=(10,)))
    third = rank.snapshot(14)
    link.wait_for(Snapshotted)
    states = {slot.step: slot.state for slot in rank.slots}
    assert states == {10: SlotState.COMPLETE, 12: SlotState.COMPLETE, 14: SlotState.COMPLETE}
    rank.channel.send("make_room")
    answer = rank.channel.receive(DEADLINE_SECONDS)
    assert answer is not None
    assert answer[0]["made"]
    assert sorted(slot.step for slot in rank.slots if slot.state is SlotState.COMPLETE) == [12, 14]
    rank.channel.send("make_room")
    answer = rank.channel.receive(DEADLINE_SECONDS)
    assert answer is not None
    assert not answer[0]["made"]
    assert [one.step for one in nodes.keepers[0]._introduce().snapshots] == [12, 14]
    assert third.state is SlotState.COMPLETE


def test_a_rank_takes_spare_memory_for_a_save_and_not_for_what_only_stays_in_memory(nodes: Nodes) -> None:
    fd = HeartbeatPage.create_fd()
    orders = make_orders(
        nodes.run_dir,
        rank=1,
        world_size=3,
        replicate_snapshots=True,
        keeper_address=keeper_address(nodes.run, "d", "n0"),
    )
    writer, link = SnapshotWriter(orders, HeartbeatPage(fd), torch.device("cpu")), nodes.link(0)

    def take(step: int, *, durable: bool) -> bool:
        named = NamedTensor(name="w", tensor=torch.full((8,), float(step)), global_shape=(8,), offsets=(0,))
        document = {"identity": {}, "progress": {}, "replicas": {}}
        taken = writer.take(
            lambda: CapturedState(tensors=[named], document=document), step=step, durable=durable, wait_seconds=0.0
        )
        if taken:
            link.wait_for(Snapshotted)
        return taken

    writer._connect_and_adopt()
    assert take(10, durable=True)
    assert take(12, durable=True)
    assert not take(14, durable=True)
    link.command(ReleaseOrder(generation=1, upto_step=12, keep=(12,), spare=(10,)))
    assert not take(16, durable=False)
    assert take(18, durable=True)
    assert [(one.rank, one.step) for one in nodes.keepers[0]._introduce().snapshots if one.rank == 1] == [
        (1, 12),
        (1, 18),
    ]


def test_spare_memory_is_free_once_it_is_not_spare_any_more(nodes: Nodes) -> None:
    for step in (10, 12):
        nodes.snapshot(step)
    nodes.link(0).command(ReleaseOrder(generation=1, upto_step=12, keep=(12,), spare=(10,)))
    assert [slot.step for slot in nodes.ranks[0].slots if slot.state is SlotState.FREE] == [0]
    nodes.link(0).command(ReleaseOrder(generation=1, upto_step=12, keep=(12,)))
    assert len([slot for slot in nodes.ranks[0].slots if slot.state is SlotState.FREE]) == 2


def test_the_memory_of_a_rank_that_has_moved_is_given_back(nodes: Nodes) -> None:
    nodes.snapshot(10)
    nodes.ranks[0].close()
    memory = nodes.keepers[0]._ranks[0]
    nodes.link(0).command(ReleaseOrder(generation=1, upto_step=99, keep=(10,)))
    assert len(memory.slots) == 3
    nodes.link(0).command(ReleaseOrder(generation=2, upto_step=4, keep=(4,)))
    assert [slot.step for slot in memory.slots] == [10]
    nodes.link(0).command(ReleaseOrder(generation=1, upto_step=99, keep=()))
    nodes.link(0).command(ReleaseOrder(generation=2, upto_step=6, keep=(6,)))
    assert memory.slots == []
    nodes.ranks[0] = nodes.rank(0, 0, generation=3)
    assert nodes.ranks[0].slots == []


def test_when_a_generation_ends_its_copies_stop_coming_and_those_that_are_there_stay(nodes: Nodes) -> None:
    nodes.snapshot(10)
    nodes.copy(0, 1, 10)
    nodes.snapshot(12)
    nodes.link(1).command(EndGeneration(generation=1))
    nodes.link(1).wait_for(GenerationDrained)
    assert "not wanted" in str(nodes.copy(0, 1, 12).error)
    assert nodes.copies(1) == [(0, 10)]
