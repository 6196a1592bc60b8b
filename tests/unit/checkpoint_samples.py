"""Small checkpoints for tests, written through the real path: layout, slot, shard, manifest."""

from pathlib import Path

import torch

from workers.checkpoint import image
from workers.checkpoint.digests import image_digests
from workers.checkpoint.header import parse_header
from workers.checkpoint.manifest import MANIFEST_FILE, Manifest, ShardRecord, checkpoint_dir
from workers.checkpoint.persist import ReadBack, write_shard
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import Store
from workers.checkpoint.tensors import CapturedState, NamedTensor


def whole(name: str, tensor: torch.Tensor) -> NamedTensor:
    """A tensor that one rank has all of."""
    shape = tuple(tensor.shape)
    return NamedTensor(name=name, tensor=tensor, global_shape=shape, offsets=(0,) * len(shape))


def rows(name: str, tensor: torch.Tensor, first: int, last: int) -> NamedTensor:
    """Rows first to last of a sharded tensor."""
    offsets = (first,) + (0,) * (tensor.dim() - 1)
    return NamedTensor(name=name, tensor=tensor[first:last], global_shape=tuple(tensor.shape), offsets=offsets)


def write_image(state: CapturedState) -> tuple[Slot, int]:
    """The state's image in a slot, and its length in bytes."""
    layout = image.plan(state.tensors, state.document)
    slot = Slot.create(layout.image_bytes)
    slot.begin(rank=0, generation=1, step=0)
    image_bytes = layout.write(slot.image, state.tensors, state.document)
    slot.complete(image_bytes)
    return slot, image_bytes


def write_shard_of(
    store: Store,
    checkpoint: str,
    slot: Slot,
    rank: int = 0,
    world_size: int = 1,
    *,
    read_back: ReadBack | None = ReadBack(),  # noqa: B008  # frozen
) -> ShardRecord:
    """A rank's shard, written and verified as its keeper does."""
    content = slot.image[: slot.image_bytes]
    written = write_shard(
        store,
        checkpoint,
        rank,
        world_size,
        slot.image,
        slot.image_bytes,
        {"rank": rank},
        digests=image_digests(content, parse_header(content).tensors.values()),
        read_back=read_back,
    )
    return written.shard


def save_shards(
    store: Store,
    states: list[CapturedState],
    checkpoint: str,
    read_back: ReadBack | None = ReadBack(),  # noqa: B008  # frozen
) -> tuple[ShardRecord, ...]:
    """Every rank's shard, not yet committed."""
    records = []
    for rank, state in enumerate(states):
        slot, _ = write_image(state)
        try:
            records.append(write_shard_of(store, checkpoint, slot, rank, len(states), read_back=read_back))
        finally:
            slot.close()
    return tuple(records)


def make_manifest(shards: tuple[ShardRecord, ...], step: int = 120) -> Manifest:
    return Manifest(
        run="gpt",
        generation=7,
        step=step,
        attempt=1,
        world_size=len(shards),
        shards=shards,
        identity={"config.lr": "0123", "versions": {"torch": "2"}},
        progress={"step": step, "samples": 3840},
        created_at=1764000000.25,
    )


def save(store: Store, states: list[CapturedState], step: int = 120) -> Manifest:
    """A committed checkpoint."""
    name = make_manifest((), step).name
    manifest = make_manifest(save_shards(store, states, name), step)
    store.write_atomic(f"{checkpoint_dir(name)}/{MANIFEST_FILE}", manifest.to_bytes())
    return manifest


def two_ranks() -> list[CapturedState]:
    """A state of two ranks: an uneven sharded tensor, one that is empty on rank 1, a replicated one, and odd ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=generator)
    bias = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    half = torch.randn(6, 2, generator=generator).to(torch.bfloat16)
    return [
        CapturedState(
            tensors=[
                rows("model.weight", weight, 0, 4),
                rows("model.bias", bias, 0, 1),
                rows("model.half", half, 0, 3),
                whole("model.norm", torch.arange(4.0)),
                whole("optimizer.state.weight.step", torch.tensor(3.0)),
                whole("rank.00000.rng.torch", torch.arange(16, dtype=torch.uint8)),
            ],
            document={"rank": 0, "progress": {"step": 120}},
        ),
        CapturedState(
            tensors=[
                rows("model.weight", weight, 4, 7),
                rows("model.bias", bias, 1, 1),
                rows("model.half", half, 3, 6),
                whole("model.empty", torch.empty(0, 3)),
                whole("model.mask", torch.tensor([True, False, True])),
                whole("rank.00001.rng.torch", torch.arange(16, 32, dtype=torch.uint8)),
            ],
            document={"rank": 1, "progress": {"step": 120}},
        ),
    ]


def whole_tensors(states: list[CapturedState]) -> dict[str, torch.Tensor]:
    """What a reader must find: every tensor put together."""
    result: dict[str, torch.Tensor] = {}
    for state in states:
        for named in state.tensors:
            target = result.setdefault(named.name, torch.empty(named.global_shape, dtype=named.tensor.dtype))
            window = tuple(slice(at, at + size) for at, size in zip(named.offsets, named.tensor.shape, strict=True))
            target[window] = named.tensor
    return result


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bool(_raw(left).equal(_raw(right)))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # A fresh copy: of a single element, strides that allow no other view count as contiguous too.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Damage a file in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
