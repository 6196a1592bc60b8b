"""What a power loss may leave of saves that others make: found by the same enumeration, from what strace shows of them.

Each is judged by its own word: what it saved, and said so, has to be there and load, and what loads has to be what was
saved. There is no ladder: whoever uses it names a directory.
"""

import contextlib
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chaos.crash_states import peer_dcp, peer_ray
from chaos.crash_states.enumerate import draw
from chaos.crash_states.model import situations
from chaos.crash_states.ops import Link, Make, Mark, Op, Rename, SyncDir, Unlink, describe, entries
from chaos.crash_states.search import lay_out
from chaos.crash_states.strace_import import NotTraceable, trace

PEERS = ("torch.distributed.checkpoint", "Ray Train's index of checkpoints")
_DRAWS = 6

Promised = Mapping[str, tuple[frozenset[int], bool]]
"""Name to the versions that it may have, and whether one of them has to be there."""


def look_at_peer(name: str, seed: int) -> dict[str, Any]:
    """Record it, and try the states that it may leave. `skipped` says why that could not be done."""
    look = {PEERS[0]: _look_at_dcp, PEERS[1]: _look_at_ray}[name]
    report: dict[str, Any] = {"name": name, "skipped": "", "states": 0, "violations": 0, "detail": "", "kinds": {}}
    with tempfile.TemporaryDirectory(prefix="lastgood-crash-states-peer-") as folder, _silence():
        try:
            found = look(Path(folder), seed)
        except NotTraceable as error:
            return report | {"skipped": str(error)}
    kinds = Counter(kind for kind, _ in found if kind)
    first = {kind: detail for kind, detail in reversed(found) if kind}
    detail = "; ".join(f"{kind}: {first[kind]}" for kind in sorted(first)) or "none loses or changes what was saved"
    return report | {"states": len(found), "violations": kinds.total(), "detail": detail, "kinds": dict(kinds)}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Of loads that fail there are hundreds, and each would be logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _look_at_dcp(folder: Path, seed: int) -> list[tuple[str, str]]:
    root = _root(folder)
    ops = trace([sys.executable, peer_dcp.__file__, str(root)], root)

    def judge(state: Path, promised: Promised) -> tuple[str, str]:
        for name, (versions, needed) in promised.items():
            loaded = _load(state / name)
            if isinstance(loaded, str):
                if needed and len(versions) > 1:
                    return "lost while saved over", f"neither the old one nor the new one loads: {loaded}"
                if needed:
                    return "lost", f"a checkpoint whose save had returned does not load: {loaded}"
            elif loaded not in versions:
                return "wrong", f"{name} loads, with values that were never saved"
        return "", ""

    return _both(ops, _versions_by_directory, judge, folder, seed)


def _load(path: Path) -> int | str:
    """The version that is there, -1 if its values are no version's; an error's name if it does not load."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {name: torch.full_like(tensor, -7.0) for name, tensor in peer_dcp.state_of(0).items()}
    try:
        load(state, checkpoint_id=path)
    except (Exception, CheckpointException) as error:  # whatever it says of a file that it cannot read
        return type(error).__name__
    version = int(state["step"])
    saved = peer_dcp.state_of(version)
    return version if all(torch.equal(state[name], saved[name]) for name in saved) else -1


def _look_at_ray(folder: Path, seed: int) -> list[tuple[str, str]]:
    root = _root(folder)
    ops = trace([sys.executable, "-m", peer_ray.__name__, str(root)], root)

    def judge(state: Path, promised: Promised) -> tuple[str, str]:
        ((versions, needed),) = promised.values() or [(frozenset(), False)]
        loaded = _latest(state)
        if isinstance(loaded, str):
            return ("does not start", f"{loaded} is raised where the index is read") if versions else ("", "")
        if needed and loaded not in versions:
            return "lost", f"its newest checkpoint is {loaded}, and {min(versions)} was registered"
        return "", ""

    return _both(ops, _versions_of_index, judge, folder, seed)


def _latest(root: Path) -> int | str:
    """Which checkpoint the index calls the newest, 0 for none; what is said if it cannot be read."""
    try:
        kept = peer_ray.manager(root)
    except Exception as error:  # as above
        return type(error).__name__
    latest = kept.latest_checkpoint_result
    return int(latest.metrics["step"]) if latest is not None else 0


def _both(
    ops: list[Op],
    promise: Callable[[Promised, Mark], Promised],
    judge: Callable[[Path, Promised], tuple[str, str]],
    folder: Path,
    seed: int,
) -> list[tuple[str, str]]:
    """With what POSIX owes, and on a file system where each name is durable at once, as some are nearly: what is lost
    there is lost for want of an fsync of a file, or because it is overwritten."""
    at_once: list[Op] = []
    for op in ops:
        at_once.append(op)
        if isinstance(op, Make | Link | Unlink | Rename):
            at_once += [SyncDir(where) for where, _ in entries(op)]
    strict = list(_judged(ops, promise, judge, folder, seed))
    lenient = [
        (kind and f"{kind}, names durable at once", told)
        for kind, told in _judged(at_once, promise, judge, folder, seed)
    ]
    return strict + lenient


def _judged(
    ops: list[Op],
    promise: Callable[[Promised, Mark], Promised],
    judge: Callable[[Path, Promised], tuple[str, str]],
    folder: Path,
    seed: int,
) -> Iterator[tuple[str, str]]:
    """(kind of violation or "", what was seen), of each different state."""
    rng = random.Random(seed)
    promised: Promised = {}
    seen: set[tuple[bytes, str]] = set()
    for situation in situations(ops):
        if isinstance(situation.last, Mark):
            promised = promise(promised, situation.last)
        for _ in range(_DRAWS):
            state = draw(situation, rng)
            if (state.digest, repr(promised)) in seen:
                continue
            seen.add((state.digest, repr(promised)))
            with tempfile.TemporaryDirectory(dir=folder) as laid_out:
                lay_out(state.tree, Path(laid_out))
                kind, detail = judge(Path(laid_out), promised)
            last = describe(situation.last) if situation.last is not None else ""
            yield kind, f"{detail} (after: {last})"


def _versions_by_directory(promised: Promised, mark: Mark) -> Promised:
    name, _, number = str(mark.facts["name"]).rpartition("-")
    return _after(promised, name, int(number), mark.kind)


def _versions_of_index(promised: Promised, mark: Mark) -> Promised:
    return _after(promised, "index", int(mark.facts["name"]), mark.kind)


def _after(promised: Promised, name: str, version: int, kind: str) -> Promised:
    versions, needed = promised.get(name, (frozenset(), False))
    if kind == "saved":
        return {**promised, name: (frozenset({version}), True)}
    return {**promised, name: (versions | {version}, needed)}


def _root(folder: Path) -> Path:
    root = folder / "recorded"
    root.mkdir()
    return root
