"""From a situation to the states that a power loss may leave: all of them, or one drawn at random.

A state is a tree of what can be reached by name from the root. All of them are enumerated directory by directory: what
is left of one does not depend on what is left of another, but for a rename from one into the other. In "all", files
that were created and removed at once are all left or all gone, and a torn block is torn in its middle; draws mix both.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from chaos.crash_states.model import Fate, Piece, Situation, content, fates, replay
from chaos.crash_states.ops import ROOT, Leftover, NameOp, Rename, entries

Tree = Mapping[str, "Tree | bytes"]
"""Name to content, of a directory. Trees share parts, and are never changed."""

EMPTY = "(created and removed)"
_SHARES = (0.0, 0.15, 0.5, 0.85, 1.0)


@dataclass(frozen=True, slots=True)
class State:
    """What is left. `digest` is equal for equal trees, in any process."""

    tree: Tree
    digest: bytes


def all_states(situation: Situation) -> Iterator[State]:
    """Each once."""
    seen: set[bytes] = set()
    across = [op for op in situation.name_ops if _is_across(op)]
    leftovers = (False, True) if any(isinstance(op, Leftover) for op in situation.name_ops) else (False,)
    contents: dict[str, list[tuple[bytes, bytes]]] = {}
    for left in leftovers:
        for chosen in _subsets(across):
            for digest, tree in _Folders(situation, chosen, left, contents).states(ROOT):
                if digest not in seen:
                    seen.add(digest)
                    yield State(tree, digest)


def draw(situation: Situation, rng: random.Random) -> State:
    """One of them. Draws differ in how much of what is not durable they leave."""
    share = rng.choice(_SHARES)
    names = {folder: dict(known) for folder, known in situation.names.items()}
    for op in situation.name_ops:
        if rng.random() >= share:
            continue
        if isinstance(op, Leftover):
            names[op.folder][op.name] = EMPTY
        else:
            replay(op, names)
    share = rng.choice(_SHARES)
    drawn: dict[str, bytes] = {EMPTY: b""}

    def bytes_of(node: str) -> bytes:
        if node not in drawn:
            drawn[node] = _draw_content(situation, node, rng, share)
        return drawn[node]

    def tree_of(folder: str) -> Tree:
        return {
            name: tree_of(node) if node in situation.folders else bytes_of(node)
            for name, node in sorted(names[folder].items())
        }

    tree = tree_of(ROOT)
    return State(tree, digest_of(tree))


def digest_of(tree: "Tree | bytes") -> bytes:
    """Of a file's bytes, or of a directory."""
    if isinstance(tree, bytes):
        return xxhash.xxh3_128_digest(tree)
    return _folder_digest((name, not isinstance(child, bytes), digest_of(child)) for name, child in tree.items())


def visible(tree: Tree) -> Tree:
    """Without what every reader has to pass over: unfinished files, and what is being deleted."""
    return {
        name: child if isinstance(child, bytes) else visible(child)
        for name, child in tree.items()
        if not name.endswith(".tmp") and name != "trash"
    }


def _draw_content(situation: Situation, node: str, rng: random.Random, share: float) -> bytes:
    parts = situation.parts.get(node, ())
    before = situation.contents[node]
    if not parts or share == 0.0:
        return before
    fate = [Fate.DONE if rng.random() < share else rng.choice(fates(part)) for part in parts]
    torn = [_tear(len(part.data), rng) if isinstance(part, Piece) else 0 for part in parts]
    return content(before, parts, fate, torn)


def _tear(size: int, rng: random.Random) -> int:
    return rng.randrange(1, size // 512) * 512 if size >= 1024 else rng.randrange(size) if size else 0


def _is_across(op: NameOp) -> bool:
    return isinstance(op, Rename) and op.folder != op.target_folder


def _subsets(ops: Sequence[NameOp]) -> Iterator[frozenset[NameOp]]:
    for flags in itertools.product((False, True), repeat=len(ops)):
        yield frozenset(itertools.compress(ops, flags))


def _folder_digest(children: "Iterator[tuple[str, bool, bytes]] | Sequence[tuple[str, bool, bytes]]") -> bytes:
    digester = xxhash.xxh3_128()
    for name, is_dir, digest in sorted(children):
        digester.update(b"%c%d:%s%s" % (b"f"[0] if not is_dir else b"d"[0], len(name), name.encode(), digest))
    return digester.digest()


class _Folders:
    """All states of each directory, given which renames between directories are done and whether leftovers are left."""

    def __init__(
        self,
        situation: Situation,
        across: frozenset[NameOp],
        left: bool,
        contents: dict[str, list[tuple[bytes, bytes]]],
    ) -> None:
        self._situation = situation
        self._across = across
        self._left = left
        self._contents = contents

    def states(self, folder: str) -> list[tuple[bytes, Tree]]:
        """(digest, tree), each once."""
        found: dict[bytes, Tree] = {}
        for names in self._names(folder):
            nodes = sorted(set(names.values()))
            for children in itertools.product(*(self._children(node) for node in nodes)):
                by_node = dict(zip(nodes, children, strict=True))
                digest = _folder_digest(
                    [(name, node in self._situation.folders, by_node[node][0]) for name, node in names.items()]
                )
                if digest not in found:
                    found[digest] = {name: by_node[node][1] for name, node in sorted(names.items())}
        return list(found.items())

    def _children(self, node: str) -> "Sequence[tuple[bytes, Tree | bytes]]":
        return self.states(node) if node in self._situation.folders else self._files(node)

    def _names(self, folder: str) -> list[dict[str, str]]:
        """All sets of names that the directory may have."""
        ops = [op for op in self._situation.name_ops if any(where == folder for where, _ in entries(op))]
        free = [op for op in ops if not _is_across(op) and not isinstance(op, Leftover)]
        found: dict[frozenset[tuple[str, str]], dict[str, str]] = {}
        for chosen in _subsets(free):
            names = {folder: dict(self._situation.names[folder])}
            for op in ops:
                if isinstance(op, Leftover):
                    if self._left:
                        names[folder][op.name] = EMPTY
                elif op in chosen:
                    replay(op, names)
                elif op in self._across and isinstance(op, Rename):
                    if op.folder == folder:
                        names[folder].pop(op.name, None)
                    else:
                        names[folder][op.target] = op.node
            found.setdefault(frozenset(names[folder].items()), names[folder])
        return list(found.values())

    def _files(self, node: str) -> list[tuple[bytes, bytes]]:
        if node == EMPTY:
            return [(digest_of(b""), b"")]
        if node not in self._contents:
            before, parts = self._situation.contents[node], self._situation.parts.get(node, ())
            found = {content(before, parts, fate) for fate in itertools.product(*map(fates, parts))}
            self._contents[node] = [(digest_of(data), data) for data in sorted(found)]
        return self._contents[node]
