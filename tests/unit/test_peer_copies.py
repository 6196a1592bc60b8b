"""The memory for shards of other nodes: how much of it there is, and what stays."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from peer_samples import content, key

from workers.replication.copies import Arriving, Copies
from workers.replication.protocol import PeerRefused, ShardKey


def arrive(copies: Copies, of: ShardKey) -> Arriving | None:
    arriving = copies.begin(of, 100, "5a" * 16)
    if arriving is not None:
        arriving.slot.image[:100] = content(of, 100)
    return arriving


def add(copies: Copies, of: ShardKey) -> None:
    arriving = arrive(copies, of)
    assert arriving is not None
    copies.complete(arriving, "5a" * 16)


@pytest.fixture
def copies() -> Copies:
    return Copies(lambda: 1 << 30)


def test_the_kept_copy_stays_while_newer_ones_come_and_goes_when_a_newer_set_is_kept(copies: Copies) -> None:
    add(copies, key(10))
    copies.keep((1, 10))
    add(copies, key(12))
    add(copies, key(14))
    assert copies.held() == [key(10), key(14)]
    copies.keep((1, 14))
    assert copies.held() == [key(14)]
    copies.keep((1, 10))  # a word that comes late
    assert copies.held() == [key(14)]
    copies.close()


def test_memory_is_used_again(copies: Copies) -> None:
    add(copies, key(10))
    first = copies.open(key(10))
    assert first is not None
    add(copies, key(12))
    second = copies.open(key(12))
    assert second is not None
    assert second.memory_id == first.memory_id
    first.close()
    second.close()
    copies.close()


def test_a_shard_that_was_taken_once_more_replaces_the_one_before_also_in_the_set_that_is_kept(copies: Copies) -> None:
    add(copies, key(10))
    copies.keep((1, 10))
    assert arrive(copies, key(10)) is None
    again = copies.begin(key(10), 100, "77" * 16)
    assert again is not None
    copies.complete(again, "77" * 16)
    slot = copies.open(key(10))
    assert slot is not None
    assert slot.digest == "77" * 16
    slot.close()
    copies.close()


def test_memory_that_is_being_written_to_storage_is_not_used_again(copies: Copies) -> None:
    add(copies, key(10))
    first = copies.open(key(10))
    assert first is not None
    first.hold()
    add(copies, key(12))
    assert bytes(first.image[:100]) == content(key(10), 100)
    first.close()
    copies.close()


def test_what_is_open_stays_readable_when_it_is_dropped(copies: Copies) -> None:
    add(copies, key(10))
    slot = copies.open(key(10))
    assert slot is not None
    copies.keep((1, 12))
    assert copies.held() == []
    assert bytes(slot.image[:100]) == content(key(10), 100)
    slot.close()


def test_a_shard_does_not_come_back_from_a_generation_that_has_ended(copies: Copies) -> None:
    on_its_way = arrive(copies, key(10))
    assert on_its_way is not None
    copies.end_generation(1)
    assert on_its_way.cancelled.is_set()
    with pytest.raises(PeerRefused):
        copies.complete(on_its_way, "5a" * 16)
    with pytest.raises(PeerRefused, match="not wanted"):
        arrive(copies, key(12))
    add(copies, key(3, generation=2))
    assert copies.held() == [key(3, generation=2)]
    copies.close()


def test_a_newer_shard_ends_the_older_one_that_is_still_on_its_way(copies: Copies) -> None:
    older = arrive(copies, key(10))
    newer = arrive(copies, key(12))
    assert older is not None
    assert newer is not None
    assert older.cancelled.is_set()
    assert not newer.cancelled.is_set()
    with pytest.raises(PeerRefused, match="on its way"):
        arrive(copies, key(12))
    with pytest.raises(PeerRefused, match="on its way"):
        arrive(copies, key(11))
    copies.discard(older)
    copies.complete(newer, "5a" * 16)
    assert copies.held() == [key(12)]
    copies.close()


class CopiesOverTime(RuleBasedStateMachine):
    """Shards of two ranks come, in any order and with any interruptions."""

    @initialize()
    def start(self) -> None:
        self.copies = Copies(lambda: 1 << 30)
        self.on_their_way: list[Arriving] = []
        self.kept = (0, 0)
        self.promised: set[ShardKey] = set()  # complete and of the kept set

    @rule(step=st.integers(1, 8), rank=st.integers(0, 1), generation=st.integers(1, 2))
    def begin(self, step: int, rank: int, generation: int) -> None:
        try:
            arriving = arrive(self.copies, key(step, rank=rank, generation=generation))
        except PeerRefused:
            return
        if arriving is not None:
            self.on_their_way.append(arriving)

    @rule(index=st.integers(0, 3), good=st.booleans())
    def end(self, index: int, good: bool) -> None:
        if index >= len(self.on_their_way):
            return
        arriving = self.on_their_way.pop(index)
        if good and not arriving.cancelled.is_set():
            self.copies.complete(arriving, "5a" * 16)
        self.copies.discard(arriving)

    @rule(step=st.integers(1, 8), generation=st.integers(1, 2))
    def keep(self, step: int, generation: int) -> None:
        self.copies.keep((generation, step))
        self.kept = max(self.kept, (generation, step))

    @rule(generation=st.integers(1, 2))
    def end_generation(self, generation: int) -> None:
        self.copies.end_generation(generation)

    @invariant()
    def there_are_at_most_two_a_rank_and_what_is_kept_stays(self) -> None:
        if not hasattr(self, "copies"):
            return
        held = self.copies.held()
        not_cancelled = [one.key for one in self.on_their_way if not one.cancelled.is_set()]
        for rank in (0, 1):
            ours = [one for one in [*held, *not_cancelled] if one.rank == rank]
            assert len(ours) <= 2 + sum(one.set == self.kept for one in not_cancelled), ours
        self.promised = {one for one in self.promised if one.set == self.kept}
        assert self.promised <= set(held)
        self.promised |= {one for one in held if one.set == self.kept}
        for one in held:
            slot = self.copies.open(one)
            assert slot is not None
            assert bytes(slot.image[:100]) == content(one, 100)
            slot.close()

    def teardown(self) -> None:
        if hasattr(self, "copies"):
            for arriving in self.on_their_way:
                self.copies.discard(arriving)
            self.copies.close()


CopiesOverTime.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCopiesOverTime = CopiesOverTime.TestCase


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(deadline=None, max_examples=20)
def test_begin_and_keep_from_several_threads_leave_no_slot_behind(steps: list[int]) -> None:
    copies = Copies(lambda: 1 << 30)

    def send(step: int) -> None:
        try:
            arriving = arrive(copies, key(step))
            if arriving is not None:
                copies.complete(arriving, "5a" * 16)
        except PeerRefused:
            pass

    threads = [threading.Thread(target=send, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies.held()) <= 1
    copies.close()
