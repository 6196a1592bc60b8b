"""What the file-system model allows: for short lists of operations all states are known."""

import random
from collections.abc import Iterable

from chaos.crash_states.enumerate import Tree, all_states, digest_of, draw, visible
from chaos.crash_states.model import Situation, situations
from chaos.crash_states.ops import (
    ROOT,
    Leftover,
    Link,
    Make,
    Op,
    Rename,
    Resize,
    SyncDir,
    SyncFile,
    Unlink,
    Write,
)

A, B = b"a" * 4096, b"b" * 4096
ZEROS = bytes(4096)


def after(*ops: Op) -> Situation:
    return list(situations(ops))[-1]


def left(*ops: Op) -> list[Tree]:
    """All states after these, in a fixed order."""
    return sorted((state.tree for state in all_states(after(*ops))), key=repr)


def same(found: Iterable[Tree], *expected: Tree) -> bool:
    return sorted(found, key=repr) == sorted(expected, key=repr)


def test_a_new_file_is_there_or_not_and_has_what_was_fsynced() -> None:
    make = Make(ROOT, "file", "n")
    assert same(left(make), {}, {"file": b""})
    assert same(left(make, Write("n", 0, b"x"), SyncFile("n")), {}, {"file": b"x"})
    assert same(left(make, Write("n", 0, b"x"), SyncFile("n"), SyncDir(ROOT)), {"file": b"x"})


def test_a_name_may_be_durable_before_its_bytes() -> None:
    found = left(Make(ROOT, "file", "n"), SyncDir(ROOT), Write("n", 0, b"wxyz"))
    assert same(found, {"file": b""}, {"file": b"wxyz"}, {"file": bytes(4)}, {"file": b"wx\0\0"}, {"file": b"wx"})


def test_blocks_are_lost_on_their_own() -> None:
    found = left(Make(ROOT, "file", "n"), SyncDir(ROOT), Write("n", 0, A + B))
    contents = {tree["file"] for tree in found}
    assert {b"", A, A + B, ZEROS + B, A + ZEROS, A + b"b" * 2048, ZEROS + b"b" * 2048 + bytes(2048)} <= contents
    assert B not in contents and B + A not in contents


def test_an_overwritten_block_is_old_or_new_or_torn_but_never_zeros() -> None:
    durable = [Make(ROOT, "file", "n"), Write("n", 0, A), SyncFile("n"), SyncDir(ROOT)]
    found = left(*durable, Write("n", 0, B))
    assert same(found, {"file": A}, {"file": B}, {"file": B[:2048] + A[2048:]})


def test_a_file_that_is_opened_anew_may_have_lost_its_bytes_and_not_got_new_ones() -> None:
    durable = [Make(ROOT, "file", "n"), Write("n", 0, b"old"), SyncFile("n"), SyncDir(ROOT)]
    found = left(*durable, Resize("n", 0), Write("n", 0, b"new"))
    assert {b"", b"old", b"new", bytes(3)} <= {tree["file"] for tree in found}


def test_a_rename_is_atomic_and_replaces() -> None:
    durable = [
        Make(ROOT, "one", "n1"),
        Write("n1", 0, b"1"),
        SyncFile("n1"),
        Make(ROOT, "two", "n2"),
        Write("n2", 0, b"2"),
        SyncFile("n2"),
        SyncDir(ROOT),
    ]
    found = left(*durable, Rename(ROOT, "one", ROOT, "two", "n1"))
    assert same(found, {"one": b"1", "two": b"2"}, {"two": b"1"})


def test_a_rename_into_another_directory_is_durable_with_either_of_them() -> None:
    durable = [
        Make(ROOT, "from", "d1", True),
        Make(ROOT, "to", "d2", True),
        SyncDir(ROOT),
        Make("d1", "file", "n"),
        SyncDir("d1"),
        Rename("d1", "file", "d2", "file", "n"),
    ]
    old, new = {"from": {"file": b""}, "to": {}}, {"from": {}, "to": {"file": b""}}
    assert same(left(*durable), old, new)
    assert same(left(*durable, SyncDir("d1")), new)
    assert same(left(*durable, SyncDir("d2")), new)


def test_what_came_before_a_durable_rename_on_the_same_name_does_not_come_back() -> None:
    found = left(
        Make(ROOT, "to", "d", True),
        SyncDir(ROOT),
        Make(ROOT, "file", "n"),
        Rename(ROOT, "file", "d", "file", "n"),
        SyncDir("d"),
    )
    assert same(found, {"to": {"file": b""}})


def test_operations_on_different_names_are_not_ordered() -> None:
    found = left(Make(ROOT, "first", "n1"), Make(ROOT, "second", "n2"))
    assert same(found, {}, {"first": b""}, {"second": b""}, {"first": b"", "second": b""})


def test_a_directory_can_be_lost_with_all_that_is_durable_in_it() -> None:
    ops = [Make(ROOT, "folder", "d", True), Make("d", "file", "n"), SyncFile("n"), SyncDir("d")]
    assert same(left(*ops), {}, {"folder": {"file": b""}})


def test_links_and_leftovers() -> None:
    ops = [Make(ROOT, "x.tmp", "n"), Write("n", 0, b"x"), SyncFile("n"), Link(ROOT, "x", "n"), Unlink(ROOT, "x.tmp")]
    assert same(left(*ops), {}, {"x": b"x"}, {"x.tmp": b"x"}, {"x": b"x", "x.tmp": b"x"})
    assert same(left(*ops, SyncDir(ROOT)), {"x": b"x"})
    assert same(left(Leftover(ROOT, ".probe.tmp")), {}, {".probe.tmp": b""})
    assert same(left(Leftover(ROOT, ".probe.tmp"), SyncDir(ROOT)), {})


def test_every_draw_is_one_of_all_states_and_draws_find_all() -> None:
    situation = after(
        Make(ROOT, "folder", "d", True),
        SyncDir(ROOT),
        Make("d", "x.tmp", "n"),
        Write("n", 0, b"x" * 1536),
        Rename("d", "x.tmp", "d", "x", "n"),
        Leftover("d", ".probe.tmp"),
    )
    every = {state.digest for state in all_states(situation)}
    rng = random.Random(1)
    drawn = [draw(situation, rng) for _ in range(3000)]
    assert all(digest_of(state.tree) == state.digest for state in drawn)
    # A draw may tear at any sector, of which there are two inside the file; the middle of it is one of them.
    assert every <= {state.digest for state in drawn}


def test_equal_situations_have_equal_keys_and_unequal_ones_not() -> None:
    one = after(Make(ROOT, "x", "n"), SyncDir(ROOT))
    other = after(Make(ROOT, "x", "n"), Write("n", 0, b""), SyncDir(ROOT), SyncDir(ROOT))
    assert one.key == other.key
    assert one.key != after(Make(ROOT, "x", "n")).key


def test_what_readers_pass_over_is_left_out_of_a_class() -> None:
    tree: Tree = {"trash": {"a": b""}, "checkpoints": {"x.tmp": b"", "y": b"1"}, "ledger.jsonl": b""}
    assert visible(tree) == {"checkpoints": {"y": b"1"}, "ledger.jsonl": b""}
