"""The complete training state of one rank: everything whose absence would make a resumed run differ.

Invariants: a save holds every tracked part or fails naming the one it lacks; a restore changes nothing before it has
checked that each saved part has its live counterpart, with the same names, shapes and dtypes; random generators are
restored last, after everything that may draw from them; each rank restores what it saved itself.

The document: {"format", "rank", "world_size", "progress", "identity", "certificate", "absent", "parts"}. `parts` maps
each tracked name to its own document; `absent` lists the keywords that were given as None. With "replicas", it says
what this rank holds as others do (workers/state/replicas.py).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from workers.checkpoint.tensors import CapturedState, NamedTensor, TensorSource
from workers.errors import CallerError, ResumeMismatch, StateNotStorable
from workers.state import certificate, replicas
from workers.state.identity import Identity
from workers.state.model import ModelPart, members_of
from workers.state.objects import ObjectPart
from workers.state.optimizer import OptimizerPart
from workers.state.pieces import Piece, Restorer, assign
from workers.state.rng import GlobalGenerators

_FORMAT = 1
_REQUIRED = ("model", "optimizer", "scheduler", "data")
_RESERVED = ("rng", "rank")
_ORDER = ("model", "optimizer", "scheduler", "object", "data", "rng")

Part = ModelPart | OptimizerPart | ObjectPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come. `step`: steps finished. `samples`, `tokens`: consumed by this rank.

    `finished`: the loop had returned when this was saved, so it would not have gone on with another step.
    """

    step: int
    epoch: int
    samples: int
    tokens: int
    training_seconds: float
    finished: bool = False

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Progress":
        return cls(**document)


class TrainingState:
    """What one rank tracks, how it is saved, and how it is restored."""

    def __init__(self, rank: int, world_size: int, own: Mapping[str, Any] | None = None) -> None:
        """`own`: objects that are part of every state, beside what is tracked."""
        self._rank = rank
        self._world_size = world_size
        self._parts: dict[str, Part] = {"rng": ObjectPart("rng", GlobalGenerators(), rank, kind="rng")}
        self._parts |= {name: self._part(name, value, {}) for name, value in (own or {}).items()}
        self._untracked = len(self._parts)
        self._absent: set[str] = set()
        self._plan = _Plan(rank)

    def track(self, **objects: Any) -> None:
        """Add parts to the state.

        `model`, `optimizer`, `scheduler` and `data` must each be given; None says that there is none. Any value may
        be a list, tuple or dict of several. Beside these: anything with state_dict and load_state_dict, further
        modules and optimizers, and random generators. Raises CallerError or StateNotStorable, naming the key.
        """
        parts = dict(self._parts)
        given = {name.split(".")[0] for name in parts} | self._absent | objects.keys()
        for keyword in _REQUIRED:
            if keyword not in given:
                raise CallerError(
                    f"track() was given no {keyword}, so a restored run would differ from an uninterrupted one; pass "
                    f"{keyword}=..., or {keyword}=None if there is none"
                )
        found = [item for keyword, value in objects.items() if value is not None for item in _flat(keyword, value)]
        for name, value in sorted(found, key=lambda item: not isinstance(item[1], nn.Module)):
            if name.split(".")[0] in _RESERVED:
                raise CallerError(f"track({name}=...): the name {name} is taken; use another one")
            if name in self._parts or name in self._absent:
                raise CallerError(f"track({name}=...): {name} is tracked already; use another name")
            parts[name] = self._part(name, value, parts)
        self._parts = parts
        self._absent |= {keyword for keyword, value in objects.items() if value is None}

    def capture(self, progress: Progress, identity: Identity, *, turn: int | None = None) -> CapturedState:
        """The state at this step boundary, without a copy: the tensors are good until training goes on.

        `turn`: which part of the replicated state is digested, to be compared between ranks; none if None.
        Raises StateNotStorable, naming the key, for state that only appeared during training and cannot be stored.
        """
        if len(self._parts) == self._untracked:
            raise CallerError("there is nothing to save: call session.track() first")
        captured: dict[str, tuple[list[Piece], dict[str, Any]]] = {}
        for name, part in self._parts.items():  # models before their optimizers
            captured[name] = part.capture(models_are_known=True) if isinstance(part, OptimizerPart) else part.capture()
        plan = self._plan
        plan.update({name: pieces for name, (pieces, _) in captured.items()}, self._optimizers())
        document: dict[str, Any] = {
            "format": _FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "progress": progress.to_document(),
            "identity": identity.document,
            "certificate": self.certificate(),
            "absent": sorted(self._absent),
            "parts": {name: part_document for name, (_, part_document) in captured.items()},
        }
        digests = None if turn is None else plan.holdings.digests(self._replicated_values(), turn=turn)
        return CapturedState(tensors=plan.tensors, document=document, steady=plan.steady, digests=digests)

    def apply(self, source: TensorSource) -> None:
        """Restore every part.

        Raises CallerError, naming the part or tensor, if what is tracked is not what was saved: nothing has changed
        then. Raises CheckpointDamaged if bytes are not the committed ones: some parts may have changed then, and the
        state is whole again only after another `apply`.
        """
        document = source.document()
        self._check_origin(document)
        self._check_parts(document)
        restorer = Restorer(source, self._live_tensors())
        ordered = sorted(self._parts.items(), key=lambda item: _ORDER.index(item[1].kind))
        for name, part in ordered:
            part.check(document["parts"][name], restorer)
        with torch.no_grad():
            for name, part in ordered:
                if part.kind == "rng":
                    self._start_loaders()
                part.apply(document["parts"][name], restorer)

    def certificate(self) -> dict[str, Any]:
        """The fingerprint of what the next step will use."""
        objects = [part for part in self._parts.values() if isinstance(part, ObjectPart)]
        return certificate.certify(self._optimizers(), objects)

    def check_certificate(self, saved: dict[str, Any]) -> None:
        """Raises ResumeMismatch, listing the fields, unless the next step is the one that the saved run was to take."""
        certificate.require_equal(saved, self.certificate())

    def bytes_estimate(self) -> int:
        """About how large this rank's image will be, with optimizer state that only appears at the first step."""
        known = [part.capture()[0] for part in self._parts.values() if not _is_torch_loader(part)]
        tensors = assign([one for pieces in known for one in pieces], self._rank)
        held = sum(each.tensor.nbytes for each in tensors)
        unborn = sum(part.unborn_bytes() for part in self._optimizers())
        return held + unborn + 1024 * len(tensors) + 2**20

    def scales_gradients(self) -> bool:
        """Whether an enabled gradient scaler is tracked: it drops the steps at which gradients overflow."""
        return any(
            isinstance(part, ObjectPart)
            and callable(getattr(part.value, "get_scale", None))
            and getattr(part.value, "is_enabled", lambda: True)()
            for part in self._parts.values()
        )

    def mesh(self) -> list[Any]:
        """The device meshes that tracked tensors are sharded over: their dimension names and ranks, as JSON values."""
        found: list[Any] = []
        for tensor in self._live_tensors():
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                described = {"names": list(mesh.mesh_dim_names or ()), "ranks": mesh.mesh.tolist()}
                if described not in found:
                    found.append(described)
        return found

    def _part(self, name: str, value: Any, parts: dict[str, Part]) -> Part:
        if isinstance(value, nn.Module):
            return ModelPart(name, value, self._rank)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerPart(name, value, self._rank, _models(parts))
        keyword = name.split(".")[0]
        if keyword == "data" or hasattr(value, "next_sample_ids"):
            kind = "data"
        elif keyword == "scheduler" or isinstance(value, LRScheduler):
            kind = "scheduler"
        else:
            kind = "object"
        return ObjectPart(name, value, self._rank, kind=kind)

    def _replicated_values(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Learning rates, where ranks train the same parameters with them.

        Nothing else: a step is the same on all ranks or they save it as different ones, and a rank without data is
        in another epoch than its peers for a good reason.
        """
        return {
            f"lr.{part.name}": (ranks, sorted(map(repr, part.learning_rates())))
            for part in self._optimizers()
            if (ranks := part.common_ranks()) is not None
        }

    def _optimizers(self) -> list[OptimizerPart]:
        return [part for part in self._parts.values() if isinstance(part, OptimizerPart)]

    def _live_tensors(self) -> list[torch.Tensor]:
        live = [member.tensor for member in members_of(_models(self._parts)).values()]
        return live + [tensor for part in self._optimizers() for tensor in part.state_tensors()]

    def _check_origin(self, document: dict[str, Any]) -> None:
        if document["format"] != _FORMAT:
            raise CallerError(
                f"the checkpoint's state has format {document['format']}, this lastgood reads {_FORMAT}; use the "
                f"version that saved it"
            )
        if document["world_size"] != self._world_size:
            raise CallerError(
                f"the checkpoint was saved by {document['world_size']} ranks, and these are {self._world_size}; use as "
                f"many as it was saved with"
            )
        if document["rank"] != self._rank:
            raise ResumeMismatch(f"rank {self._rank} was given the state of rank {document['rank']}; each has its own")

    def _check_parts(self, document: dict[str, Any]) -> None:
        saved = {name: part["kind"] for name, part in document["parts"].items()}
        live = {name: part.kind for name, part in self._parts.items()}
        for name in sorted(saved.keys() - live.keys()):
            raise CallerError(f"the checkpoint holds {name}, but it is not tracked; pass {name}=... to track()")
        for name in sorted(live.keys() - saved.keys()):
            raise CallerError(
                f"{name} is tracked, but the checkpoint does not hold it; leave it out of track(), or start another run"
            )
        for name, kind in live.items():
            if saved[name] != kind:
                raise CallerError(f"{name} is tracked as {kind}, but was saved as {saved[name]}; track what was saved")

    def _start_loaders(self) -> None:
        """Have torchdata's loaders draw their seeds before the generators are restored, for the saved run had drawn."""
        for part in self._parts.values():
            if _is_torch_loader(part):
                part.capture()


class _Plan:
    """What is made of all pieces. Only what comes of a part's own list, or of its sharing with other ranks, is made
    anew when a part gives another list, as random generators do each time."""

    def __init__(self, rank: int) -> None:
        self.tensors: list[NamedTensor] = []
        self.steady: dict[str, torch.Tensor] = {}
        self.holdings = replicas.Holdings([])
        self._rank = rank
        self._seen: dict[str, list[Piece]] = {}
        self._alone: dict[str, list[NamedTensor]] = {}
        self._shared: list[NamedTensor] = []

    def update(self, found: dict[str, list[Piece]], optimizers: list[OptimizerPart]) -> None:
        """Raises StateNotStorable for two tensors of one name."""
        changed = {name for name, pieces in found.items() if pieces is not self._seen.get(name)}
        if not changed:
            return
        shared_before = found.keys() - self._alone.keys()
        for name in changed:
            self._alone.pop(name, None)
            if all(len(each.holders) == 1 for each in found[name]):
                self._alone[name] = [each.named for each in found[name]]
        shared = found.keys() - self._alone.keys()
        if changed & (shared | shared_before):
            pieces = [one for name in found if name in shared for one in found[name]]
            self._shared = assign(pieces, self._rank)
            self.holdings = replicas.Holdings(pieces)
        if any(part.name in changed for part in optimizers):
            silent = {name for part in optimizers if not part.announces_steps for name in part.parameter_names()}
            announced = [item for part in optimizers for item in part.steady().items()]
            self.steady = {name: tensor for name, tensor in announced if name not in silent}
        before, self.tensors = self.tensors, [*self._shared]
        for name in found:
            self.tensors += self._alone.get(name, [])
        if len(self.tensors) != len(before) or not all(map(_same_name, self.tensors, before)):
            _check_names([each.name for each in self.tensors])
        self._seen = found


def _same_name(one: NamedTensor, other: NamedTensor) -> bool:
    return one is other or one.name == other.name


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise StateNotStorable(f"{twice}: two tracked tensors have this name; rename one of their keys")


def _is_torch_loader(part: Part) -> bool:
    return isinstance(part, ObjectPart) and isinstance(part.value, torch.utils.data.DataLoader)


def _models(parts: dict[str, Part]) -> list[ModelPart]:
    return [part for part in parts.values() if isinstance(part, ModelPart)]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple | dict) and not hasattr(value, "state_dict"):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = [part for key, item in items for part in _flat(f"{name}.{key}", item)]
        if not found:
            raise CallerError(f"track({name}=...): it is empty; pass None if there is none")
        yield from found
    else:
        yield name, value
