"""The state of an optimizer by parameter name.

Invariants: state and groups are matched by the names of their parameters, never by position; each saved value comes
back in its own dtype and on its own kind of device (torch's `load_state_dict` casts to the parameter's dtype);
state that was not there when it was saved is not there after a restore. State appears at the first step in most
optimizers, so what there is to save is looked up at each save.

Stored names are "optimizer.state.<parameter>.<key>". A state tensor is spread over the ranks as its parameter is; one
that is plain although its parameter is sharded (`step`) belongs to its rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workers.errors import CallerError
from workers.state import tree
from workers.state.model import Member, Memory, ModelPart, members_of, memory_of
from workers.state.pieces import Piece, Restorer, canonical_name, piece

_NATIVE_KEYS = ("state", "param_groups")


_Mark = tuple[str, str, int, Memory]


@dataclass(frozen=True, slots=True)
class _Plan:
    """State as it was looked up last: good for as long as it holds the same tensors at the same addresses."""

    fingerprint: list[_Mark]
    keep_alive: list[torch.Tensor]
    pieces: list[Piece]
    document: dict[str, Any]


class OptimizerPart:
    """A tracked optimizer of the tracked `models`. `name` is the keyword it is tracked under."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, rank: int, models: Sequence[ModelPart]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._rank = rank
        self._models = models
        self._plan: _Plan | None = None
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise CallerError(f"{name}: ZeroRedundancyOptimizer cannot be tracked; shard with fully_shard instead")
        self.capture()

    def capture(self) -> tuple[list[Piece], dict[str, Any]]:
        """The pieces to save and the document; raises StateNotStorable and CallerError, naming the key or parameter."""
        named = self._named_parameters()
        fingerprint = self._fingerprint(named)
        if self._plan is None or fingerprint is None or self._plan.fingerprint != fingerprint:
            self._plan = self._new_plan(named, fingerprint or [])
        pieces = self._plan.pieces
        document = {"kind": self.kind, "state": self._plan.document}
        rest = {
            "groups": [
                {"params": [named[id(parameter)].name for parameter in group["params"]], "options": _options(group)}
                for group in self._optimizer.param_groups
            ],
            "other": {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)},
            "extra": self._extra(),
        }
        document["rest"], tensors = tree.encode(rest, self.name, name_of=self._own)
        if tensors:
            found = [piece(stored_as, tensor, rank=self._rank) for stored_as, tensor in tensors.items()]
            pieces = pieces + [each for each in found if each is not None]
        return pieces, document

    def unborn_bytes(self) -> int:
        """About how much state this rank has yet to get: two values for each trained parameter without state."""
        missing = 0
        for member in self._named_parameters().values():
            if member.tensor not in self._optimizer.state and member.tensor.requires_grad:
                missing += 2 * tree.local_part(member.tensor).nbytes // len(member.replicas or (self._rank,))
        return missing

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]

    def common_ranks(self) -> tuple[int, ...] | None:
        """The ranks that all train these same parameters, as replicas or as shards; None if it is not one such set."""
        found = {
            tuple(sorted(member.tensor.device_mesh.mesh.flatten().tolist()))
            if isinstance(member.tensor, DTensor)
            else member.replicas or (self._rank,)
            for member in self._named_parameters().values()
        }
        ranks = found.pop() if len(found) == 1 else ()
        return ranks if len(ranks) > 1 else None

    def step_counts(self) -> list[list[float]]:
        """The distinct values of `step` in the state, each with how many parameters have it."""
        counts: dict[float, int] = {}
        for state in self._optimizer.state.values():
            if isinstance(state, dict) and "step" in state:
                step = float(state["step"])
                counts[step] = counts.get(step, 0) + 1
        return [[step, count] for step, count in sorted(counts.items())]

    def state_tensors(self) -> list[torch.Tensor]:
        states = [state for state in self._optimizer.state.values() if isinstance(state, dict)]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def check(self, document: dict[str, Any], restorer: Restorer) -> None:
        """Raises CallerError, naming the group, if the optimizer is not the saved one; changes nothing."""
        self._matched_groups(document)
        for ref in tree.refs(document["state"]) + tree.refs(document["rest"]):
            restorer.require_ref(ref)

    def apply(self, document: dict[str, Any], restorer: Restorer) -> None:
        self._restore(document, restorer)
        rest = tree.decode(document["rest"], restorer.make)
        if rest["extra"]:
            # Only the optimizer knows where these belong; what it casts on the way is put right again.
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **rest["extra"]})
            self._restore(document, restorer)

    def _restore(self, document: dict[str, Any], restorer: Restorer) -> None:
        rest = tree.decode(document["rest"], restorer.make)
        for group, index in zip(self._optimizer.param_groups, self._matched_groups(document), strict=True):
            for option, value in rest["groups"][index]["options"].items():
                live = group.get(option)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
                    # A compiled step holds on to the tensor.
                    live.detach().copy_(value)
                else:
                    group[option] = value
        self._optimizer.state.clear()
        self._optimizer.state.update(rest["other"])
        for member in self._named_parameters().values():
            if member.name in document["state"]:
                make = partial(restorer.make, device=member.tensor.device)
                self._optimizer.state[member.tensor] = tree.decode(document["state"][member.name], make)
        self._plan = None

    def _named_parameters(self) -> dict[int, Member]:
        members = members_of(self._models)
        named: dict[int, Member] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in members:
                    raise CallerError(
                        f"{self.name}: parameter {position} of group {index}, of shape {tuple(parameter.shape)}, is in "
                        f"no tracked model; track its model too, and create the optimizer after fully_shard"
                    )
                named[id(parameter)] = members[id(parameter)]
        return named

    def _fingerprint(self, named: dict[int, Member]) -> list[_Mark] | None:
        """None if the state holds other things than tensors: these are looked up each time."""
        found: list[_Mark] = []
        for member in named.values():
            for key, value in self._state_of(member).items():
                if not isinstance(value, torch.Tensor):
                    return None
                found.append((member.name, key, id(value), memory_of(value)))
        return found

    def _new_plan(self, named: dict[int, Member], fingerprint: list[_Mark]) -> _Plan:
        document: dict[str, Any] = {}
        pieces: list[Piece] = []
        keep_alive: list[torch.Tensor] = []
        for member in named.values():
            state = self._state_of(member)
            if not state:
                continue
            spread = member.replicas

            def name_of(path: str, tensor: torch.Tensor, spread: tuple[int, ...] | None = spread) -> str:
                return path if isinstance(tensor, DTensor) or spread else self._own(path, tensor)

            key = f"{self.name}.state.{_bare(member.name)}"
            document[member.name], tensors = tree.encode(state, key, name_of=name_of)
            found = [
                piece(stored_as, tensor, rank=self._rank, replicas=spread) for stored_as, tensor in tensors.items()
            ]
            pieces.extend(each for each in found if each is not None)
            keep_alive.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        return _Plan(fingerprint, keep_alive, pieces, document)

    def _state_of(self, member: Member) -> dict[Any, Any]:
        # Not `state[...]`: it is a defaultdict.
        state: dict[Any, Any] = self._optimizer.state.get(member.tensor, {})
        return state

    def _own(self, path: str, tensor: torch.Tensor) -> str:
        return path if isinstance(tensor, DTensor) else canonical_name(path, self._rank)

    def _extra(self) -> dict[str, Any]:
        """What an optimizer of another kind saves beside torch's own two entries."""
        if type(self._optimizer).state_dict is torch.optim.Optimizer.state_dict:
            return {}
        return {key: value for key, value in self._optimizer.state_dict().items() if key not in _NATIVE_KEYS}

    def _matched_groups(self, document: dict[str, Any]) -> list[int]:
        """For each live group, the number of the saved one with the same parameters."""
        saved = [set(group["params"]) for group in document["rest"]["groups"]]
        named = self._named_parameters()
        matched: list[int] = []
        for index, group in enumerate(self._optimizer.param_groups):
            names = {named[id(parameter)].name for parameter in group["params"]}
            same = [number for number, candidate in enumerate(saved) if candidate == names and number not in matched]
            if not same:
                raise CallerError(
                    f"{self.name}: no saved group has the parameters of group {index} ({_listed(names)}); build the "
                    f"groups as they were saved, or start another run"
                )
            matched.append(same[0])
        for number in range(len(saved)):
            if number not in matched:
                raise CallerError(
                    f"{self.name}: no group has the parameters of the saved group {number} ({_listed(saved[number])}); "
                    f"build the groups as they were saved, or start another run"
                )
        return matched


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _bare(member_name: str) -> str:
    return member_name.removeprefix("model.")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
