"""From the blocks of a shard into the tensors that they belong to, each byte digested and copied while it is at hand.

A block is taken in small pieces, so that what was digested is still in the processor's cache when it is copied.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.manifest import TensorRecord
from workers.checkpoint.read_range import Block, CachedBlock

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Bytes start to stop of a shard go to `memory`, one byte each. `digest`: of these bytes."""

    name: str
    start: int
    stop: int
    digest: str
    memory: torch.Tensor

    @classmethod
    def of(cls, record: TensorRecord, tensor: torch.Tensor) -> "Target":
        """`tensor`: contiguous, with as many bytes."""
        memory = tensor.reshape(-1).view(torch.uint8)
        return cls(name=record.name, start=record.start, stop=record.stop, digest=record.digest, memory=memory)


def runs(targets: Iterable[Target]) -> list[list[Target]]:
    """In the order of the file, divided where more than a block lies between two that nobody wants."""
    found: list[list[Target]] = []
    for target in sorted(targets, key=lambda target: target.start):
        if not found or target.start - found[-1][-1].stop > BLOCK_BYTES:
            found.append([])
        found[-1].append(target)
    return found


def scatter(blocks: Iterator[Block], run: Sequence[Target], *, digests: bool) -> str:
    """Fill all of a run from blocks that begin where it does; with `digests`, the name of a tensor that has other bytes
    than its digest says, "" if there is none. One that the blocks cut off has."""
    position = run[0].start
    ahead = iter(run)
    target = next(ahead, None)
    digester = xxhash.xxh3_128()
    for block in blocks:
        end = position + len(block)
        while target is not None and target.start < end:
            begin, stop = max(target.start, position), min(target.stop, end)
            for at in range(begin, stop, _PIECE_BYTES):
                end_of_piece = min(at + _PIECE_BYTES, stop)
                memory = target.memory[at - target.start : end_of_piece - target.start]
                piece = _fill(memory, block, at - position, end_of_piece - position)
                if digests:
                    digester.update(piece)
            if target.stop > end:
                break
            if digests and digester.hexdigest() != target.digest:
                return target.name
            target, digester = next(ahead, None), xxhash.xxh3_128()
        position = end
    return target.name if target is not None else ""


def _fill(memory: torch.Tensor, block: Block, start: int, stop: int) -> memoryview:
    """Copy these bytes of a block; returns them, from wherever they are at hand. What the block lacks is not filled."""
    if isinstance(block, CachedBlock):
        piece = memoryview(memory.numpy().data if memory.is_cpu else bytearray(stop - start))
        piece = piece[: block.read_into(piece, start)]
        if memory.is_cpu:
            return piece
    else:
        piece = block[start:stop]
    if len(piece):
        memory[: len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
    return piece
