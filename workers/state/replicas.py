"""What several ranks are guaranteed to hold alike, in digests: silent corruption shows as a difference between them.

Every holder digests what it holds, although only one of them writes it. A save that did all of it would cost too much
for a large model, so each save looks at one window: all holders at the same one, the next save at the next.

Invariants: what is digested follows from the step and from what all holders see alike, so that they need not talk;
per set of holders a save digests at most `limit_bytes`; n windows are covered by any n + 1 saves in a row; only what
something guarantees to be equal is compared (see workers/state/pieces.py), for an alarm ends the generation.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from workers.state.pieces import Piece

LIMIT_BYTES = 256 << 20
_ALIGNMENT_BYTES = 8  # the largest element, so that no window ends within one

Holders = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start` to `stop` (exclusive) of what this rank holds of a tensor, in row-major order."""

    name: str
    start: int
    stop: int


def turn_of(step: int, save_every_steps: int | None) -> int:
    """Which turn it is at `step`: counts the periodic saves; if there are none, any number that the step determines.

    A loop that saves when it likes gives no order to go by; then each save looks at a window drawn by chance.
    """
    if save_every_steps is None:
        return xxhash.xxh3_64_intdigest(step.to_bytes(8, "little"))
    return step // save_every_steps


def select(sizes: Sequence[tuple[str, int]], *, turn: int, limit_bytes: int = LIMIT_BYTES) -> list[Range]:
    """The window of this turn over tensors of these names and sizes in bytes, laid end to end."""
    if limit_bytes < _ALIGNMENT_BYTES or limit_bytes % _ALIGNMENT_BYTES:
        raise ValueError(f"limit_bytes is {limit_bytes}; it has to be a positive multiple of {_ALIGNMENT_BYTES}")
    starts: list[int] = []
    total = 0
    for _, size in sizes:
        starts.append(_round_up(total))
        total = starts[-1] + size
    if total == 0:
        return []
    windows = -(-total // limit_bytes)
    width = _round_up(-(-total // windows))
    index = (turn - _delay(turn // windows)) % windows
    low, high = index * width, (index + 1) * width
    found = [
        Range(name, max(low - start, 0), min(high - start, size))
        for (name, size), start in zip(sizes, starts, strict=True)
    ]
    return [each for each in found if each.start < each.stop]


def _delay(rounds: int) -> int:
    """By how many windows the rotation is behind after so many rounds: none or one more each, at an irrational rate.

    If every second save, say, is skipped because the disk takes two intervals for one, a plain rotation would leave the
    same windows out for ever. No rhythm keeps in step with the golden ratio: this is floor(rounds / 1.618...).
    """
    return (math.isqrt(5 * rounds * rounds) - rounds) // 2


def describe(
    pieces: Iterable[Piece],
    values: Mapping[str, tuple[Holders, Any]],
    *,
    turn: int,
    limit_bytes: int = LIMIT_BYTES,
) -> dict[str, Any]:
    """This turn's digests, as a part of the rank's document.

    `values`: by name, JSON values that must be equal too, each with the ranks between which. The result:
    {"sets": [{"holders", "values", "layout", "digests": {name: [start, stop, digest]}}]}, a set for each set of
    holders; "layout" is a digest of the names and sizes of all they hold.
    """
    shared: dict[Holders, list[Piece]] = {}
    for each in pieces:
        if len(each.holders) > 1:
            shared.setdefault(each.holders, []).append(each)
    agreed: dict[Holders, dict[str, Any]] = {}
    for name, (holders, value) in values.items():
        agreed.setdefault(holders, {})[name] = value
    sets = [
        {
            "holders": list(holders),
            **_digests(shared.get(holders, []), turn, limit_bytes),
            "values": agreed.get(holders, {}),
        }
        for holders in sorted(shared.keys() | agreed.keys())
    ]
    return {"sets": sets}


def _digests(pieces: list[Piece], turn: int, limit_bytes: int) -> dict[str, Any]:
    tensors = {each.named.name: each.named.tensor for each in pieces}
    sizes = sorted((name, tensor.nbytes) for name, tensor in tensors.items())
    return {
        "layout": xxhash.xxh3_64_hexdigest(repr(sizes).encode("utf-8", "surrogatepass")),
        "digests": {
            each.name: [each.start, each.stop, _digest(tensors[each.name], each.start, each.stop)]
            for each in select(sizes, turn=turn, limit_bytes=limit_bytes)
        },
    }


def _digest(tensor: torch.Tensor, start: int, stop: int) -> str:
    """Of the bytes from `start` to `stop` of a tensor on any device; copies no more than the rows that they are in."""
    if tensor.ndim == 0:
        tensor = tensor.reshape(1)
    row_bytes = tensor.nbytes // tensor.shape[0]
    first, last = start // row_bytes, -(-stop // row_bytes)
    elements = tensor[first:last].contiguous().reshape(-1)
    size, skipped = tensor.element_size(), first * row_bytes
    part = elements[(start - skipped) // size : (stop - skipped) // size]
    return xxhash.xxh3_64_hexdigest(part.cpu().view(torch.uint8).numpy().data)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
