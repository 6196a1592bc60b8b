"""The tensors of a model by name: parameters, persistent buffers, and what modules keep as extra state.

Invariants: names are those of the unwrapped model, however it is wrapped (DDP, torch.compile, activation
checkpointing); a tensor that appears under several names is stored once and restored to all; parameters under DDP are
stored once over all ranks; each other plain tensor, buffers above all (BatchNorm's statistics differ between ranks),
belongs to its rank. A restore writes into the live tensors, so views, optimizers and shards of them stay valid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workers.checkpoint.document import Unchanging
from workers.errors import CallerError
from workers.state import tree
from workers.state.pieces import Lookup, Piece, Restorer, canonical_name, check_same, own_name, piece
from workers.state.sameness import Contents, Memories

_CONTENTS = (attrgetter("_parameters"), attrgetter("_buffers"), attrgetter("_modules"))
_TRANSIENT = attrgetter("_non_persistent_buffers_set")
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
        self._plan: _Plan | None = None
        self._lookup = Lookup(rank)
        for inner in module.modules():
            if isinstance(inner, FullyShardedDataParallel):
                raise CallerError(f"{name}: FullyShardedDataParallel cannot be tracked; shard with fully_shard instead")
        for member in _Walk(module, f"{name}.").members:
            if nn.parameter.is_lazy(member.tensor):
                raise CallerError(f"{member.name} has no shape yet; run one forward of the lazy module before track()")
            tree.check_storable(member.tensor, member.name)

    def members(self) -> list[Member]:
        """Every parameter and persistent buffer, sharded ones as their shards; a tied tensor once for each name.

        The same list while the model consists of the same tensors in the same memory.
        """
        return self._current_plan().walk.members

    def known_members(self) -> list[Member]:
        """`members` as they were at the last look."""
        return self._plan.walk.members if self._plan is not None else self.members()

    def capture(self) -> tuple[list[Piece], dict[str, Any]]:
        """The pieces to save, and the document. Both are reused while the tensors stay the same objects and memory."""
        plan = self._current_plan()
        pieces, document = plan.contents(self._rank, self.kind)
        if plan.walk.extra:
            extra: dict[str, Any] = {}
            found: dict[str, torch.Tensor] = {}
            for name, module in plan.walk.extra:
                extra[name], tensors = tree.encode(module.get_extra_state(), name, name_of=self._own)
                found |= tensors
            return plan.pieces_with(self._lookup.pieces(found)), {**document, "extra": extra}
        return pieces, document

    def _current_plan(self) -> "_Plan":
        if self._plan is None or not self._plan.holds():
            # Parameters gathered for a forward are not the ones that the optimizer updates: back to the shards.
            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            if self._plan is None or not self._plan.holds():
                self._plan = _Plan(_Walk(self._module, f"{self.name}."))
        return self._plan

    def _own(self, path: str, tensor: torch.Tensor) -> str:
        return path if isinstance(tensor, DTensor) else own_name(path, self._rank)

    def check(self, document: dict[str, Any], restorer: Restorer) -> None:
        """Raises CallerError, naming the tensor, if the model is not the saved one; changes nothing."""
        found = self.members()
        saved, tied = document["tensors"], document["tied"]
        names = [member.name for member in found] + [name for name, _ in self._current_plan().walk.extra]
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
        modules = self._current_plan().walk.extra
        extra = restorer.decode((document["extra"][name], None) for name, _ in modules)
        for (_, module), state in zip(modules, extra, strict=True):
            module.set_extra_state(state)


def members_of(models: Sequence[ModelPart]) -> dict[int, Member]:
    """The tensors of all `models` by identity; one with several names under its first."""
    found: dict[int, Member] = {}
    for model in models:
        for member in model.members():
            found.setdefault(id(member.tensor), member)
    return found


def stored_name(member: Member, rank: int) -> str:
    """Under which name a member's part of this rank is stored."""
    shared = isinstance(member.tensor, DTensor) or member.replicas is not None
    return member.name if shared else canonical_name(member.name, rank)


def _ties(found: list[Member]) -> dict[str, str]:
    """For each further name of a tensor, its first."""
    first_names: dict[int, str] = {}
    for member in found:
        first_names.setdefault(id(member.tensor), member.name)
    return {member.name: first for member in found if (first := first_names[id(member.tensor)]) != member.name}


class _Walk:
    """A model as it is now: its tensors, and the modules that keep extra state, by name."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self.members: list[Member] = []
        self.extra: list[tuple[str, nn.Module]] = []
        self._modules: list[nn.Module] = []
        self._visit(module, prefix, None)
        self._contents = [(look, Contents([*map(look, self._modules)])) for look in _CONTENTS]
        self._transient = [set(module._non_persistent_buffers_set) for module in self._modules]

    def is_same(self) -> bool:
        return (
            all(contents.are([*map(look, self._modules)]) for look, contents in self._contents)
            and [*map(_TRANSIENT, self._modules)] == self._transient
        )

    def _visit(self, module: nn.Module, prefix: str, replicas: "_Replicas | None") -> None:
        self._modules.append(module)
        if isinstance(module, DistributedDataParallel):
            self._visit(module.module, prefix, _Replicas(module, prefix))
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.members.append(Member(prefix + name, parameter, replicas.of(prefix + name) if replicas else None))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                self.members.append(Member(prefix + name, buffer, None))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.extra.append((f"{prefix}_extra_state", module))
        for child_prefix, child in _children(module, prefix):
            self._visit(child, child_prefix, replicas)


class _Plan:
    """What to save of a model, good for as long as it consists of the same tensors in the same memory."""

    def __init__(self, walk: _Walk) -> None:
        self.walk = walk
        self._memories = Memories([member.tensor for member in walk.members])
        self._pieces: list[Piece] = []
        self._document: dict[str, Any] = {}
        self._with_extra: tuple[list[Piece], list[Piece]] = ([], [])

    def holds(self) -> bool:
        return self.walk.is_same() and self._memories.are_at(self._memories.tensors)

    def contents(self, rank: int, kind: str) -> tuple[list[Piece], dict[str, Any]]:
        if not self._document:
            tensors: dict[str, Any] = {}
            tied = _ties(self.walk.members)
            for member in self.walk.members:
                if member.name in tied:
                    continue
                tree.check_storable(member.tensor, member.name)
                stored_as = stored_name(member, rank)
                tensors[member.name] = {
                    "name": stored_as,
                    "dtype": tree.dtype_name(member.tensor.dtype),
                    "shape": [*member.tensor.shape],
                }
                made = piece(stored_as, member.tensor, rank=rank, replicas=member.replicas)
                self._pieces += [] if made is None else [made]
            self._document = {"kind": kind, "tensors": Unchanging(tensors), "tied": tied}
        return self._pieces, self._document

    def pieces_with(self, extra: list[Piece]) -> list[Piece]:
        """Both; the same list for the same extra ones."""
        if self._with_extra[0] is not extra:
            self._with_extra = (extra, self._pieces + extra)
        return self._with_extra[1]


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


def _check_names(part: str, *, saved: set[str], live: set[str]) -> None:
    for names, where, where_not in ((saved - live, "checkpoint", "model"), (live - saved, "model", "checkpoint")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CallerError(
                f"{part}: {listed}: in the {where}, but not in the {where_not}; build the model as it was saved, or "
                f"start another run"
            )
