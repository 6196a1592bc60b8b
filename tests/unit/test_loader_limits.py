"""The resumable loader: the life of its workers, its first batch, its errors, and what it refuses."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from loading import Augmented, FailsOnce, loader_of, moved, same_bits, take
from torch.utils.data import IterableDataset

from workers.data.loader import ShardedLoader
from workers.errors import CallerError

# Three workers are more than a small machine has cores, which torch remarks on each time.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


class Pids(Augmented):
    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return os.getpid()


class DeathSignals(Augmented):
    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        number = ctypes.c_int(0)
        pr_get_pdeathsig = 2
        ctypes.CDLL(None).prctl(pr_get_pdeathsig, ctypes.byref(number), 0, 0, 0)
        return number.value


@pytest.fixture
def closing() -> Iterator[list[ShardedLoader]]:
    """Closes the loaders that a test puts in, also when it fails."""
    loaders: list[ShardedLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


# ---------------------------------------------------------------- before the first batch


@pytest.mark.parametrize("workers", [0, 2])
def test_before_first_batch_is_called_once_for_each_restore_before_anything_moves(
    workers: int, closing: list[ShardedLoader]
) -> None:
    loader, seen = loader_of(num_workers=workers), []
    closing.append(loader)
    loader.before_first_batch = lambda: seen.append((loader.next_sample_ids(), loader.samples_consumed))
    state, announced = moved(loader), loader.next_sample_ids()
    take(loader, 2)
    take(loader, 1)
    assert seen == [(announced, 0)]
    loader.load_state_dict(state)
    assert len(seen) == 1
    take(loader, 1)
    assert seen == [(announced, 0)] * 2


def test_no_batch_is_handed_over_while_before_first_batch_refuses() -> None:
    loader = loader_of()

    def refuse() -> None:
        raise RuntimeError("another state")

    loader.before_first_batch = refuse
    for _ in range(2):
        with pytest.raises(RuntimeError, match="another state"):
            take(loader, 1)
    assert loader.samples_consumed == 0 and loader.take_consumed() == []
    loader.before_first_batch = None
    assert same_bits(take(loader, 1), take(loader_of(), 1))


# ---------------------------------------------------------------- loader workers


def test_loader_workers_live_through_epochs_and_end_with_close() -> None:
    loader = loader_of(Pids(), num_workers=2, endless=False)
    pids = [pid for _ in range(3) for batch in loader for pid in batch.tolist()]
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert all(psutil.pid_exists(pid) for pid in pids)
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    loader.close()


def test_a_closed_loader_continues_with_new_workers(closing: list[ShardedLoader]) -> None:
    loader = loader_of(num_workers=1)
    closing.append(loader)
    batches = take(loader, 3)
    loader.close()
    assert same_bits(batches + take(loader, 3), take(loader_of(), 6))


def test_a_restore_leaves_none_of_the_old_workers() -> None:
    loader = loader_of(Pids(), num_workers=2)
    pids = {pid for batch in take(loader, 4) for pid in batch.tolist()}
    loader.load_state_dict(moved(loader))
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


def test_loader_workers_die_with_the_rank(closing: list[ShardedLoader]) -> None:
    loader = loader_of(DeathSignals(), num_workers=2)
    closing.append(loader)
    assert {number for batch in take(loader, 4) for number in batch.tolist()} == {9}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_the_dataset_moves_nothing_and_the_same_batch_can_be_tried_again(
    workers: int, tmp_path: Any, closing: list[ShardedLoader]
) -> None:
    loader, batches = loader_of(FailsOnce(tmp_path / "failed"), num_workers=workers), []
    closing.append(loader)
    with pytest.raises(ValueError, match="sample 5 cannot be read"):
        for batch in loader:
            batches.append(batch)
    assert len(batches) < 6
    assert len(loader.take_consumed()) == 4 * len(batches) == loader.samples_consumed
    batches += take(loader, 10 - len(batches))
    assert same_bits(batches, take(loader_of(), 10))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [("samples", 24), ("global_batch_size", 8), ("seed", 9), ("last_batch", "short"), ("shuffle", False)],
)
def test_a_position_in_another_order_is_refused_and_changes_nothing(field: str, value: Any) -> None:
    loader = loader_of()
    take(loader, 1)
    before = loader.state_dict()
    with pytest.raises(CallerError, match=rf"{field} was {value!r}, is {before[field]!r}"):
        loader.load_state_dict({**before, "batch": 3, field: value})
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 6}, "batch=6"),
        ({"batch": -1}, "batch=-1"),
        ({"batch": 1.0}, "batch=1.0"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": None}, "epoch=None"),
        ({"samples_consumed": 5}, "samples_consumed=5"),
        ({"epoch": 1}, "samples_consumed=4"),
    ],
)
def test_a_position_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    loader = loader_of()
    take(loader, 1)
    with pytest.raises(CallerError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


@pytest.mark.parametrize("field", sorted(loader_of().state_dict()))
def test_a_position_that_lacks_a_field_is_refused_by_its_name(field: str) -> None:
    state = loader_of().state_dict()
    del state[field]
    with pytest.raises(CallerError, match=f"lacks {field}"):
        loader_of().load_state_dict(state)


def test_another_revision_is_left_to_the_identity() -> None:
    first, second = loader_of(revision="2024"), loader_of(revision="2025")
    take(first, 2)
    second.load_state_dict(moved(first))
    assert second.samples_consumed == 8
    assert first.identity() != second.identity()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("dataset", [Stream(), {1, 2, 3}, iter([1, 2])], ids=["IterableDataset", "set", "iterator"])
def test_a_dataset_without_access_by_index_is_refused_with_the_alternative(dataset: Any) -> None:
    with pytest.raises(CallerError, match=rf"{type(dataset).__name__} .*StatefulDataLoader"):
        loader_of(dataset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 with num_workers=0"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor=0"),
        ({"world_size": 3}, "global_batch_size=4 .* 3 ranks"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallerError, match=message):
        loader_of(**options)


def test_torchdata_stateful_loader_resumes_through_what_tracking_uses() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def stateful() -> Any:
        return torchdata.StatefulDataLoader(list(range(12)), batch_size=3)

    loader, expected = stateful(), list(stateful())
    rest = iter(loader)
    first = next(rest)
    resumed = stateful()
    resumed.load_state_dict(loader.state_dict())
    assert same_bits([first, *resumed], expected)
