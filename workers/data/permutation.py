"""A keyed permutation of [0, size) that is computed, never stored.

Invariants: a pure function of (size, seed, epoch), the same on every machine and for every version of Python or NumPy;
a bijection for every size from 1 to 2**62; no memory for each sample, so a dataset of a billion samples opens at once.

How: an index is split into (left, right) over a grid of about sqrt(size) x sqrt(size) cells, and each round adds a
keyed hash of one half to the other, modulo that half's extent (a Feistel network over mixed radices, which can be
undone whatever the hash is, hence a bijection of the grid). The grid has fewer than sqrt(size) + 1 cells too many; an
index that lands on one of those is sent through again until it lands inside (cycle walking), which keeps the map a
bijection.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt

SIZE_MAX = 2**62
_ROUNDS = 8

Words = npt.NDArray[np.uint64]


class KeyedPermutation:
    """The order of `size` samples in one epoch.

    Raises ValueError if `size` is outside 1 to 2**62.
    """

    __slots__ = ("_columns", "_keys", "_rows", "size")

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if not 1 <= size <= SIZE_MAX:
            raise ValueError(f"size={size} is outside 1 to 2**62")
        self.size = size
        rows = math.isqrt(size - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-size // rows))
        key = hashlib.blake2b(f"lastgood order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        # One-element arrays, not scalars: NumPy warns when a scalar wraps around, which is what the hash wants.
        self._keys = np.frombuffer(key, dtype="<u8").astype(np.uint64).reshape(_ROUNDS, 1)

    def __call__(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The sample ids at these places of the order: shape (n,) in, shape (n,) out, all in [0, size).

        Raises IndexError if a place is outside [0, size).
        """
        places = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        if places.size and (places.min() < 0 or places.max() >= self.size):
            raise IndexError(f"places {places.min()} to {places.max()} reach outside [0, {self.size})")
        ids = self._mix(places.astype(np.uint64))
        outside = np.flatnonzero(ids >= self.size)
        while outside.size:
            ids[outside] = self._mix(ids[outside])
            outside = outside[ids[outside] >= self.size]
        return ids.astype(np.int64)

    def _mix(self, cells: Words) -> Words:
        left, right = cells // self._columns, cells % self._columns
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _hash(right, key) % self._rows) % self._rows
            else:
                right = (right + _hash(left, key) % self._columns) % self._columns
        return left * self._columns + right


def _hash(words: Words, key: Words) -> Words:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014), applied to the keyed words."""
    words = (words + key) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
