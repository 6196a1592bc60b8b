"""What several ranks are guaranteed to hold alike, in digests: silent corruption shows as a difference between them.

Every holder digests what it holds, although only one of them writes it. A save that did all of it would cost too much
for a large model, so each save looks at one window: all holders at the same one, the next save at the next.

Invariants: what is digested follows from the step and from what all holders see alike, so that they need not talk;
per set of holders a save digests at most `limit_bytes`; n windows are covered by any n + 1 saves in a row; only what
something guarantees to be equal is compared (see workers/state/pieces.py), for an alarm ends the generation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from workers.checkpoint.tensors import NamedTensor
from workers.state.pieces import Piece

LIMIT_BYTES = 256 << 20
_NOT_TAKEN = "0" * 16  # as long as a digest
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


class Holdings:
    """What several ranks hold, by the set of its holders; planned once for the same pieces."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._tensors: dict[Holders, dict[str, NamedTensor]] = {}
        for each in pieces:
            if len(each.holders) > 1:
                self._tensors.setdefault(each.holders, {})[each.named.name] = each.named
        self._sizes = {
            holders: sorted((name, named.tensor.nbytes) for name, named in tensors.items())
            for holders, tensors in self._tensors.items()
        }

    def digests(
        self, values: Mapping[str, tuple[Holders, Any]], *, turn: int, limit_bytes: int = LIMIT_BYTES
    ) -> "ReplicaDigests":
        """This turn's. `values`: by name, JSON values that must be equal too, each with the ranks between which."""
        agreed: dict[Holders, dict[str, Any]] = {}
        for name, (holders, value) in values.items():
            agreed.setdefault(holders, {})[name] = value
        sets = []
        for holders in sorted(self._tensors.keys() | agreed.keys()):
            sizes = self._sizes.get(holders, [])
            known = self._tensors.get(holders, {})
            chosen = select(sizes, turn=turn, limit_bytes=limit_bytes)
            sets.append(
                _Set(
                    holders,
                    agreed.get(holders, {}),
                    sizes,
                    [(known[each.name], each.start, each.stop) for each in chosen],
                )
            )
        return ReplicaDigests(sets)


@dataclass(frozen=True, slots=True)
class _Set:
    holders: Holders
    values: dict[str, Any]
    sizes: list[tuple[str, int]]
    chosen: list[tuple[NamedTensor, int, int]]


class ReplicaDigests:
    """One turn's digests, taken in as many goes as its tensors need; a part of the rank's document."""

    def __init__(self, sets: list[_Set]) -> None:
        self._sets = sets
        self._taken: dict[tuple[Holders, str], str] = {}

    def take(self, wanted: Callable[[str], bool]) -> None:
        """Read the tensors whose names are wanted."""
        for one in self._sets:
            for named, start, stop in one.chosen:
                if wanted(named.name):
                    self._taken[one.holders, named.name] = _digest(named.tensor, start, stop)

    def tensors(self, wanted: Callable[[str], bool]) -> list[NamedTensor]:
        """What `take` reads."""
        return [named for one in self._sets for named, _, _ in one.chosen if wanted(named.name)]

    def document(self) -> dict[str, Any]:
        """{"sets": [{"holders", "values", "layout", "digests": {name: [start, stop, digest]}}]}, a set for each set of
        holders; "layout" is a digest of the names and sizes of all they hold. What was not taken yet is zeros.
        """
        return {
            "sets": [
                {
                    "holders": list(one.holders),
                    "layout": xxhash.xxh3_64_hexdigest(repr(one.sizes).encode("utf-8", "surrogatepass")),
                    "digests": {
                        named.name: [start, stop, self._taken.get((one.holders, named.name), _NOT_TAKEN)]
                        for named, start, stop in one.chosen
                    },
                    "values": one.values,
                }
                for one in self._sets
            ]
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
