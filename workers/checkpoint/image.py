"""The image of a shard: the byte-exact safetensors file, laid out in memory.

Invariants:
- The data starts on a page boundary, and tensors are ordered by element size, largest first, then by name: every tensor
  is aligned to its element size, and equal states give equal bytes.
- A layout depends on the tensors' names, types and sizes only. It is planned once and used for every snapshot while
  those stay the same; the document may change in length, as the header keeps space for it.
- Nothing is serialized by code: tensors are bytes, the rest is JSON. What fits neither is refused by name.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workers.checkpoint import header
from workers.checkpoint.tensors import NamedTensor
from workers.errors import LastgoodError, StateNotStorable

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_SPARE_BYTES_MIN = 64 << 10

_Signature = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ImageTooLarge(LastgoodError):
    """The image does not fit into the memory that was given for it; `needed_bytes` do."""

    def __init__(self, needed_bytes: int, given_bytes: int) -> None:
        super().__init__(f"the image needs {needed_bytes} bytes, and was given {given_bytes}")
        self.needed_bytes = needed_bytes


class ImageLayout:
    """Where each tensor goes. `image_bytes` is what to give a slot: whole pages, with room for the document to grow."""

    def __init__(self, tensors: Sequence[NamedTensor], document: dict[str, Any]) -> None:
        self._signatures = [_signature(tensor) for tensor in tensors]
        self._order = sorted(range(len(tensors)), key=lambda at: (-tensors[at].tensor.element_size(), tensors[at].name))
        self._positions: list[tuple[int, int]] = []  # of each tensor in _order, from the start of the data
        position = 0
        for at in self._order:
            size = tensors[at].tensor.numel() * tensors[at].tensor.element_size()
            self._positions.append((position, position + size))
            position += size
        self._data_bytes = position
        self._head, self._tail = self._header_frame()
        fixed = len(self._head) + len(self._tail)
        # A document names the tensors, so one that is not known yet is of the order of the header around it.
        written = len(_document_json(document))
        wanted = _round_up(8 + fixed + max(2 * written, fixed, _SPARE_BYTES_MIN))
        self._reserved = min(wanted, header.HEADER_BYTES_MAX // header.PAGE_BYTES * header.PAGE_BYTES)
        self.image_bytes = self._reserved + _round_up(self._data_bytes)

    def fits(self, tensors: Sequence[NamedTensor], document: dict[str, Any] | None = None) -> bool:
        """Whether this layout is right for these tensors, and `image_bytes` are enough for the document."""
        if [_signature(tensor) for tensor in tensors] != self._signatures:
            return False
        return document is None or len(self._header(document)) <= self._reserved

    def write(
        self,
        buffer: memoryview,
        tensors: Sequence[NamedTensor],
        document: dict[str, Any],
        *,
        hook: Callable[[int, int], None] | None = None,
    ) -> int:
        """Copy a state into `buffer`; returns the exact length of the image in bytes.

        `tensors` are the planned ones, in the same order, with new values. `hook(index, total)` is called before each
        tensor's copy. Raises ImageTooLarge if the document has outgrown the buffer, StateNotStorable if it is not JSON.
        """
        if not self.fits(tensors):
            raise ValueError("these are not the tensors that the layout was planned for")
        start_of_image = self._header(document)
        data_start = len(start_of_image)
        needed = data_start + self._data_bytes
        if needed > len(buffer):
            raise ImageTooLarge(_round_up(needed), len(buffer))
        buffer[:data_start] = start_of_image
        target = torch.frombuffer(buffer, dtype=torch.uint8)
        for index, (at, (start, stop)) in enumerate(zip(self._order, self._positions, strict=True)):
            if hook is not None:
                hook(index, len(self._order))
            if start < stop:
                tensor = tensors[at].tensor
                part = target[data_start + start : data_start + stop]
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return needed

    def _header_frame(self) -> tuple[bytes, bytes]:
        """The header's JSON before and after the document, which goes in as a JSON string."""
        sharding = {}
        entries = {}
        for at, (start, stop) in zip(self._order, self._positions, strict=True):
            name, dtype, shape, offsets, global_shape = self._signatures[at]
            sharding[name] = {"saved_offsets": offsets, "global_shape": global_shape}
            entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", header.SHARDING_KEY: _compact(sharding)}
        head = f'{{"__metadata__":{_compact(metadata)[:-1]},"{header.DOCUMENT_KEY}":'
        tail = "}" + "".join(f",{_compact(name)}:{_compact(entry)}" for name, entry in entries.items()) + "}"
        return head.encode(), tail.encode()

    def _header(self, document: dict[str, Any]) -> bytes:
        """Length field and header for this document, padded to the reserved length, or to more if it is longer."""
        content = self._head + _document_json(document) + self._tail
        length = max(self._reserved, _round_up(8 + len(content)))
        if length > header.HEADER_BYTES_MAX:
            raise StateNotStorable(
                f"the names, and the values that are not tensors, need a header of {length} bytes, and a safetensors "
                f"file holds {header.HEADER_BYTES_MAX}; keep large values in tensors"
            )
        return header.LENGTH_FIELD.pack(length - 8) + content.ljust(length - 8, b" ")


def plan(tensors: Sequence[NamedTensor], document: dict[str, Any] | None = None) -> ImageLayout:
    """A layout for these tensors, with space for documents up to twice as long as this one.

    Raises StateNotStorable, with the name, for a tensor that the format cannot hold.
    """
    seen: set[str] = set()
    for tensor in tensors:
        _check(tensor, seen)
        seen.add(tensor.name)
    return ImageLayout(tensors, document or {})


def _check(named: NamedTensor, seen: set[str]) -> None:
    name, tensor = named.name, named.tensor
    if name in seen or name == "__metadata__":
        raise StateNotStorable(f"two tensors of this rank would be stored as {name!r}; names must be unique")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StateNotStorable(f"the tensor name {name!r} is not valid text") from None
    if tensor.dtype not in DTYPE_NAMES:
        raise StateNotStorable(f"tensor {name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise StateNotStorable(f"tensor {name!r} is not an ordinary one with data: {tensor.layout}, {tensor.device}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise StateNotStorable(f"tensor {name!r} is a {type(tensor).__name__}; its local part is what can be stored")
    shape, offsets, whole = tensor.shape, named.offsets, named.global_shape
    if not len(shape) == len(offsets) == len(whole) or any(
        offset < 0 or offset + size > total for size, offset, total in zip(shape, offsets, whole, strict=True)
    ):
        raise StateNotStorable(
            f"tensor {name!r} of shape {tuple(shape)} at {tuple(offsets)} is not within the whole of {tuple(whole)}"
        )


def _signature(named: NamedTensor) -> _Signature:
    tensor = named.tensor
    return named.name, tensor.dtype, tuple(tensor.shape), tuple(named.offsets), tuple(named.global_shape)


def _document_json(document: dict[str, Any]) -> bytes:
    """The document as JSON inside a JSON string, in ASCII: also text that is not valid Unicode comes back."""
    try:
        return json.dumps(json.dumps(document, separators=(",", ":"), allow_nan=False)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateNotStorable(f"the document of this rank is not JSON: {error}") from None


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _round_up(size_bytes: int) -> int:
    return math.ceil(size_bytes / header.PAGE_BYTES) * header.PAGE_BYTES
