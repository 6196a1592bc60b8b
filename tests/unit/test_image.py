"""The image of a shard: exact bytes, one layout for many snapshots, and refusals that name the tensor."""

import json
from typing import Any

import pytest
import torch
from checkpoint_samples import rows, same_bytes, two_ranks, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint import header, image
from workers.checkpoint.document import Unchanging, to_bytes
from workers.checkpoint.image import DTYPES, ImageTooLarge
from workers.checkpoint.tensors import CapturedState, NamedTensor
from workers.errors import CheckpointDamaged, StateNotStorable


def write(state: CapturedState, layout: image.ImageLayout | None = None) -> tuple[memoryview, header.ShardHeader]:
    layout = layout or image.plan(state.tensors, state.document)
    buffer = memoryview(bytearray(b"\xff" * layout.image_bytes))
    image_bytes = layout.write(buffer, state.tensors, state.document)
    return buffer[:image_bytes], header.parse_header(buffer[:image_bytes])


def read(content: memoryview, parsed: header.ShardHeader, name: str) -> torch.Tensor:
    record = parsed.tensors[name]
    raw = bytearray(content[record.start : record.stop])
    if not raw:
        return torch.empty(record.shape, dtype=DTYPES[record.dtype])
    return torch.frombuffer(raw, dtype=DTYPES[record.dtype]).reshape(record.shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any storable type, 0-d to 3-d, sizes from 0, any bits, of three kinds of strides."""
    dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = dtype.itemsize
    numel = int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else 1
    bits = draw(st.binary(min_size=numel * size, max_size=numel * size))
    if dtype is torch.bool:
        bits = bytes(bit & 1 for bit in bits)
    flat = torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(dtype) if bits else torch.empty(0, dtype=dtype)
    result = flat.reshape(shape)
    match draw(st.sampled_from(["contiguous", "transposed", "every other"])):
        case "transposed" if result.dim() >= 2:
            result = result.transpose(0, -1)
        case "every other" if result.dim() >= 1:
            padded = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)
            padded[..., ::2] = result
            result = padded[..., ::2]
    return result


names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, tensors(), max_size=6), st.dictionaries(st.text(), json_values, max_size=3))
def test_any_storable_state_comes_back_bit_for_bit(named: dict[str, torch.Tensor], document: dict[str, Any]) -> None:
    content, parsed = write(
        CapturedState(tensors=[whole(name, tensor) for name, tensor in named.items()], document=document)
    )
    assert parsed.document == document
    assert parsed.image_bytes == len(content)
    assert parsed.data_start % 4096 == 0
    assert parsed.tensors.keys() == named.keys()
    for name, tensor in named.items():
        assert same_bytes(read(content, parsed, name), tensor.clone()), name
        assert (parsed.tensors[name].start - parsed.data_start) % max(1, tensor.element_size()) == 0


def test_negative_zero_inf_and_every_nan_keep_their_bits() -> None:
    bits = torch.tensor([0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81], dtype=torch.uint16)
    special = bits.view(torch.bfloat16)
    content, parsed = write(CapturedState(tensors=[whole("special", special)], document={}))
    assert read(content, parsed, "special").view(torch.uint16).tolist() == bits.tolist()


def test_text_that_is_not_valid_unicode_survives_in_the_document() -> None:
    document = {"path": "caf\udce9", "\ud800": "\u2028\x00"}
    _, parsed = write(CapturedState(tensors=[], document=document))
    assert parsed.document == document


def test_equal_states_give_equal_bytes_whatever_the_order_and_the_memory_before() -> None:
    state = two_ranks()[0]
    reordered = CapturedState(tensors=state.tensors[::-1], document=state.document)
    assert bytes(write(state)[0]) == bytes(write(reordered)[0])


def test_a_document_of_another_length_leaves_the_tensors_where_they_are() -> None:
    state = two_ranks()[0]
    layout = image.plan(state.tensors, state.document)
    longer = CapturedState(tensors=state.tensors, document={**state.document, "note": "x" * 20_000})
    _, before = write(state, layout)
    _, after = write(longer, layout)
    assert after.document == longer.document
    assert after.tensors == before.tensors


def test_a_document_beyond_the_reserve_is_still_written_exactly_when_the_buffer_has_room() -> None:
    state = two_ranks()[0]
    layout = image.plan(state.tensors, state.document)
    huge = CapturedState(tensors=state.tensors, document={"note": "x" * 500_000})
    assert layout.fits(state.tensors, to_bytes(state.document))
    assert not layout.fits(huge.tensors, to_bytes(huge.document))
    with pytest.raises(ImageTooLarge) as refused:
        layout.write(memoryview(bytearray(layout.image_bytes)), huge.tensors, huge.document)
    buffer = memoryview(bytearray(refused.value.needed_bytes))
    parsed = header.parse_header(buffer[: layout.write(buffer, huge.tensors, huge.document)])
    assert parsed.document == huge.document
    weight = next(named.tensor for named in huge.tensors if named.name == "model.weight")
    assert same_bytes(read(buffer, parsed, "model.weight"), weight)


def test_a_document_that_doubles_still_fits() -> None:
    state = CapturedState(tensors=[], document={"names": ["parameter"] * 50_000})
    layout = image.plan(state.tensors, state.document)
    assert layout.fits(state.tensors, to_bytes({"names": ["parameter"] * 95_000}))


def test_a_header_is_written_after_its_tensors_and_may_be_shorter_but_not_longer_than_the_room_in_front() -> None:
    state = two_ranks()[0]
    layout = image.plan(state.tensors, state.document)
    buffer = memoryview(bytearray(layout.image_bytes))
    data_start = layout.data_start(to_bytes(state.document))
    for at, target in zip(layout.order, layout.targets(buffer, data_start), strict=True):
        target.copy_(state.tensors[at].tensor)
    image_bytes = layout.write_header(buffer, to_bytes({"late": True}), data_start)
    parsed = header.parse_header(buffer[:image_bytes])
    assert parsed.document == {"late": True}
    for named in state.tensors:
        assert same_bytes(read(buffer, parsed, named.name), named.tensor.clone())
    with pytest.raises(ImageTooLarge):
        layout.write_header(buffer, to_bytes({"note": "x" * 500_000}), data_start)


def test_a_part_of_the_document_that_stays_is_written_as_it_would_be_otherwise() -> None:
    plain = {"parts": {"model": {"tensors": {"caf\udce9": [1, None, "\\"]}, "tied": {}}, "x": 1.5}, "n": [1]}
    marked = {
        **plain,
        "parts": {"model": {"tensors": Unchanging(plain["parts"]["model"]["tensors"]), "tied": {}}, "x": 1.5},
    }
    assert to_bytes(marked) == to_bytes(plain) == json.dumps(json.dumps(plain, separators=(",", ":"))).encode()


def test_a_layout_refuses_tensors_that_it_was_not_planned_for() -> None:
    state = two_ranks()[0]
    layout = image.plan(state.tensors)
    changed = [*state.tensors[:-1], whole("rank.00000.rng.torch", torch.zeros(17, dtype=torch.uint8))]
    assert layout.fits(state.tensors)
    assert not layout.fits(changed)
    with pytest.raises(ValueError, match="not the tensors"):
        layout.write(memoryview(bytearray(layout.image_bytes)), changed, {})


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_a_tensor_that_no_shard_can_hold_is_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(StateNotStorable, match=f"'ema.weight'.*{said}"):
        image.plan([whole("ema.weight", tensor)])


def test_a_name_used_twice_is_refused() -> None:
    with pytest.raises(StateNotStorable, match="'w'"):
        image.plan([whole("w", torch.zeros(1)), whole("w", torch.ones(1))])


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_safetensors_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(StateNotStorable):
        image.plan([whole(name, torch.zeros(1))])


def test_a_part_outside_of_its_whole_is_refused() -> None:
    part = NamedTensor(name="w", tensor=torch.zeros(3), global_shape=(4,), offsets=(2,))
    with pytest.raises(StateNotStorable, match="'w'"):
        image.plan([part])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), {1, 2}, b"bytes", torch.zeros(1)])
def test_a_document_that_is_not_json_is_refused(value: object) -> None:
    layout = image.plan([])
    with pytest.raises(StateNotStorable, match="not JSON"):
        layout.write(memoryview(bytearray(layout.image_bytes)), [], {"value": value})


def test_the_header_names_where_each_part_lies_in_its_whole() -> None:
    tensor = torch.zeros(7, 2)
    _, parsed = write(CapturedState(tensors=[rows("w", tensor, 4, 7)], document={}))
    record = parsed.tensors["w"]
    assert (record.shape, record.offsets, record.global_shape, record.dtype) == ((3, 2), (4, 0), (7, 2), "F32")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_header_with_any_byte_changed_is_damage_or_still_a_consistent_header(data: st.DataObject) -> None:
    content = bytearray(write(two_ranks()[0])[0])
    at = data.draw(st.integers(0, 2500))
    content[at] = data.draw(st.integers(0, 255))
    try:
        parsed = header.parse_header(bytes(content))
    except CheckpointDamaged:
        return
    position = parsed.data_start
    for record in sorted(parsed.tensors.values(), key=lambda record: (record.start, record.stop)):
        assert record.start == position
        position = record.stop


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_a_damaged_header_and_nothing_worse(content: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        header.parse_header(content)
    with pytest.raises(CheckpointDamaged):
        header.parse_header(len(content).to_bytes(8, "little") + content)


def test_a_header_with_a_hole_between_tensors_is_damage() -> None:
    sharding = {name: {"saved_offsets": [0], "global_shape": [1]} for name in "ab"}
    entries = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(sharding), "lastgood": "{}"},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]},
    }
    content = json.dumps(entries).encode()
    with pytest.raises(CheckpointDamaged, match="gap or an overlap before tensor 'b'"):
        header.parse_header(len(content).to_bytes(8, "little") + content)
