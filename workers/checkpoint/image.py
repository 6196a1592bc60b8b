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
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from workers.checkpoint import header
from workers.checkpoint.document import to_bytes
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
    """Where each tensor goes. `image_bytes` is what to give a slot: whole pages, with room for the document to grow.

    `order`: the tensors that have any bytes, as they lie in the image, by their number in the list that was planned.
    """

    def __init__(self, tensors: Sequence[NamedTensor], document: dict[str, Any]) -> None:
        self._seen = list(tensors)
        self._signatures = [_signature(tensor) for tensor in tensors]
        by_place = sorted(range(len(tensors)), key=lambda at: (-tensors[at].tensor.element_size(), tensors[at].name))
        self._places: dict[int, tuple[int, int]] = {}  # of each tensor, in their order, from the start of the data
        position = 0
        for at in by_place:
            self._places[at] = (position, position + tensors[at].tensor.nbytes)
            position += tensors[at].tensor.nbytes
        self.order = [at for at, (start, stop) in self._places.items() if start < stop]
        self._data_bytes = position
        self._head, self._tail = self._header_frame()
        fixed = len(self._head) + len(self._tail)
        # A document names the tensors, so one that is not known yet is of the order of the header around it.
        written = len(to_bytes(document))
        wanted = _round_up(8 + fixed + max(2 * written, fixed, _SPARE_BYTES_MIN))
        self._reserved = min(wanted, header.HEADER_BYTES_MAX // header.PAGE_BYTES * header.PAGE_BYTES)
        self.image_bytes = self._reserved + _round_up(self._data_bytes)

    def fits(self, tensors: Sequence[NamedTensor], document: bytes = b"") -> bool:
        """Whether this layout is right for these tensors, and `image_bytes` are enough for the document, as bytes."""
        if len(tensors) != len(self._seen):
            return False
        others = [at for at, same in enumerate(map(is_, tensors, self._seen)) if not same]
        if any(_signature(tensors[at]) != self._signatures[at] for at in others):
            return False
        for at in others:
            self._seen[at] = tensors[at]
        return self.data_start(document) == self._reserved

    def write(self, buffer: memoryview, tensors: Sequence[NamedTensor], document: dict[str, Any]) -> int:
        """Copy a state into `buffer`; returns the exact length of the image in bytes.

        `tensors` are the planned ones, in the same order, with new values. Raises ImageTooLarge if the document has
        outgrown the buffer, StateNotStorable if it is not JSON.
        """
        if not self.fits(tensors):
            raise ValueError("these are not the tensors that the layout was planned for")
        encoded = to_bytes(document)
        data_start = self.data_start(encoded)
        for at, target in zip(self.order, self.targets(buffer, data_start), strict=True):
            target.copy_(tensors[at].tensor)
        return self.write_header(buffer, encoded, data_start)

    def data_start(self, document: bytes) -> int:
        """Where the data starts behind this document: at the same place for all that are not too long."""
        length = max(self._reserved, _round_up(8 + len(self._head) + len(document) + len(self._tail)))
        if length > header.HEADER_BYTES_MAX:
            raise StateNotStorable(
                f"the names, and the values that are not tensors, need a header of {length} bytes, and a safetensors "
                f"file holds {header.HEADER_BYTES_MAX}; keep large values in tensors"
            )
        return length

    def targets(self, buffer: memoryview, data_start: int) -> list[torch.Tensor]:
        """Where the tensors of `order` are copied to, with the header in front of `data_start`.

        They are good for as long as the buffer is. Raises ImageTooLarge if it is too small.
        """
        needed = data_start + self._data_bytes
        if needed > len(buffer):
            raise ImageTooLarge(_round_up(needed), len(buffer))
        if not self.order:
            return []
        data = torch.frombuffer(buffer, dtype=torch.uint8)[data_start:]
        found = []
        for at in self.order:
            start, stop = self._places[at]
            _, dtype, shape, _, _ = self._signatures[at]
            found.append(data[start:stop].view(dtype).view(shape))
        return found

    def write_header(self, buffer: memoryview, document: bytes, data_start: int) -> int:
        """Make an image of the data that was copied before; returns its exact length in bytes."""
        content = self._head + document + self._tail
        if self.data_start(document) > data_start:
            raise ImageTooLarge(self.data_start(document) + self._data_bytes, data_start + self._data_bytes)
        field = header.LENGTH_FIELD.pack(data_start - header.LENGTH_FIELD.size)
        buffer[:data_start] = (field + content).ljust(data_start, b" ")
        return data_start + self._data_bytes

    def _header_frame(self) -> tuple[bytes, bytes]:
        """The header's JSON before and after the document, which goes in as a JSON string."""
        sharding = {}
        entries = {}
        for at, (start, stop) in self._places.items():
            name, dtype, shape, offsets, global_shape = self._signatures[at]
            sharding[name] = {"saved_offsets": offsets, "global_shape": global_shape}
            entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", header.SHARDING_KEY: _compact(sharding)}
        head = f'{{"__metadata__":{_compact(metadata)[:-1]},"{header.DOCUMENT_KEY}":'
        tail = "}" + "".join(f",{_compact(name)}:{_compact(entry)}" for name, entry in entries.items()) + "}"
        return head.encode(), tail.encode()


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


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _round_up(size_bytes: int) -> int:
    return math.ceil(size_bytes / header.PAGE_BYTES) * header.PAGE_BYTES
