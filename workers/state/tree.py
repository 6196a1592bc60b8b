"""State trees as JSON: what is not a tensor goes into the document of a shard, and comes back as it was.

Invariants: nothing is executed and nothing is imported by name while decoding (no pickle, no class lookup); a decoded
value is equal to the encoded one in type and in every bit (tuples, int keys, nan payloads, infinities, -0.0, big ints,
NumPy byte order); a value that cannot come back exactly is refused with its full key. Encoding copies no tensor.

JSON values stand for themselves; everything else is an object whose key "$" names its kind. Tensors, arrays and bytes
are put aside under a name, and the document refers to them.
"""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from workers.errors import CheckpointDamaged, StateNotStorable

Json = Any

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float}
_JSON_INT_MAX = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """How a document refers to a tensor that is stored beside it.

    `name` is the stored name. `shape` is the whole tensor's. `stride` is given for dense tensors that are not
    contiguous. `layout` is given for a DTensor: the key of its mesh and placements.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    stride: tuple[int, ...] | None
    layout: str | None


def encode(
    tree: Any, path: str, *, name_of: Callable[[str, torch.Tensor], str] | None = None
) -> tuple[Json, dict[str, torch.Tensor]]:
    """The document of `tree`, and the tensors it refers to by stored name.

    `path` is the tree's own key: it starts each tensor's path and appears in errors. `name_of(path, tensor)` gives the
    stored name, which is the path itself otherwise. The tensors are those of the tree, not copies of them.
    Raises StateNotStorable with the full key.
    """
    encoder = _Encoder(name_of or (lambda own, _tensor: own))
    return encoder.encode(tree, path), encoder.tensors


def decode(document: Json, fetch: Callable[[TensorRef], torch.Tensor]) -> Any:
    """The tree again; `fetch` makes each tensor. Raises CheckpointDamaged for a value of a kind that is not known."""
    if isinstance(document, list):
        return [decode(item, fetch) for item in document]
    if not isinstance(document, dict):
        return document
    if "$" not in document:
        return {key: decode(value, fetch) for key, value in document.items()}
    decoder = _DECODERS.get(document["$"])
    if decoder is None:
        raise CheckpointDamaged(f"the document holds a value of unknown kind {document['$']!r}; use a newer lastgood")
    return decoder(document, fetch)


def refs(document: Json) -> list[TensorRef]:
    """Every tensor that `document` refers to."""
    if isinstance(document, list):
        return [ref for item in document for ref in refs(item)]
    if not isinstance(document, dict):
        return []
    if document.get("$") == "tensor":
        return [_ref(document)]
    return [ref for value in document.values() for ref in refs(value)]


def digest(tree: Any, path: str) -> str:
    """xxh3_128 in hex over all values of `tree`, tensors included (of a DTensor: this rank's part)."""
    document, tensors = encode(tree, path)
    state = xxhash.xxh3_128(json.dumps(document).encode())
    for tensor in tensors.values():
        state.update(tensor_bytes(tensor))
    return state.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, or of this rank's part of it, in row-major order."""
    flat = local_part(tensor).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached and sharing memory."""
    if isinstance(tensor, DTensor):
        # Outside no_grad this records an autograd function, at twenty times the cost.
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.detach()


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Raises StateNotStorable, naming `path`, for a tensor whose bits cannot be stored and restored."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor):
        raise _refusal(path, f"a tensor of class {type(tensor).__qualname__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _refusal(path, "a sparse, quantized or nested tensor")
    if tensor.device.type == "meta":
        raise _refusal(path, "a tensor on the meta device, which holds no values,")
    if tensor.dtype not in _DTYPES.values():
        raise _refusal(path, f"a tensor of {tensor.dtype}")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise _refusal(path, "a DTensor with a pending reduction (Partial)")


@lru_cache(maxsize=256)
def layout_key(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> str:
    """Stands for the ranks of a mesh and the placements over it: in a large mesh they would be long to repeat."""
    return xxhash.xxh3_64_hexdigest(f"{mesh.mesh.tolist()} {placements!r}".encode())


def _refusal(path: str, what: str) -> StateNotStorable:
    return StateNotStorable(
        f"{path}: {what} cannot be stored in a checkpoint; keep it as tensors, numbers, strings, lists, tuples or "
        f"dicts, or leave it out of state_dict() and rebuild it in load_state_dict()"
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Encoder:
    def __init__(self, name_of: Callable[[str, torch.Tensor], str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name_of = name_of
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Json:
        # Exact types only: a subclass (an IntEnum, a named tuple, numpy.float64) would come back as its base.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) <= _JSON_INT_MAX else {"$": "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "bits": struct.pack(">d", value).hex()}
        if kind is str:
            return value if _is_unicode(value) else {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (bytes, bytearray):
            return {"$": kind.__name__, "data": self._bytes(value, path)}
        if isinstance(value, np.generic | np.ndarray):
            return self._numpy(value, path)
        if kind is torch.Size:
            return {"$": "size", "items": list(value)}
        if kind is torch.dtype:
            return {"$": "dtype", "name": dtype_name(value)}
        if kind is torch.device:
            return {"$": "device", "name": str(value)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Json:
        if id(value) in self._open:
            raise _refusal(path, "a value that contains itself")
        self._open.add(id(value))
        try:
            match value:
                case list() if type(value) is list:
                    return self._items(value, path)
                case tuple() if type(value) is tuple:
                    return {"$": "tuple", "items": self._items(value, path)}
                case deque() if type(value) is deque:
                    return {"$": "deque", "items": self._items(value, path), "maxlen": value.maxlen}
                case set() | frozenset() if type(value) in (set, frozenset):
                    keys = sorted((self._key(key, path) for key in value), key=json.dumps)
                    return {"$": type(value).__name__, "items": keys}
                case dict():
                    return self._mapping(value, path)
                case _:
                    raise _refusal(path, f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        finally:
            self._open.discard(id(value))

    def _items(self, values: Any, path: str) -> list[Json]:
        return [self.encode(item, f"{path}.{index}") for index, item in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], path: str) -> Json:
        kind = type(value)
        if kind is dict and "$" not in value and all(type(key) is str and _is_unicode(key) for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        items = [[self._key(key, path), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        if kind in (dict, OrderedDict, Counter):
            return {"$": kind.__name__, "items": items}
        if isinstance(value, defaultdict) and kind is defaultdict:
            factory = value.default_factory
            known = [name for name, candidate in _FACTORIES.items() if candidate is factory]
            if known or factory is None:
                return {"$": "defaultdict", "items": items, "factory": known[0] if known else None}
        raise _refusal(path, f"a mapping of type {kind.__module__}.{kind.__qualname__}")

    def _key(self, key: Any, path: str) -> Json:
        if isinstance(key, tuple):
            if type(key) is tuple:
                return {"$": "tuple", "items": [self._key(item, path) for item in key]}
        elif key is None or type(key) in (bool, int, float, str):
            return self.encode(key, path)
        raise _refusal(f"{path}.{key}", f"a key of type {type(key).__qualname__}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        check_storable(tensor, path)
        # Different keys may give one path ("a.b" beside "a" -> "b"); the order of the tree tells them apart.
        name = self._name_of(path.encode("utf-8", "backslashreplace").decode(), tensor)
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        ref: dict[str, Json] = {"$": "tensor", "name": name, "dtype": dtype_name(tensor.dtype)}
        ref["shape"] = [*tensor.shape]
        if tensor.device.type != "cpu":
            ref["device"] = tensor.device.type
        if isinstance(tensor, DTensor):
            ref["layout"] = layout_key(tensor.device_mesh, tuple(tensor.placements))
        elif not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride():
            ref["stride"] = [*tensor.stride()]
        return ref

    def _bytes(self, value: bytes | bytearray, path: str) -> Json:
        return self._tensor(torch.from_numpy(np.frombuffer(bytearray(value), np.uint8)), path)

    def _numpy(self, value: Any, path: str) -> Json:
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise _refusal(path, f"an array of class {type(value).__qualname__}")
        if value.dtype.kind not in "biufcSUMm":
            raise _refusal(path, f"a NumPy value of dtype {value.dtype}")
        if isinstance(value, np.generic):
            return {"$": "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        raw = np.frombuffer(bytearray(value.tobytes("F" if fortran else "C")), np.uint8)
        return {
            "$": "ndarray",
            "dtype": value.dtype.str,
            "shape": [*value.shape],
            "order": "F" if fortran else "C",
            "data": self._tensor(torch.from_numpy(raw), path),
        }


def _is_unicode(text: str) -> bool:
    """False for lone surrogates (undecodable file names), which not every JSON reader survives."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _ref(document: Json) -> TensorRef:
    return TensorRef(
        name=document["name"],
        dtype=_DTYPES[document["dtype"]],
        shape=tuple(document["shape"]),
        device=document.get("device", "cpu"),
        stride=tuple(document["stride"]) if "stride" in document else None,
        layout=document.get("layout"),
    )


_Fetch = Callable[[TensorRef], torch.Tensor]


def _decode_bytes(document: Json, fetch: _Fetch) -> bytes:
    return fetch(_ref(document["data"])).cpu().numpy().tobytes()


def _decode_ndarray(document: Json, fetch: _Fetch) -> Any:
    raw = bytearray(_decode_bytes(document, fetch))
    return np.ndarray(document["shape"], np.dtype(document["dtype"]), buffer=raw, order=document["order"])


def _decode_scalar(document: Json, _fetch: _Fetch) -> Any:
    return np.ndarray((), np.dtype(document["dtype"]), buffer=bytearray.fromhex(document["hex"] or "00"))[()]


def _decode_items(document: Json, fetch: _Fetch) -> list[Any]:
    return [decode(item, fetch) for item in document["items"]]


def _decode_pairs(document: Json, fetch: _Fetch) -> dict[Any, Any]:
    return {decode(key, fetch): decode(value, fetch) for key, value in document["items"]}


def _decode_defaultdict(document: Json, fetch: _Fetch) -> Any:
    factory = document["factory"]
    return defaultdict(None if factory is None else _FACTORIES[factory], _decode_pairs(document, fetch))


_DECODERS: dict[str, Callable[[Json, _Fetch], Any]] = {
    "tensor": lambda document, fetch: fetch(_ref(document)),
    "int": lambda document, fetch: int(document["hex"], 16),
    "float": lambda document, fetch: struct.unpack(">d", bytes.fromhex(document["bits"]))[0],
    "str": lambda document, fetch: bytes.fromhex(document["hex"]).decode("utf-8", "surrogatepass"),
    "bytes": _decode_bytes,
    "bytearray": lambda document, fetch: bytearray(_decode_bytes(document, fetch)),
    "numpy": _decode_scalar,
    "ndarray": _decode_ndarray,
    "size": lambda document, fetch: torch.Size(document["items"]),
    "dtype": lambda document, fetch: _DTYPES[document["name"]],
    "device": lambda document, fetch: torch.device(document["name"]),
    "tuple": lambda document, fetch: tuple(_decode_items(document, fetch)),
    "set": lambda document, fetch: set(_decode_items(document, fetch)),
    "frozenset": lambda document, fetch: frozenset(_decode_items(document, fetch)),
    "deque": lambda document, fetch: deque(_decode_items(document, fetch), document["maxlen"]),
    "dict": _decode_pairs,
    "OrderedDict": lambda document, fetch: OrderedDict(_decode_pairs(document, fetch)),
    "Counter": lambda document, fetch: Counter(_decode_pairs(document, fetch)),
    "defaultdict": _decode_defaultdict,
}
