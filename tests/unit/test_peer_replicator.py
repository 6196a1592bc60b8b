"""Copies are sent beside everything else: the newest first, never queued up, as fast as is allowed."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_samples import DEADLINE_SECONDS, HOST, SECRET, Keeper, content, key, shard, wait_for

from workers.checkpoint.slots import Slot
from workers.replication.pace import Pace
from workers.replication.protocol import BLOCK_BYTES, ShardKey
from workers.replication.replicator import Copied, Replicator
from workers.replication.transfer import Peer


class Sender:
    """A keeper that sends. Each transfer waits before its first block until the test lets it go on."""

    def __init__(self, *, gated: bool = False) -> None:
        self.slots: dict[ShardKey, Slot] = {}
        self.reports: list[Copied] = []
        self.began: list[ShardKey] = []
        self.gate = threading.Semaphore(0)
        self.gated = gated
        sender = self

        class Gate(Pace):
            def delay_seconds(self, size: int) -> float:
                if sender.gated:
                    assert sender.gate.acquire(timeout=DEADLINE_SECONDS)
                return 0.0

        self.replicator = Replicator(find=self._find, pace=Gate(None), report=self.reports.append)

    def _find(self, of: ShardKey) -> Slot | None:
        self.began.append(of)
        return Slot.from_fd(os.dup(self.slots[of].fd)) if of in self.slots else None

    def snapshot(self, of: ShardKey, image_bytes: int = 10_000) -> None:
        self.slots[of] = shard(of, image_bytes)

    def reported(self, count: int) -> list[Copied]:
        wait_for(lambda: len(self.reports) >= count)
        return self.reports

    def close(self) -> None:
        self.gated = False
        self.gate.release(100)
        self.replicator.close()
        for slot in self.slots.values():
            slot.close()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


def test_a_newer_snapshot_replaces_the_one_that_waits_and_none_queues_up(keeper: Keeper, sender: Sender) -> None:
    sender.gated = True
    for step in range(10, 22, 2):
        sender.snapshot(key(step))
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    wait_for(lambda: sender.began == [key(10)])
    for step in range(12, 22, 2):
        sender.replicator.send(key(step), keeper.peer(), keep=(0, 0))
    sender.gate.release(2)
    reports = sender.reported(2)
    assert [(report.key, report.error) for report in reports] == [(key(10), None), (key(20), None)]
    assert keeper.bytes_of(key(20)) == content(key(20), 10_000)


def test_all_ranks_get_their_turn(keeper: Keeper, sender: Sender) -> None:
    keys = [key(10, rank=rank) for rank in range(4)]
    for one in keys:
        sender.snapshot(one)
        sender.replicator.send(one, keeper.peer(), keep=(0, 0))
    assert [report.key for report in sender.reported(4)] == keys
    assert keeper.copies.held() == keys


def test_a_rank_whose_turn_comes_does_not_lose_it_to_newer_snapshots(keeper: Keeper, sender: Sender) -> None:
    sender.gated = True
    for rank in (0, 1):
        for step in (10, 12):
            sender.snapshot(key(step, rank=rank))
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    wait_for(lambda: sender.began == [key(10)])
    for one in (key(10, rank=1), key(12), key(12, rank=1)):
        sender.replicator.send(one, keeper.peer(), keep=(0, 0))
    sender.gate.release(3)
    assert [report.key for report in sender.reported(3)] == [key(10), key(12, rank=1), key(12)]


def test_a_dead_peer_is_reported_and_the_next_copy_goes_elsewhere(keeper: Keeper, sender: Sender) -> None:
    gone = Keeper()
    peer = gone.peer()
    gone.close()
    sender.snapshot(key(10))
    sender.replicator.send(key(10), peer, keep=(0, 0))
    assert "refused" in str(sender.reported(1)[0].error)
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    assert sender.reported(2)[1].error is None


def test_a_snapshot_that_is_gone_is_reported_as_not_copied(keeper: Keeper, sender: Sender) -> None:
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    assert "not there" in str(sender.reported(1)[0].error)


def test_when_its_generation_ends_nothing_of_it_is_sent_any_more(keeper: Keeper, sender: Sender) -> None:
    sender.gated = True
    sender.snapshot(key(10), 3 * BLOCK_BYTES)
    sender.snapshot(key(10, rank=1))
    sender.snapshot(key(3, generation=2))
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    wait_for(lambda: sender.began == [key(10)])
    sender.replicator.send(key(10, rank=1), keeper.peer(), keep=(0, 0))
    sender.replicator.end_generation(1)
    sender.replicator.send(key(3, generation=2), keeper.peer(), keep=(0, 0))
    sender.gate.release(100)
    reports = sender.reported(2)
    assert [report.key for report in reports] == [key(10), key(3, generation=2)]
    assert "cancelled" in str(reports[0].error)
    assert keeper.copies.held() == [key(3, generation=2)]


def test_closing_does_not_wait_for_a_transfer_that_is_held_up(keeper: Keeper) -> None:
    sender = Sender()
    sender.snapshot(key(10))
    silent = threading.Event()

    class Slow(Pace):
        def delay_seconds(self, size: int) -> float:
            silent.set()
            return 3600.0

    sender.replicator._pace = Slow(None)
    sender.replicator.send(key(10), keeper.peer(), keep=(0, 0))
    assert silent.wait(DEADLINE_SECONDS)
    sender.close()
    assert "cancelled" in str(sender.reports[0].error)


def test_a_peer_that_cannot_be_reached_says_so_without_its_secret() -> None:
    assert SECRET.decode() not in repr(Peer(host=HOST, port=1, secret=SECRET))


# ---------------------------------------------------------------- the cap


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.integers(1, 10**9),
    blocks=st.lists(st.tuples(st.integers(1, BLOCK_BYTES), st.floats(0, 10)), min_size=1, max_size=40),
)
def test_no_span_of_time_sees_more_than_the_cap_allows(rate: int, blocks: list[tuple[int, float]]) -> None:
    clock = Clock()
    pace = Pace(rate, clock=clock)
    sent: list[tuple[float, int]] = []
    for size, idle_seconds in blocks:
        clock.now += idle_seconds
        clock.now += pace.delay_seconds(size)
        sent.append((clock.now, size))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            seconds = sent[last][0] - sent[first][0]
            # The last block has begun to go, and a tenth of a second's worth may have been saved up.
            before_last = sum(size for _, size in sent[first:last])
            assert before_last <= rate * (seconds + 0.1) * (1 + 1e-9) + 1


def test_a_capped_transfer_takes_the_time_that_its_bytes_take_at_the_cap() -> None:
    clock = Clock()
    pace = Pace(1e6, clock=clock)
    for _ in range(100):
        clock.now += pace.delay_seconds(100_000)
    assert clock.now - 1000.0 == pytest.approx(9.8, abs=0.11)


def test_without_a_cap_nothing_waits() -> None:
    pace: Any = Pace(None, clock=Clock())
    assert {pace.delay_seconds(1 << 40) for _ in range(5)} == {0.0}
