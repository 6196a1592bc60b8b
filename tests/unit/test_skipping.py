"""Batches that a run skips: any mix of skips, batches and restores, against a plain model of the order."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import Augmented, ids, loader_of, moved, same_bits, take

from workers.data.course import BatchId
from workers.data.loader import ShardedLoader
from workers.errors import CallerError

SAMPLES = 14  # batches of 4: three in an epoch, or four with a short one
BATCHES = st.tuples(st.integers(0, 3), st.integers(0, 2))
MOVES = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 5)),
    st.tuples(st.just("skip"), st.frozensets(BATCHES, max_size=4)),
    st.tuples(st.just("restore"), st.none()),
)


class Model:
    """All batches in their order, one after the other, but for the skipped ones."""

    def __init__(self, per_epoch: int) -> None:
        self.skipped: set[BatchId] = set()
        self.handed: list[BatchId] = []
        self._per_epoch = per_epoch

    @property
    def position(self) -> BatchId:
        return (self.handed[-1][0], self.handed[-1][1] + 1) if self.handed else (0, 0)

    def ahead(self) -> Iterator[BatchId]:
        for epoch in range(self.position[0], 100):
            for batch in range(self._per_epoch):
                if (epoch, batch) >= self.position and (epoch, batch) not in self.skipped:
                    yield epoch, batch

    def skip(self, batches: frozenset[BatchId]) -> None:
        self.skipped |= {batch for batch in batches if batch >= self.position}


@given(
    moves=st.lists(MOVES, max_size=8),
    world_size=st.integers(1, 2),
    last_batch=st.sampled_from(["drop", "short"]),
    shuffle=st.booleans(),
)
def test_any_mix_of_skips_batches_and_restores_hands_out_what_the_plain_model_does(
    moves: list[tuple[str, Any]], world_size: int, last_batch: str, shuffle: bool
) -> None:
    options = {"world_size": world_size, "last_batch": last_batch, "shuffle": shuffle}
    for rank in range(world_size):

        def fresh(rank: int = rank) -> ShardedLoader:
            return loader_of(Augmented(SAMPLES), rank=rank, **options)

        loader, model, taken = fresh(), Model(fresh().batches_per_epoch), 0
        for kind, what in [*moves, ("take", 3)]:
            if kind == "take":
                due = list(islice(model.ahead(), what))
                batches = take(loader, what)
                assert ids(batches) == [i for batch in due for i in loader.order.batch_ids(*batch)]
                model.handed += due
            elif kind == "skip":
                loader.skip_batches(what)
                model.skip(what)
            else:
                consumed = loader.take_consumed()
                assert consumed == [(e, i) for e, b in model.handed[taken:] for i in loader.order.batch_ids(e, b)]
                taken = len(model.handed)
                state = moved(loader)
                loader = fresh()
                loader.load_state_dict(state)
                assert moved(loader) == state
            assert loader.skipped == sorted(model.skipped)
            assert loader.next_sample_ids() == loader.order.batch_ids(*next(model.ahead()))
            assert loader.samples_consumed == sum(len(loader.order.global_batch_ids(*one)) for one in model.handed)
        assert loader.batches_in_use() == model.handed[taken:]


@given(skipped=st.frozensets(BATCHES, max_size=9), stop=st.integers(1, 14))
def test_with_one_for_an_epoch_each_hands_out_what_is_left_of_it_also_after_a_restore(
    skipped: frozenset[BatchId], stop: int
) -> None:
    def train(state: dict[str, Any] | None, limit: int | None) -> tuple[dict[str, Any] | None, list[str]]:
        loader, events = loader_of(Augmented(SAMPLES), endless=False), []
        if state is not None:
            loader.load_state_dict(state)
        loader.skip_batches(skipped)
        for epoch in range(loader.epoch, 4):
            for batch in loader:
                events.append(f"epoch {epoch}: {ids([batch])}")
                if len([one for one in events if ":" in one]) == limit:
                    return moved(loader), events
            events.append(f"end of epoch {epoch}")
        return None, events

    order = loader_of(Augmented(SAMPLES)).order
    expected = []
    for epoch in range(4):
        left = [batch for batch in range(3) if (epoch, batch) not in skipped]
        expected += [*(f"epoch {epoch}: {order.batch_ids(epoch, b)}" for b in left), f"end of epoch {epoch}"]
    state, events = train(None, stop)
    if state is not None:
        events += train(state, None)[1]
    assert events == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_changes_no_bit_of_the_other_batches_for_any_number_of_workers(workers: int) -> None:
    everything = take(loader_of(), 12)
    loader = loader_of(num_workers=workers)
    try:
        loader.skip_batches([(0, 1), (1, 4), (2, 0)])
        batches = take(loader, 3)
        loader.skip_batches([(1, 0)])  # prefetched by now
        batches += take(loader, 4)
    finally:
        loader.close()
    assert same_bits(batches, [everything[number] for number in (0, 2, 3, 4, 6, 7, 8)])


def test_a_batch_that_lies_behind_is_not_skipped_any_more() -> None:
    loader = loader_of()
    take(loader, 2)
    loader.skip_batches([(0, 1), (0, 2)])
    assert loader.skipped == [(0, 2)]
    assert loader.samples_consumed == 8


def test_a_loop_that_asks_for_no_new_batch_still_has_the_last_one_in_use() -> None:
    loader = loader_of()
    assert loader.batches_in_use() == []
    take(loader, 2)
    assert loader.batches_in_use() == [(0, 0), (0, 1)]
    loader.take_consumed()
    assert loader.batches_in_use() == [(0, 1)]


@pytest.mark.parametrize("batch", [(0, 5), (0, -1), (-1, 0)])
def test_a_skip_that_no_epoch_has_is_refused(batch: BatchId) -> None:
    with pytest.raises(CallerError, match=rf"the run skips batch {batch[1]} of epoch {batch[0]}.*global_batch_size=4"):
        loader_of().skip_batches([batch])


@pytest.mark.parametrize("skipped", [None, 3, [[0]], [[0, 9]], [[0, 1.0]], [["0", 1]], [[-1, 0]]])
def test_a_saved_position_with_impossible_skips_is_refused(skipped: Any) -> None:
    loader = loader_of()
    with pytest.raises(CallerError, match="skipped="):
        loader.load_state_dict({**loader.state_dict(), "skipped": skipped})
