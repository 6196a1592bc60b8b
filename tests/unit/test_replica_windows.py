"""Which part of the replicated state a save digests, and that the digests are of exactly those bytes."""

from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from workers.checkpoint.tensors import NamedTensor
from workers.state.pieces import Piece
from workers.state.replicas import Holders, Holdings, select, turn_of
from workers.state.tree import tensor_bytes

SIZES = st.lists(st.integers(0, 120), min_size=1, max_size=8).map(
    lambda found: [(f"tensor-{number:02d}", size) for number, size in enumerate(found)]
)
LIMITS = st.integers(3, 60).map(lambda eights: 8 * eights)
BOTH = (0, 1)


def windows_of(sizes: list[tuple[str, int]], limit: int) -> int:
    """How many saves it takes; a tensor begins at a multiple of 8."""
    total = 0
    for _, size in sizes:
        total = -(-total // 8) * 8 + size
    return max(1, -(-total // limit))


def held(**tensors: torch.Tensor) -> list[Piece]:
    return [
        Piece(NamedTensor(name=name, tensor=value, global_shape=tuple(value.shape), offsets=(0,) * value.ndim), BOTH)
        for name, value in tensors.items()
    ]


def describe(
    pieces: list[Piece], values: dict[str, tuple[Holders, Any]], *, turn: int, limit_bytes: int = 1 << 20
) -> dict[str, Any]:
    found = Holdings(pieces).digests(values, turn=turn, limit_bytes=limit_bytes)
    found.take(lambda name: True)
    return found.document()


def digests(pieces: list[Piece], turn: int = 0, limit: int = 1 << 20) -> dict[str, list[object]]:
    (found,) = describe(pieces, {}, turn=turn, limit_bytes=limit)["sets"]
    return dict(found["digests"])


@given(sizes=SIZES, limit=LIMITS, first=st.integers(0, 10**6))
def test_every_byte_is_covered_by_any_stretch_of_saves_one_longer_than_it_takes(
    sizes: list[tuple[str, int]], limit: int, first: int
) -> None:
    uncovered = {(name, at) for name, size in sizes for at in range(size)}
    for turn in range(first, first + windows_of(sizes, limit) + 1):
        for each in select(sizes, turn=turn, limit_bytes=limit):
            uncovered -= {(each.name, at) for at in range(each.start, each.stop)}
    assert not uncovered


@given(windows=st.integers(1, 40), first=st.integers(0, 1000), rhythm=st.integers(2, 8))
def test_saves_that_are_skipped_in_a_fixed_rhythm_leave_nothing_out_for_ever(
    windows: int, first: int, rhythm: int
) -> None:
    sizes = [("tensor", 8 * windows)]
    turns = range(first, first + rhythm * windows * 25, rhythm)
    seen = {each.start for turn in turns for each in select(sizes, turn=turn, limit_bytes=8)}
    assert seen == set(range(0, 8 * windows, 8))


@given(sizes=SIZES, limit=LIMITS, turn=st.integers(0, 2**64 - 1))
def test_a_save_digests_no_more_than_the_limit_and_cuts_no_element(
    sizes: list[tuple[str, int]], limit: int, turn: int
) -> None:
    chosen = select(sizes, turn=turn, limit_bytes=limit)
    assert sum(each.stop - each.start for each in chosen) <= limit
    for each in chosen:
        assert each.start % 8 == 0
        assert each.stop % 8 == 0 or each.stop == dict(sizes)[each.name]


def test_nothing_is_chosen_where_nothing_is_held_and_a_limit_that_cannot_work_is_refused() -> None:
    assert select([], turn=3) == []
    assert select([("empty", 0)], turn=3) == []
    for limit in (0, -8, 12):
        with pytest.raises(ValueError, match=f"limit_bytes is {limit}; it has to be a positive multiple of 8"):
            select([("tensor", 8)], turn=0, limit_bytes=limit)


def test_turns_count_periodic_saves_and_are_drawn_from_the_step_where_there_are_none() -> None:
    assert [turn_of(step, 100) for step in (0, 99, 100, 250, 300)] == [0, 0, 1, 2, 3]
    sizes = [("tensor", 80)]
    drawn = [select(sizes, turn=turn_of(step, None), limit_bytes=8)[0].start for step in range(0, 20000, 100)]
    assert len(set(drawn)) == 10, "in 200 saves some window never came"
    assert turn_of(300, None) == turn_of(300, None)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6),
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(48.0).reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(4, 6)[:, 1:4],
        torch.arange(24).to(torch.bfloat16),
        torch.arange(24) % 3 == 0,
        torch.arange(48).to(torch.float8_e4m3fn).reshape(1, 48),
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(6.0)[:, None].expand(6, 2),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_digests_are_of_the_row_major_bytes_of_the_chosen_range_whatever_the_strides(tensor: torch.Tensor) -> None:
    content = tensor_bytes(tensor)
    for limit in (8, 16, 24, 1 << 20):
        pieces = held(tensor=tensor)
        for turn in range(windows_of([("tensor", len(content))], limit)):
            for name, (start, stop, digest) in digests(pieces, turn, limit).items():
                assert name == "tensor"
                assert digest == xxhash.xxh3_64_hexdigest(content[start:stop])


def test_one_flipped_bit_changes_the_digest_and_what_only_one_rank_holds_is_left_out() -> None:
    values = torch.arange(8.0)
    flipped = values.clone()
    flipped.view(torch.int32)[5] ^= 1
    own = Piece(held(own=values)[0].named, (0,))
    before = digests([*held(tensor=values), own])
    assert before.keys() == {"tensor"}
    assert digests(held(tensor=flipped)) != before
    assert digests(held(tensor=values.clone())) == before


def test_the_order_of_the_pieces_does_not_matter_but_their_names_and_sizes_do() -> None:
    one, two = torch.ones(4), torch.zeros(6)
    said = describe(held(a=one, b=two), {}, turn=5, limit_bytes=16)
    assert describe(held(b=two, a=one), {}, turn=5, limit_bytes=16) == said
    layouts = {
        describe(held(**tensors), {}, turn=5, limit_bytes=16)["sets"][0]["layout"]
        for tensors in ({"a": one, "b": two}, {"a": one}, {"a": one, "c": two}, {"a": one, "b": torch.zeros(7)})
    }
    assert len(layouts) == 4


def test_each_set_of_holders_is_described_apart_and_values_may_stand_alone() -> None:
    pieces = held(shared=torch.ones(3))
    pieces.append(Piece(held(sharded=torch.ones(3))[0].named, (0, 2)))
    said = describe(pieces, {"lr.optimizer": ((0, 1), ["0.1"]), "lr.other": ((0, 1, 2), ["0.2"])}, turn=0)
    assert [(one["holders"], list(one["digests"]), one["values"]) for one in said["sets"]] == [
        ([0, 1], ["shared"], {"lr.optimizer": ["0.1"]}),
        ([0, 1, 2], [], {"lr.other": ["0.2"]}),
        ([0, 2], ["sharded"], {}),
    ]
