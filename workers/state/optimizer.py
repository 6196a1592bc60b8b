"""The state of an optimizer by parameter name.

Invariants: state and groups are matched by the names of their parameters, never by position; each saved value comes
back in its own dtype and on its own kind of device (torch's `load_state_dict` casts to the parameter's dtype);
state that was not there when it was saved is not there after a restore. State appears at the first step in most
optimizers, so what there is to save is looked up at each save.

Stored names are "optimizer.state.<parameter>.<key>". A state tensor is spread over the ranks as its parameter is; one
that is plain although its parameter is sharded (`step`) belongs to its rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workers.checkpoint.document import Unchanging
from workers.errors import CallerError
from workers.state import tree
from workers.state.model import Member, ModelPart, stored_name
from workers.state.pieces import Lookup, Piece, Restorer, canonical_name, piece
from workers.state.sameness import Contents, Memories

_NATIVE_KEYS = ("state", "param_groups")
_PLAIN = (int, float, bool, str, type(None))  # compared by identity: a changed one is another object
_NO_STATE: dict[Any, Any] = {}


class _Named:
    """The parameters by identity, good for as long as models and groups consist of the same ones."""

    def __init__(self, name: str, groups: list[list[torch.Tensor]], members: list[list[Member]]) -> None:
        self._groups, self._members = groups, members
        self._ranks: tuple[int, ...] | None = None
        known: dict[int, Member] = {}
        for each in members:
            for member in each:
                known.setdefault(id(member.tensor), member)
        self.parameters: dict[int, Member] = {}
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group):
                if id(parameter) not in known:
                    raise CallerError(
                        f"{name}: parameter {position} of group {index}, of shape {tuple(parameter.shape)}, is in "
                        f"no tracked model; track its model too, and create the optimizer after fully_shard"
                    )
                self.parameters[id(parameter)] = known[id(parameter)]
        names = [[self.parameters[id(parameter)].name for parameter in group] for group in groups]
        self.names: list[list[tree.Json]] = tree.encode(names, name)[0]

    def ranks(self, own: int) -> tuple[int, ...]:
        """Those that have all of the parameters, as replicas or as shards; none if it is not one such set."""
        if self._ranks is None:
            found = {
                tuple(sorted(member.tensor.device_mesh.mesh.flatten().tolist()))
                if isinstance(member.tensor, DTensor)
                else member.replicas or (own,)
                for member in self.parameters.values()
            }
            self._ranks = found.pop() if len(found) == 1 else ()
        return self._ranks

    def holds(self, groups: list[list[torch.Tensor]], members: list[list[Member]]) -> bool:
        return (
            all(map(is_, members, self._members))
            and [*map(len, groups)] == [*map(len, self._groups)]
            and all(all(map(is_, group, seen)) for group, seen in zip(groups, self._groups, strict=True))
        )


class _Plan:
    """State as it was looked up last, good for as long as it holds the same tensors in the same memory."""

    def __init__(self, named: _Named, state: Mapping[Any, Any]) -> None:
        self.named = named
        self.pieces: list[Piece] = []
        self.document = Unchanging()
        self.state: dict[str, torch.Tensor] = {}  # by stored name
        self._parameters = [member.tensor for member in named.parameters.values()]
        states = self._states(state)
        self._contents = Contents(states)
        values = [value for found in states for value in found.values()]
        self._memories = Memories([value for value in values if isinstance(value, torch.Tensor)])
        # What is in a list may change while the list stays: that is looked up each time.
        self._changes_unseen = any(type(value) not in _PLAIN for value in values if not isinstance(value, torch.Tensor))
        self._with_rest: tuple[list[Piece], list[Piece]] = ([], [])

    def holds(self, named: _Named, state: Mapping[Any, Any]) -> bool:
        return (
            named is self.named
            and not self._changes_unseen
            and self._contents.are(self._states(state))
            and self._memories.are_at(self._memories.tensors)
        )

    def _states(self, state: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
        return [state.get(parameter, _NO_STATE) for parameter in self._parameters]  # not `state[...]`: a defaultdict

    def pieces_with(self, rest: list[Piece]) -> list[Piece]:
        """Both; the same list for the same ones."""
        if not rest:
            return self.pieces
        if self._with_rest[0] is not rest:
            self._with_rest = (rest, self.pieces + rest)
        return self._with_rest[1]


class OptimizerPart:
    """A tracked optimizer of the tracked `models`. `name` is the keyword it is tracked under."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, rank: int, models: Sequence[ModelPart]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._rank = rank
        self._models = models
        self._named: _Named | None = None
        self._plan: _Plan | None = None
        self._lookup = Lookup(rank)
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise CallerError(f"{name}: ZeroRedundancyOptimizer cannot be tracked; shard with fully_shard instead")
        self.capture()

    def capture(self, *, models_are_known: bool = False) -> tuple[list[Piece], dict[str, Any]]:
        """The pieces to save and the document; raises StateNotStorable and CallerError, naming the key or parameter.

        `models_are_known`: they have just been captured. The list is the same while the tensors are.
        """
        named = self._look_up(models_are_known)
        state = self._optimizer.state
        if self._plan is None or not self._plan.holds(named, state):
            self._plan = self._new_plan(named)
        rest = {
            "groups": [{"options": _options(group)} for group in self._optimizer.param_groups],
            "other": self._other_state(),
            "extra": self._extra(),
        }
        encoded, tensors = tree.encode(rest, self.name, name_of=self._own)
        for group, names in zip(encoded["groups"], named.names, strict=True):
            group["params"] = names
        document = {"kind": self.kind, "state": self._plan.document, "rest": encoded}
        return self._plan.pieces_with(self._lookup.pieces(tensors)), document

    def steady(self) -> dict[str, torch.Tensor]:
        """By stored name, what only a step of the optimizer changes: its parameters, and its state of them.

        As captured last. Empty for an optimizer whose steps torch's hooks do not announce.
        """
        if self._plan is None or self._named is None or not self.announces_steps:
            return {}
        parameters = {stored_name(each, self._rank): each.tensor for each in self._named.parameters.values()}
        # An inference tensor has no version, so that a change would not be noticed.
        return parameters | {name: value for name, value in self._plan.state.items() if not value.is_inference()}

    def parameter_names(self) -> set[str]:
        """The stored names of the parameters, as captured last."""
        assert self._named is not None
        return {stored_name(member, self._rank) for member in self._named.parameters.values()}

    @property
    def announces_steps(self) -> bool:
        """Whether torch's hooks are called before each step."""
        made = hasattr(self._optimizer, "_optimizer_step_pre_hooks")  # by Optimizer.__init__
        return made and getattr(type(self._optimizer).step, "hooked", False)

    def unborn_bytes(self) -> int:
        """About how much state this rank has yet to get: two values for each trained parameter without state."""
        missing = 0
        for member in self._look_up().parameters.values():
            if member.tensor not in self._optimizer.state and member.tensor.requires_grad:
                missing += 2 * tree.local_part(member.tensor).nbytes // len(member.replicas or (self._rank,))
        return missing

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]

    def common_ranks(self) -> tuple[int, ...] | None:
        """The ranks that all train these same parameters, as replicas or as shards; None if it is not one such set.

        As captured last.
        """
        assert self._named is not None
        ranks = self._named.ranks(self._rank)
        return ranks if len(ranks) > 1 else None

    def step_counts(self) -> list[list[float]]:
        """The distinct values of `step` in the state, each with how many parameters have it."""
        values: list[Any] = []
        tensors: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for state in self._optimizer.state.values():
            step = state.get("step") if isinstance(state, dict) else None
            if type(step) is torch.Tensor and step.ndim == 0:
                tensors.setdefault((step.device, step.dtype), []).append(step)
            elif step is not None:
                values.append(step)
        for together in tensors.values():  # one by one they would be as many waits for a device
            values += torch.stack(together).tolist()
        return [[step, count] for step, count in sorted(Counter(map(float, values)).items())]

    def state_tensors(self) -> list[torch.Tensor]:
        states = [state for state in self._optimizer.state.values() if isinstance(state, dict)]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def check(self, document: dict[str, Any], restorer: Restorer) -> None:
        """Raises CallerError, naming the group, if the optimizer is not the saved one; changes nothing."""
        self._matched_groups(document)
        for ref in tree.refs(document["state"]) + tree.refs(document["rest"]):
            restorer.require_ref(ref)

    def apply(self, document: dict[str, Any], restorer: Restorer) -> None:
        rest = self._restore(document, restorer)
        if rest["extra"]:
            # Only the optimizer knows where these belong; what it casts on the way is put right again.
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **rest["extra"]})
            self._restore(document, restorer)

    def _restore(self, document: dict[str, Any], restorer: Restorer) -> dict[str, Any]:
        """Returns what belongs to no parameter."""
        saved = document["state"]
        members = [one for one in self._look_up().parameters.values() if one.name in saved]
        rest: dict[str, Any]
        rest, *states = restorer.decode(
            [(document["rest"], None), *((saved[one.name], one.tensor.device) for one in members)]
        )
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
        self._optimizer.state.update(zip((one.tensor for one in members), states, strict=True))
        self._plan = None
        return rest

    def _look_up(self, models_are_known: bool = False) -> _Named:
        members = [model.known_members() if models_are_known else model.members() for model in self._models]
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        if self._named is None or not self._named.holds(groups, members):
            self._named = _Named(self.name, groups, members)
        return self._named

    def _new_plan(self, named: _Named) -> _Plan:
        plan = _Plan(named, self._optimizer.state)
        for member in named.parameters.values():
            state = self._optimizer.state.get(member.tensor)
            if not state:
                continue
            spread = member.replicas

            def name_of(path: str, tensor: torch.Tensor, spread: tuple[int, ...] | None = spread) -> str:
                return path if isinstance(tensor, DTensor) or spread else self._own(path, tensor)

            key = f"{self.name}.state.{_bare(member.name)}"
            plan.document[member.name], tensors = tree.encode(state, key, name_of=name_of)
            plan.state |= tensors
            found = [
                piece(stored_as, tensor, rank=self._rank, replicas=spread) for stored_as, tensor in tensors.items()
            ]
            plan.pieces.extend(each for each in found if each is not None)
        return plan

    def _other_state(self) -> dict[Any, Any]:
        """What is kept under other keys than parameters."""
        state = self._optimizer.state
        return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

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
        named = self._look_up().parameters
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
