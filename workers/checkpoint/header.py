"""The header of a shard image, read without torch and without safetensors' own code.

Layout of an image: 8 bytes header length (little-endian), that many bytes of JSON (padded with spaces so that the data
starts on a page boundary), the tensors without gaps. The JSON is safetensors' own; its "__metadata__" also holds
PyTorch's DCP_SHARDING_INFO (where each part lies in its whole) and the rank's document under "lastgood".

Faults survived: any bytes at all. Whatever is not such a header raises CheckpointDamaged; nothing is ever executed.
"""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from workers.checkpoint.manifest import TensorRecord
from workers.errors import CheckpointDamaged

PAGE_BYTES = 4096
LENGTH_FIELD = struct.Struct("<Q")
HEADER_BYTES_MAX = 100_000_000
"""safetensors itself refuses a longer header."""

DOCUMENT_KEY = "lastgood"
SHARDING_KEY = "DCP_SHARDING_INFO"

ELEMENT_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What an image says about itself. The tensors' digests are "": a header holds none."""

    document: dict[str, Any]
    tensors: dict[str, TensorRecord]
    data_start: int
    image_bytes: int


def header_bytes(prefix: bytes | memoryview, what: str = "the shard") -> int:
    """Length of the header including its length field, from the first 8 bytes; it is also where the data starts."""
    if len(prefix) < LENGTH_FIELD.size:
        raise CheckpointDamaged(f"{what} is too short for a header ({len(prefix)} bytes)")
    (length,) = LENGTH_FIELD.unpack_from(prefix)
    if length > HEADER_BYTES_MAX:
        raise CheckpointDamaged(f"{what} has no valid header: its length field says {length} bytes")
    return LENGTH_FIELD.size + int(length)


def parse_header(image: bytes | memoryview, what: str = "the shard") -> ShardHeader:
    """Read the header at the start of `image`, which may end with it; `what` names it in CheckpointDamaged.

    Checks that the tensors lie without gaps or overlaps, as safetensors demands; not that the data is there.
    """
    data_start = header_bytes(image, what)
    if len(image) < data_start:
        raise CheckpointDamaged(f"{what} ends within its header ({len(image)} of {data_start} bytes)")
    try:
        entries = json.loads(bytes(image[LENGTH_FIELD.size : data_start]))
        metadata = entries.pop("__metadata__")
        sharding = json.loads(metadata[SHARDING_KEY])
        document = json.loads(metadata[DOCUMENT_KEY])
        tensors = {name: _record(name, entry, sharding[name], data_start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{what} has a header that lastgood did not write: {error!r}") from None
    if not isinstance(document, dict):
        raise CheckpointDamaged(f"{what} has a document that is not an object")
    position = data_start
    for record in sorted(tensors.values(), key=lambda record: (record.start, record.stop)):
        if record.start != position:
            raise CheckpointDamaged(f"{what} has a gap or an overlap before tensor {record.name!r}")
        position = record.stop
    return ShardHeader(document=document, tensors=tensors, data_start=data_start, image_bytes=position)


def _record(name: str, entry: dict[str, Any], sharding: dict[str, Any], data_start: int) -> TensorRecord:
    shape = _sizes(entry["shape"])
    offsets = _sizes(sharding["saved_offsets"])
    global_shape = _sizes(sharding["global_shape"])
    start, stop = _sizes(entry["data_offsets"])
    if stop - start != math.prod(shape) * ELEMENT_BYTES[entry["dtype"]]:
        raise ValueError(f"tensor {name!r} has {stop - start} bytes for shape {shape}")
    if not len(shape) == len(offsets) == len(global_shape):
        raise ValueError(f"tensor {name!r} has shape, offsets and global shape of unequal lengths")
    return TensorRecord(
        name=name,
        dtype=entry["dtype"],
        shape=shape,
        offsets=offsets,
        global_shape=global_shape,
        start=data_start + start,
        stop=data_start + stop,
        digest="",
    )


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list of sizes")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)
