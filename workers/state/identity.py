"""What a run is: its configuration, data, versions and machine, so that a restore notices when it became another.

Invariants: no value of the configuration is stored, only a digest for each key, so no secret ends up in a checkpoint;
the digest of a value is the same in every process.

Another configuration or data revision is refused unless it is allowed by name. What only changes the last bits of the
numbers (torch's build, the CPU's capability, the thread count) is a warning that says so.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch

from workers.errors import CallerError
from workers.state import tree

_HIDDEN = "a value"  # values of the configuration are neither stored nor shown
_FIXED = ("world_size", "mesh")


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


# Looked up once, by the zygote: it takes a rank 15 ms.
_VERSIONS = {library: _version(library) for library in ("lastgood", "torch", "numpy", "ray")}


@dataclass(frozen=True, slots=True)
class Identity:
    """`document` maps each field, e.g. "config.optimizer.lr", to a JSON value: a digest for config, else the value."""

    document: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field that is not as it was saved. "refuse": another run; "warn": the last bits may differ."""

    field: str
    kind: Literal["refuse", "warn"]
    saved: str
    current: str

    def __str__(self) -> str:
        if self.saved == self.current == _HIDDEN:
            return f"{self.field} (changed)"
        return f"{self.field} (saved: {self.saved}, now: {self.current})"


def capture_identity(
    *, config: Any, data: Any, world_size: int, threads: int, mesh: Any = None, code: str | None = None
) -> Identity:
    """This run's identity.

    `config`: the loop's configuration, of any nesting. `data`: the data loader; it counts if it has `identity()`.
    `mesh`: JSON values describing the device mesh; `code`: names the version of the user's code.
    """
    describe = getattr(data, "identity", None)
    document: dict[str, Any] = {
        **{key: _digest(value) for key, value in _flat("config", config)},
        **{f"data.{key}": value for key, value in (describe() if callable(describe) else {}).items()},
        "world_size": world_size,
        "mesh": mesh,
        "code": code,
        "threads": threads,
        **{f"versions.{name}": version for name, version in _VERSIONS.items()},
        "versions.python": platform.python_version(),
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:32],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "numerics.default_dtype": tree.dtype_name(torch.get_default_dtype()),
        "numerics.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "numerics.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    # As it will be read back: a tuple that became a list is no difference.
    return Identity(json.loads(json.dumps(document)))


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], *, ignore: Iterable[str] = ()) -> list[Difference]:
    """What differs, except what `ignore` names ("config.model" covers "config.model.width" too)."""
    ignored = tuple(ignore)
    found: list[Difference] = []
    for field in sorted({*saved, *current}):
        was, now = saved.get(field, _ABSENT), current.get(field, _ABSENT)
        if was == now or any(field == name or field.startswith(f"{name}.") for name in ignored):
            continue
        kind: Literal["refuse", "warn"] = "refuse" if _is_refused(field) else "warn"
        found.append(Difference(field=field, kind=kind, saved=_shown(field, was), current=_shown(field, now)))
    return found


def check_identity(saved: Mapping[str, Any], current: Identity, *, allow: Iterable[str] = ()) -> list[str]:
    """Warnings about what may change the last bits; raises CallerError naming what makes this another run."""
    differences = compare(saved, current.document, ignore=allow)
    if refused := [difference for difference in differences if difference.kind == "refuse"]:
        told = f"this is not the run that was saved: {', '.join(map(str, refused))}"
        fixed = [difference for difference in refused if difference.field in _FIXED]
        if fixed:
            raise CallerError(f"{told}; use as many ranks, arranged as they were, or start another run")
        names = ", ".join(f'"{difference.field}"' for difference in refused)
        raise CallerError(
            f"{told}; use the saved values, start another run, or allow it: session.restore(allow=[{names}])"
        )
    return [
        f"{difference} is not as it was saved: the run continues, but not bit for bit" for difference in differences
    ]


_ABSENT = object()


def _is_refused(field: str) -> bool:
    return field.split(".")[0] in ("config", "data", "world_size", "mesh")


def _shown(field: str, value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return _HIDDEN if field.split(".")[0] == "config" else repr(value)


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    """Every leaf with its dotted key; empty containers are leaves."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _flat(f"{path}.{key}", item)]
    if isinstance(value, list | tuple) and value:
        return [leaf for index, item in enumerate(value) for leaf in _flat(f"{path}.{index}", item)]
    return [(path, value)]


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, set | frozenset):
        return f"{kind} {sorted(_canonical(item) for item in value)}"
    if isinstance(value, Enum):
        return f"{kind} {value.name}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{kind} {value.dtype} {tuple(value.shape)} {tree.digest(value, 'config')}"
    if isinstance(value, PurePath):
        return f"path {value}"
    if hasattr(value, "__qualname__"):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    shown = repr(value)
    # An address differs in every process: of such a value only its class counts.
    return kind if " at 0x" in shown else f"{kind} {shown}"
