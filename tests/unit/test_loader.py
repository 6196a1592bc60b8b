"""The resumable loader: the same bits after any restore, for any number of loader workers."""

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Augmented, FailsOnce, ids, loader_of, mask_some, moved, same_bits, take

from workers.data.loader import ShardedLoader

WORKERS = [0, 1, 2, 3]

# Three workers are more than a small machine has cores, which torch remarks on each time.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


@pytest.fixture
def closing() -> Iterator[list[ShardedLoader]]:
    """Closes the loaders that a test puts in, also when it fails."""
    loaders: list[ShardedLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


# ---------------------------------------------------------------- exact after a restore


@pytest.mark.parametrize("last_batch", ["drop", "short"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_restored_with_other_workers_continues_bit_for_bit(
    workers: int, last_batch: str, closing: list[ShardedLoader]
) -> None:
    uninterrupted = take(loader_of(last_batch=last_batch), 20)
    first = loader_of(last_batch=last_batch, num_workers=(workers + 1) % 4)
    second = loader_of(last_batch=last_batch, num_workers=workers)
    closing += [first, second]
    batches = take(first, 8)
    second.load_state_dict(moved(first))
    assert same_bits(batches + take(second, 12), uninterrupted)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 7), max_size=5),
    world_size=st.integers(1, 2),
    last_batch=st.sampled_from(["drop", "short"]),
    shuffle=st.booleans(),
)
def test_any_number_of_restores_anywhere_changes_nothing(
    cuts: list[int], world_size: int, last_batch: str, shuffle: bool
) -> None:
    # A cut of 0 batches restores twice in a row; five batches are an epoch, so cuts fall on its end as well.
    options = {"world_size": world_size, "last_batch": last_batch, "shuffle": shuffle, "dataset": Augmented(22)}
    for rank in range(world_size):
        loader = loader_of(rank=rank, **options)
        batches, consumed = [], []
        for cut in cuts:
            batches += take(loader, cut)
            consumed += loader.take_consumed()
            state = moved(loader)
            loader = loader_of(rank=rank, **options)
            loader.load_state_dict(state)
            assert moved(loader) == state
        batches += take(loader, 3)
        consumed += loader.take_consumed()
        reference = loader_of(rank=rank, **options)
        assert same_bits(batches, take(reference, sum(cuts) + 3))
        assert consumed == reference.take_consumed()
        assert moved(loader) == moved(reference)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_use_can_be_restored_again_and_again(workers: int, closing: list[ShardedLoader]) -> None:
    loader = loader_of(num_workers=workers)
    closing.append(loader)
    before = take(loader, 3)
    state = moved(loader)
    after = take(loader, 4)
    for _ in range(2):
        loader.load_state_dict(state)
        assert same_bits(take(loader, 4), after)
    loader.load_state_dict(loader_of().state_dict())
    assert same_bits(take(loader, 7), before + after)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_random_collator_is_exact_for_any_number_of_workers(workers: int, closing: list[ShardedLoader]) -> None:
    uninterrupted = take(loader_of(collate_fn=mask_some), 7)
    first, second = (loader_of(collate_fn=mask_some, num_workers=workers) for _ in range(2))
    closing += [first, second]
    batches = take(first, 2)
    second.load_state_dict(moved(first))
    assert same_bits(batches + take(second, 5), uninterrupted)


def test_augmentation_differs_between_samples_epochs_seeds_and_generators() -> None:
    rows = torch.cat(take(loader_of(last_batch="short"), 18))
    by_id = rows[rows[:, 0].argsort(stable=True)]
    assert len(by_id) == 69
    draws = by_id[:, 1:].flatten().tolist() + torch.cat(take(loader_of(seed=2), 5))[:, 1:].flatten().tolist()
    assert len(set(draws)) == len(draws)


def test_collators_of_two_ranks_draw_different_numbers() -> None:
    def draw(_: list[Any]) -> float:
        return random.random()

    assert len({next(iter(loader_of(rank=rank, world_size=2, collate_fn=draw))) for rank in range(2)}) == 2


def test_arithmetic_in_a_dataset_does_not_depend_on_the_threads_of_the_rank(closing: list[ShardedLoader]) -> None:
    # Big enough for torch to split the sum among threads, which changes its bits.
    class Means(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(3, 224, 224).sum()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inline, forked = loader_of(Means()), loader_of(Means(), num_workers=1)
        closing.append(forked)
        assert same_bits(take(inline, 5), take(forked, 5))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- the global generators


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_neither_drawn_from_nor_looked_at(workers: int, closing: list[ShardedLoader]) -> None:
    def generators() -> tuple[Any, ...]:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    runs = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = generators()
        loader = loader_of(num_workers=workers, collate_fn=mask_some)
        closing.append(loader)
        runs.append(take(loader, 7))
        loader.load_state_dict(moved(loader))
        take(loader, 1)
        assert generators() == before
    assert same_bits(*runs)


def test_global_generators_are_put_back_after_a_failure(tmp_path: Any) -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(ValueError, match="sample 5"):
        take(loader_of(FailsOnce(tmp_path / "failed")), 6)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_cuda_generators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(torch.initial_seed())
    assert len(seeded) == 1, "torch.manual_seed no longer seeds CUDA: this test has lost its point"
    take(loader_of(), 3)
    assert len(seeded) == 1


# ---------------------------------------------------------------- the position


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetched_batches_are_not_counted_as_consumed(workers: int, closing: list[ShardedLoader]) -> None:
    options = {"prefetch_factor": 4} if workers else {}
    loader = loader_of(num_workers=workers, **options)
    closing.append(loader)
    consumed = ids(take(loader, 2))
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], state["samples_consumed"]) == (0, 2, 8)
    assert loader.take_consumed() == [(0, sample) for sample in consumed]
    assert loader.take_consumed() == []
    announced = loader.next_sample_ids()
    assert ids(take(loader, 1)) == announced
    assert announced != consumed[4:]


def test_next_sample_ids_and_consumed_cross_the_end_of_an_epoch() -> None:
    loader = loader_of()
    take(loader, 4)
    loader.take_consumed()
    for epoch in (0, 1):
        announced = loader.next_sample_ids()
        take(loader, 1)
        assert loader.take_consumed() == [(epoch, sample) for sample in announced]
        assert loader.epoch == epoch


def test_a_break_in_the_loop_loses_no_batch() -> None:
    loader, batches = loader_of(), []
    for _ in range(4):
        for number, batch in enumerate(loader):
            batches.append(batch)
            if number == 2:
                break
    assert same_bits(batches, take(loader_of(), 12))


def test_without_endless_each_for_is_one_epoch() -> None:
    loader = loader_of(endless=False)
    epochs = []
    for number in range(3):
        assert loader.epoch == number
        epochs.append(list(loader))
    assert [len(batches) for batches in epochs] == [5, 5, 5]
    assert same_bits([batch for batches in epochs for batch in batches], take(loader_of(), 15))
    for number, batches in enumerate(epochs):
        assert sorted(ids(batches) + loader.dropped_ids(number)) == list(range(23))
    assert ids(epochs[0]) != ids(epochs[1])


@pytest.mark.parametrize("steps", range(1, 13))
def test_work_at_the_end_of_an_epoch_is_neither_lost_nor_repeated_by_a_restore(steps: int) -> None:
    """The usual two nested loops, with a scheduler that steps once an epoch, killed after a save at each step."""

    def train(state: dict[str, Any] | None, limit: int | None) -> tuple[dict[str, Any], list[str]]:
        loader, events = loader_of(endless=False), []
        if state is not None:
            loader.load_state_dict(state)
        for epoch in range(loader.epoch, 3):
            for _ in loader:
                events.append(f"step {loader.take_consumed()}")
                if len(events) - sum(event.startswith("end") for event in events) == limit:
                    return moved(loader), events
            events.append(f"end of epoch {epoch}")
        return moved(loader), events

    state, before = train(None, steps)
    _, after = train(state, None)
    assert before + after == train(None, None)[1]


def test_a_short_last_batch_is_handed_out_to_every_rank() -> None:
    parts = [list(loader_of(rank=rank, world_size=2, last_batch="short", endless=False)) for rank in range(2)]
    assert [len(batch) for batch in parts[0]] == [2, 2, 2, 2, 2, 1]
    assert [len(batch) for batch in parts[1]] == [2, 2, 2, 2, 2, 2]
    assert sorted(ids(parts[0]) + ids(parts[1])) == list(range(23))
    assert loader_of(last_batch="short").dropped_ids(0) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_partition_each_global_batch(world_size: int) -> None:
    whole = take(loader_of(Augmented(50), global_batch_size=12), 8)
    parts = [
        take(loader_of(Augmented(50), global_batch_size=12, rank=rank, world_size=world_size), 8)
        for rank in range(world_size)
    ]
    assert same_bits([torch.cat(batches) for batches in zip(*parts, strict=True)], whole)


def test_a_billion_samples_open_and_resume_mid_epoch_without_a_trace_of_the_others() -> None:
    fetched = []

    class Huge(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            fetched.append(index)
            return super().__getitem__(index)

    warm_up = loader_of()
    take(warm_up, 1)
    tracemalloc.start()
    try:
        loader = loader_of(Huge(10**9))
        middle = {"epoch": 3, "batch": 100_000_000, "samples_consumed": 3_400_000_000}
        loader.load_state_dict({**loader.state_dict(), **middle})
        announced = loader.next_sample_ids()
        batch = take(loader, 1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ids(batch) == announced == fetched
    assert peak_bytes < 1_000_000
