"""State trees come back exactly as they were, or are refused with their key."""

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import assert_same_bits
from torch import nn

from workers.errors import CheckpointDamaged, StateNotStorable
from workers.state import tree

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def round_trip(value: Any) -> Any:
    document, tensors = tree.encode(value, "extra")
    return tree.decode(json.loads(json.dumps(document, allow_nan=False)), lambda ref: tensors[ref.name])


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, torch.Tensor):
        assert_same_bits(one, other)
        return True
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
atoms = keys | st.floats() | st.binary(max_size=20) | st.integers(min_value=-(2**200), max_value=2**200)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.frozensets(keys, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=7))
    ),
    max_leaves=20,
)


@given(trees)
@settings(max_examples=200, deadline=None)
def test_any_tree_of_plain_values_comes_back_equal_in_type_and_bits(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_are_put_aside_by_name(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    document, tensors = tree.encode({"a": [tensor]}, "extra")
    (name,) = tensors
    assert name == "extra.a.0"
    (ref,) = tree.refs(document)
    assert (ref.dtype, ref.shape, ref.layout) == (dtype, shape, None)
    assert_same_bits(round_trip({"a": [tensor]})["a"][0], tensor)


@pytest.mark.parametrize(
    "value",
    [
        *(math.inf, -math.inf, math.nan, -0.0, struct.unpack("d", b"\x01\x02\x03\x04\x05\x06\xf7\x7f")[0], 5e-324),
        *(2**63, -(2**64), True, 1, 1.0, "", "\udcff", b"", b"\x00\xff", bytearray(b"ab")),
        *((), (1, (2, [])), [], {}, {1: "a", "1": "b", None: "c", 2.5: "d"}, {"$": "tensor"}, {(1, "a"): 2}),
        *(OrderedDict(b=1, a=2), Counter({3: 2}), defaultdict(list, {1: [2]}), defaultdict(None, {}), {1, 2}),
        *(torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)),
        *(np.float32(0.1), np.int64(-1), np.bool_(True), np.str_(""), np.str_("äb"), np.datetime64("2024-01-01")),
        *(np.arange(6.0).reshape(2, 3), np.array([], np.int8), np.array(3), np.arange(3, dtype=">i4")),
        np.array(["a", "bcd"]),
    ],
    ids=repr,
)
def test_values_that_json_would_change_come_back_as_they_were(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip([value, (value,)]), [value, (value,)])


def test_a_defaultdict_keeps_its_factory() -> None:
    back = round_trip(defaultdict(int, {"a": 1}))
    assert back["missing"] == 0


def test_the_memory_order_of_arrays_and_dense_tensors_is_kept() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert round_trip(array).flags.f_contiguous
    assert same(round_trip(array), array)
    permuted = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    (ref,) = tree.refs(tree.encode(permuted, "x")[0])
    assert ref.stride == permuted.stride()
    (gaps,) = tree.refs(tree.encode(torch.arange(10.0)[::2], "x")[0])
    assert gaps.stride is None


def test_keys_that_give_the_same_path_get_different_names() -> None:
    value = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 1: torch.tensor(3), "1": torch.tensor(4)}
    assert same(round_trip(value), value)


def test_encoding_copies_no_tensor() -> None:
    tensor = torch.zeros(3)
    _, tensors = tree.encode({"a": tensor}, "x")
    assert tensors["x.a"].data_ptr() == tensor.data_ptr()


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Sub(dict[str, int]):
    pass


Point = namedtuple("Point", "x y")
self_containing: list[Any] = []
self_containing.append(self_containing)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"schedule": {"fn": lambda: 0}}, "extra.schedule.fn"),
        ([1, Colour.RED], "extra.1"),
        ({"n": Number.ONE}, "extra.n"),
        ({"p": Point(1, 2)}, "extra.p"),
        ({"s": Sub()}, "extra.s"),
        ({"a": {Colour.RED: 1}}, "extra.a.Colour.RED"),
        ({"a": {b"x": 1}}, "extra.a.b'x'"),
        ({"a": {1j: 1}}, "extra.a.1j"),
        ({"a": defaultdict(lambda: 3)}, "extra.a"),
        ({"o": np.array([object()])}, "extra.o"),
        ({"c": self_containing}, "extra.c.0"),
        ({"m": torch.empty(2, device="meta")}, "extra.m"),
        ({"s": torch.eye(2).to_sparse()}, "extra.s"),
        ({"g": torch.Generator()}, "extra.g"),
        ({"m": nn.Linear(1, 1)}, "extra.m"),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_what_cannot_come_back_exactly_is_refused_with_its_full_key(value: Any, key: str) -> None:
    with pytest.raises(StateNotStorable) as caught:
        tree.encode(value, "extra")
    assert str(caught.value).startswith(f"{key}: ")


def test_a_document_of_an_unknown_kind_is_not_guessed_at() -> None:
    with pytest.raises(CheckpointDamaged, match=r"unknown kind 'os\.system'"):
        tree.decode({"$": "os.system", "items": ["true"]}, lambda ref: torch.zeros(0))


def test_the_digest_sees_every_bit() -> None:
    def tensor_with(value: float) -> dict[str, Any]:
        return {"w": torch.tensor([1.0, value]), "n": [1, 2]}

    assert tree.digest(tensor_with(2.0), "x") == tree.digest(tensor_with(2.0), "x")
    assert tree.digest(tensor_with(0.0), "x") != tree.digest(tensor_with(-0.0), "x")
    assert tree.digest({"n": (1, 2)}, "x") != tree.digest({"n": [1, 2]}, "x")
    assert tree.digest(torch.zeros(2), "x") != tree.digest(torch.zeros(2).int(), "x")
