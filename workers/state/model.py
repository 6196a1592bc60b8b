"""The tensors of a model by name: parameters, persistent buffers, and what modules keep as extra state.

Invariants: names are those of the unwrapped model, however it is wrapped (DDP, torch.compile, activation
checkpointing); a tensor that appears under several names is stored once and restored to all; parameters under DDP are
stored once over all ranks; each other plain tensor, buffers above all (BatchNorm's statistics differ between ranks),
belongs to its rank. A restore writes into the live tensors, so views, optimizers and shards of them stay valid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workers.errors import CallerError
from workers.state import tree
from workers.state.pieces import Piece, Restorer, canonical_name, check_same, own_name, piece

Memory = tuple[int, torch.Size]

_TRANSPARENT_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a model. `replicas`: the ranks that are known to hold the same bytes, None if only this one."""

    name: str
    tensor: torch.Tensor
    replicas: tuple[int, ...] | None


class ModelPart:
    """A tracked model. `name` is the keyword it is tracked under."""

    kind = "model"

    def __init__(self, name: str, module: nn.Module, rank: int) -> None:
        self.name = name
        self._module = module
        self._rank = rank
        self._members: list[Member] = []
        self._memories: list[Memory] = []
        self._pieces: list[Piece] = []
        self._document: dict[str, Any] = {}
        for inner in module.modules():
            if isinstance(inner, FullyShardedDataParallel):
                raise CallerError(f"{name}: FullyShardedDataParallel cannot be tracked; shard with fully_shard instead")
        for member in self.members():
            if nn.parameter.is_lazy(member.tensor):
                raise CallerError(f"{member.name} has no shape yet; run one forward of the lazy module before track()")
            tree.check_storable(member.tensor, member.name)

    def members(self) -> list[Member]:
        """Every parameter and persistent buffer, sharded ones as their shards; a tied tensor once for each name."""
        if not self._is_current(found := list(_walk(self._module, f"{self.name}."))):
            # Parameters gathered for a forward are not the ones that the optimizer updates: back to the shards.
            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            found = list(_walk(self._module, f"{self.name}."))
        return found

    def capture(self) -> tuple[list[Piece], dict[str, Any]]:
        """The pieces to save, and the document. Both are reused while the tensors stay the same objects and memory."""
        found = self.members()
        if not self._is_current(found):
            self._plan(found)
        pieces, document = self._pieces, self._document
        extra, extra_pieces = self._capture_extra()
        if extra:
            pieces, document = pieces + extra_pieces, {**document, "extra": extra}
        return pieces, document

    def _is_current(self, found: list[Member]) -> bool:
        return (
            bool(found)
            and len(found) == len(self._members)
            and all(
                new.tensor is old.tensor and new.name == old.name and memory_of(new.tensor) == known
                for new, old, known in zip(found, self._members, self._memories, strict=True)
            )
        )

    def _plan(self, found: list[Member]) -> None:
        tensors: dict[str, Any] = {}
        tied = _ties(found)
        pieces: list[Piece | None] = []
        for member in found:
            if member.name in tied:
                continue
            tree.check_storable(member.tensor, member.name)
            stored_as = member.name
            if not isinstance(member.tensor, DTensor) and member.replicas is None:
                stored_as = canonical_name(member.name, self._rank)
            tensors[member.name] = {
                "name": stored_as,
                "dtype": tree.dtype_name(member.tensor.dtype),
                "shape": [*member.tensor.shape],
            }
            pieces.append(piece(stored_as, member.tensor, rank=self._rank, replicas=member.replicas))
        self._members, self._memories = found, [memory_of(member.tensor) for member in found]
        self._pieces = [each for each in pieces if each is not None]
        self._document = {"kind": self.kind, "tensors": tensors, "tied": tied}

    def _capture_extra(self) -> tuple[dict[str, Any], list[Piece]]:
        extra: dict[str, Any] = {}
        pieces: list[Piece | None] = []
        for name, module in _extra_state_modules(self._module, f"{self.name}."):
            extra[name], tensors = tree.encode(module.get_extra_state(), name, name_of=self._own)
            pieces.extend(piece(stored_as, tensor, rank=self._rank) for stored_as, tensor in tensors.items())
        return extra, [each for each in pieces if each is not None]

    def _own(self, path: str, tensor: torch.Tensor) -> str:
        return path if isinstance(tensor, DTensor) else own_name(path, self._rank)

    def check(self, document: dict[str, Any], restorer: Restorer) -> None:
        """Raises CallerError, naming the tensor, if the model is not the saved one; changes nothing."""
        found = self.members()
        saved, tied = document["tensors"], document["tied"]
        names = [member.name for member in found] + [name for name, _ in self._extra_modules()]
        _check_names(self.name, saved={*saved, *tied, *document.get("extra", {})}, live=set(names))
        live = {member.name: member.tensor for member in found}
        for alias, first in _ties(found).items():
            if tied.get(alias) != first:
                raise CallerError(f"{alias} is tied to {first}, but was not when it was saved; untie them")
        for alias, first in tied.items():
            if live[alias] is not live[first]:
                raise CallerError(f"{alias} was tied to {first} when it was saved, and is not now; tie them again")
        for name, record in saved.items():
            check_same(name, record, live[name])
            restorer.require(record["name"])
        for ref in tree.refs(document.get("extra", {})):
            restorer.require_ref(ref)

    def apply(self, document: dict[str, Any], restorer: Restorer) -> None:
        live = {member.name: member.tensor for member in self.members()}
        for name, record in document["tensors"].items():
            restorer.fill(record["name"], live[name])
        for name, module in self._extra_modules():
            module.set_extra_state(tree.decode(document["extra"][name], restorer.make))

    def _extra_modules(self) -> list[tuple[str, nn.Module]]:
        return list(_extra_state_modules(self._module, f"{self.name}."))


def members_of(models: Sequence[ModelPart]) -> dict[int, Member]:
    """The tensors of all `models` by identity; one with several names under its first."""
    found: dict[int, Member] = {}
    for model in models:
        for member in model.members():
            found.setdefault(id(member.tensor), member)
    return found


def memory_of(tensor: torch.Tensor) -> Memory:
    """Where this rank's part lies: `tensor.data = other` and `resize_` keep the object, but change this."""
    local = tree.local_part(tensor)
    return local.data_ptr(), local.shape


def _ties(found: list[Member]) -> dict[str, str]:
    """For each further name of a tensor, its first."""
    first_names: dict[int, str] = {}
    for member in found:
        first_names.setdefault(id(member.tensor), member.name)
    return {member.name: first for member in found if (first := first_names[id(member.tensor)]) != member.name}


def _walk(module: nn.Module, prefix: str, replicas: "_Replicas | None" = None) -> Iterator[Member]:
    if isinstance(module, DistributedDataParallel):
        yield from _walk(module.module, prefix, _Replicas(module, prefix))
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Member(prefix + name, parameter, replicas.of(prefix + name) if replicas else None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Member(prefix + name, buffer, None)
    for child_prefix, child in _children(module, prefix):
        yield from _walk(child, child_prefix, replicas)


class _Replicas:
    """The ranks between which DDP keeps parameters equal, without those it was told to ignore."""

    def __init__(self, module: DistributedDataParallel, prefix: str) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(module.process_group))
        self._ignored = {prefix + name for name in module.parameters_to_ignore}

    def of(self, name: str) -> tuple[int, ...] | None:
        return None if name in self._ignored else self._ranks


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # `named_children` leaves out a child that appears twice, whose second name the state would then lack.
    for name, child in module._modules.items():
        if child is not None:
            yield (prefix if name in _TRANSPARENT_CHILDREN else f"{prefix}{name}."), child


def _extra_state_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, DistributedDataParallel):
        yield from _extra_state_modules(module.module, prefix)
        return
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield f"{prefix}_extra_state", module
    for child_prefix, child in _children(module, prefix):
        yield from _extra_state_modules(child, child_prefix)


def _check_names(part: str, *, saved: set[str], live: set[str]) -> None:
    for names, where, where_not in ((saved - live, "checkpoint", "model"), (live - saved, "model", "checkpoint")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CallerError(
                f"{part}: {listed}: in the {where}, but not in the {where_not}; build the model as it was saved, or "
                f"start another run"
            )
