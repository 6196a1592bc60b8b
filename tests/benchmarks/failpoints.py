"""What fault points cost while none is armed: a hit beside a call of an empty function, and all of a step's hits beside
the shortest step that is worth saving at. Run: python tests/benchmarks/failpoints.py [--json]"""

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

from workers import failpoint

_CALLS = 200_000
_ROUNDS = 15
_STEP_SECONDS = 0.001
"""A step of a millisecond: shorter ones are hardly found outside of tests."""
_HITS_PER_STEP = 2
"""step.end and step.begin; a save passes a few dozen more in several processes, and writes to a disk meanwhile."""


def _empty(_name: str, _tear: object = None, /, **_context: Any) -> None:
    return


def _nanoseconds(function: Callable[..., None]) -> float:
    """Of one call, with the arguments that a step's boundary gives: the quickest round counts."""

    def call() -> None:
        function("step.end", rank=0, step=12, generation=1, rank_pid=77)

    return min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e9


def measure() -> dict[str, float]:
    """Times in nanoseconds, and the part of a millisecond's step that its hits take, 0 to 1."""
    assert not failpoint._armed, "a fault is armed"
    pairs = [(_nanoseconds(failpoint.hit), _nanoseconds(_empty)) for _ in range(3)]
    hit, empty = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "hit_nanoseconds": round(hit, 1),
        "empty_call_nanoseconds": round(empty, 1),
        "added_nanoseconds": round(hit - empty, 1),
        "hits_per_step": _HITS_PER_STEP,
        "step_ratio": _HITS_PER_STEP * hit * 1e-9 / _STEP_SECONDS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = measure()
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return
    print(f"an unarmed fault point: {found['hit_nanoseconds']:.0f} ns")
    print(f"a call of an empty function: {found['empty_call_nanoseconds']:.0f} ns")
    print(f"{_HITS_PER_STEP} points in a step of {_STEP_SECONDS * 1000:.0f} ms: {found['step_ratio']:.4%} of it")


if __name__ == "__main__":
    main()
