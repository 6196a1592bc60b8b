"""A tensor on its way to a checkpoint and back: which part this rank holds, who writes it, and under which name.

Invariants: over all ranks, each part of a tensor is written exactly once; the choice is a function of what all ranks
that hold the same bytes see alike, so it needs no communication; nothing here copies a tensor on the way out.

Bytes are taken to be the same on several ranks only where something guarantees it (a DTensor's Replicate placement,
parameters under DDP). Every other tensor belongs to its rank, for what merely ought to be equal may not be.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.checkpoint.tensors import NamedTensor, TensorSource
from workers.errors import CallerError, CheckpointDamaged
from workers.state import tree
from workers.state.sameness import Memories
from workers.state.tree import TensorRef, dtype_name, layout_key, local_part


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of a tensor, and the ranks that hold the same bytes; exactly one of these writes it."""

    named: NamedTensor
    holders: tuple[int, ...]


def own_name(name: str, rank: int) -> str:
    """The stored name of what each rank has for itself."""
    return f"rank.{rank:05d}.{name}"


def canonical_name(name: str, rank: int) -> str:
    """As `own_name`, except that rank 0's keeps the plain name, for other tools to find."""
    return name if rank == 0 else own_name(name, rank)


def piece(name: str, tensor: torch.Tensor, *, rank: int, replicas: tuple[int, ...] | None = None) -> Piece | None:
    """This rank's part of `tensor`, stored as `name`; None if it holds nothing of it.

    `replicas`: the ranks that hold the same plain tensor; only this one if None.
    """
    if _is_empty_part(tensor):
        return None
    local, offsets = _local_part(tensor)
    global_shape = (*tensor.shape, *local.shape[tensor.ndim :])
    holders = _holders(tensor) if isinstance(tensor, DTensor) else replicas or (rank,)
    return Piece(NamedTensor(name=name, tensor=local, global_shape=global_shape, offsets=offsets), holders)


class Lookup:
    """Pieces of tensors that are looked up at each save: the same list while the same memory is found."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names: list[str] = []
        self._memories = Memories([])
        self._pieces: list[Piece] = []

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
        """`tensors`: by stored name."""
        names, found = list(tensors), list(tensors.values())
        # A DTensor could be another one of the same memory, with another idea of what it is a part of.
        objects_matter = any(isinstance(tensor, DTensor) for tensor in found)
        same = names == self._names and (self._memories.are(found) if objects_matter else self._memories.are_at(found))
        if not same:
            made = (piece(name, tensor, rank=self._rank) for name, tensor in tensors.items())
            self._names, self._memories = names, Memories(found)
            self._pieces = [each for each in made if each is not None]
        return self._pieces


def assign(pieces: Iterable[Piece], rank: int) -> list[NamedTensor]:
    """The parts that this rank writes: all that only it holds, and its share of the others, balanced by bytes."""
    mine: list[NamedTensor] = []
    shared: list[Piece] = []
    for candidate in pieces:
        if len(candidate.holders) == 1:
            mine.append(candidate.named)
        else:
            shared.append(candidate)
    # A load is counted for each set of holders: only within one do all ranks see the same pieces.
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    for candidate in sorted(shared, key=lambda each: (-each.named.tensor.nbytes, each.named.name)):
        load = loads.setdefault(candidate.holders, dict.fromkeys(candidate.holders, 0))
        writer = min(candidate.holders, key=lambda holder: (load[holder], holder))
        load[writer] += candidate.named.tensor.nbytes
        if writer == rank:
            mine.append(candidate.named)
    return mine


def check_same(name: str, saved: Mapping[str, Any], tensor: torch.Tensor) -> None:
    """Raises CallerError, with both, unless `tensor` has the saved dtype and shape."""
    for what, was, now in (
        ("shape", tuple(saved["shape"]), tuple(tensor.shape)),
        ("dtype", saved["dtype"], dtype_name(tensor.dtype)),
    ):
        if was != now:
            raise CallerError(
                f"{name}: its {what} is {now}, but {was} in the checkpoint; build the model as it was saved, or start "
                f"another run"
            )


class Restorer:
    """Fills live tensors from a checkpoint, and makes those that are not there yet.

    `live`: every tensor that is; a DTensor can be made only with the mesh and placements of one of these.
    """

    def __init__(self, source: TensorSource, live: Iterable[torch.Tensor] = ()) -> None:
        self._source = source
        self._names = frozenset(source.names())
        self._wanted: list[tuple[str, Sequence[int], torch.Tensor]] = []
        self._layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = {}
        for tensor in live:
            if isinstance(tensor, DTensor):
                layout = (tensor.device_mesh, tuple(tensor.placements))
                self._layouts.setdefault(layout_key(*layout), layout)

    def require(self, name: str) -> None:
        """Raises CheckpointDamaged unless the checkpoint has a tensor of that name."""
        if name not in self._names:
            raise CheckpointDamaged(f"the checkpoint's document refers to the tensor {name}, but no shard holds it")

    def require_ref(self, ref: TensorRef) -> None:
        """Raises CheckpointDamaged or CallerError if `decode` could not make this tensor."""
        if ref.layout is not None:
            self._layout(ref)
        self.require(ref.name)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Have the next `decode` overwrite this rank's part of `target`; `check_same` has passed."""
        if not _is_empty_part(target):
            local, offsets = _local_part(target)
            self._wanted.append((name, offsets, local))

    def decode(self, documents: Iterable[tuple[tree.Json, torch.device | None]]) -> list[Any]:
        """The trees again, and all that `fill` was told of is filled. With each its device: where tensors go that were
        saved from one of that kind, e.g. this rank's GPU."""
        documents = list(documents)
        made = [[(ref, self._make(ref, device)) for ref in tree.refs(document)] for document, device in documents]
        wanted, self._wanted = self._wanted, []
        self._source.fill(wanted)
        trees = []
        for (document, _), tensors in zip(documents, made, strict=True):
            by_ref: dict[TensorRef, list[torch.Tensor]] = {}
            for ref, tensor in tensors:
                by_ref.setdefault(ref, []).append(tensor)
            trees.append(tree.decode(document, lambda ref, by_ref=by_ref: by_ref[ref].pop()))  # type: ignore[misc]
        return trees

    def _make(self, ref: TensorRef, device: torch.device | None) -> torch.Tensor:
        """A new tensor, to be filled as it was saved."""
        place = device if device is not None and device.type == ref.device else torch.device(ref.device)
        made: torch.Tensor
        if ref.layout is not None:
            mesh, placements = self._layout(ref)
            shape = torch.Size(ref.shape)
            stride = torch.empty(ref.shape, device="meta").stride()
            local_shape = compute_local_shape_and_global_offset(ref.shape, mesh, placements)[0]
            local = torch.empty(local_shape, dtype=ref.dtype, device=place)
            made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        elif ref.stride is not None:
            made = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=place)
        else:
            made = torch.empty(ref.shape, dtype=ref.dtype, device=place)
        self.fill(ref.name, made)
        return made

    def _layout(self, ref: TensorRef) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        assert ref.layout is not None
        if ref.layout not in self._layouts:
            raise CallerError(
                f"{ref.name}: it was sharded when it was saved, over a mesh or in a way that no tracked tensor is now; "
                f"shard the model as it was"
            )
        return self._layouts[ref.layout]


def _is_empty_part(tensor: torch.Tensor) -> bool:
    """True for a rank that holds nothing of a sharded tensor which is not empty itself."""
    return isinstance(tensor, DTensor) and tensor.numel() > 0 and local_part(tensor).numel() == 0


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part, detached and sharing memory, and where it starts in the whole.

    Complex numbers are pairs in a last dimension of size 2: not every complex type is a safetensors type.
    """
    local = local_part(tensor).resolve_neg()
    offsets: Sequence[int] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    if local.is_complex():
        return torch.view_as_real(local.resolve_conj()), (*offsets, 0)
    return local, tuple(offsets)


def _holders(tensor: DTensor) -> tuple[int, ...]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no part"
    # All parts of an empty tensor are the same one.
    index = tuple(
        slice(None) if placement.is_replicate() or tensor.numel() == 0 else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(tensor.device_mesh.mesh[index].flatten().tolist())
