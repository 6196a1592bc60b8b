"""The store in memory does what the one on disk does, and the recorder writes down what happened."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.crash_states.enumerate import Tree
from chaos.crash_states.memory_store import MemoryStore
from chaos.crash_states.model import Situation, situations
from chaos.crash_states.ops import ROOT, SyncDir, SyncFile
from chaos.crash_states.record import Log, RecordingStore
from chaos.crash_states.search import lay_out
from workers.checkpoint.files import closing_file
from workers.checkpoint.store import LocalStore

_NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a"])
_DATA = st.binary(max_size=6)
_STEPS = st.one_of(
    st.tuples(st.just("make_dir"), st.sampled_from(["d", "d/e", "a"])),
    st.tuples(st.just("create_exclusive"), _NAMES, _DATA),
    st.tuples(st.just("write_atomic"), _NAMES, _DATA),
    st.tuples(st.just("append"), _NAMES, _DATA),
    st.tuples(st.just("rename"), _NAMES, _NAMES),
    st.tuples(st.just("link"), _NAMES, _NAMES),
    st.tuples(st.just("unlink"), _NAMES),
    st.tuples(st.just("remove_tree"), _NAMES),
    st.tuples(st.just("write"), _NAMES, _DATA, st.integers(0, 5), st.integers(0, 9)),
)


def outcome(call: Callable[[], Any]) -> str:
    """'done', or the error's type: both stores refuse the same things."""
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return "done"


def do(store: LocalStore, step: tuple[Any, ...]) -> str:
    kind, *arguments = step
    if kind != "write":
        return outcome(lambda: getattr(store, kind)(*arguments))
    path, data, position, size = arguments

    def write() -> None:
        with closing_file(store.open_new(path)) as file:
            file.write_at(memoryview(data), position)
            file.truncate(size)

    return outcome(write)


def on_disk(folder: Path) -> Tree:
    return {one.name: on_disk(one) if one.is_dir() else one.read_bytes() for one in sorted(folder.iterdir())}


def _may_differ(step: tuple[Any, ...]) -> bool:
    """Renaming onto or into itself, and linking a directory, are refused in ways that systems differ in."""
    return step[0] in ("rename", "link") and step[1] in step[2]


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS.filter(lambda step: not _may_differ(step)), max_size=14))
def test_the_store_in_memory_and_the_one_on_disk_come_to_the_same(steps: list[tuple[Any, ...]]) -> None:
    memory = MemoryStore({})
    with tempfile.TemporaryDirectory() as folder:
        disk = LocalStore(Path(folder))
        for step in steps:
            first, second = do(memory, step), do(disk, step)
            assert (first == "done") == (second == "done"), (step, first, second)
        assert memory.tree() == on_disk(Path(folder))
        for path in ("a", "d", "d/a", "d/e/a"):
            assert memory.exists(path) == disk.exists(path) and memory.is_dir(path) == disk.is_dir(path)
            for names in (False, True):
                assert outcome(lambda path=path, fresh=names: memory.list_dir(path, fresh=fresh)) == outcome(  # type: ignore[misc]
                    lambda path=path, fresh=names: disk.list_dir(path, fresh=fresh)  # type: ignore[misc]
                )


@settings(max_examples=40, deadline=None)
@given(st.lists(_STEPS.filter(lambda step: not _may_differ(step)), max_size=14))
def test_what_is_recorded_is_what_was_done(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Log()
        store = RecordingStore(Path(folder), log)
        for step in steps:
            do(store, step)
        every = [*log.ops]
        nodes = {op.node for op in every if hasattr(op, "node")}
        last = list(situations(every))[-1]
        folders = [SyncDir(node) for node in nodes & last.folders]
        durable = list(situations([*every, *map(SyncFile, sorted(nodes - last.folders)), SyncDir(ROOT), *folders]))[-1]
        assert tree_of(durable, ROOT) == on_disk(Path(folder))


def tree_of(situation: Situation, folder: str) -> Tree:
    return {
        name: tree_of(situation, node) if node in situation.folders else situation.contents[node]
        for name, node in situation.names[folder].items()
    }


def test_a_tree_is_laid_out_as_it_is(tmp_path: Path) -> None:
    tree: Tree = {"d": {"e": {"a": b"1"}, "empty": {}}, "a": b""}
    lay_out(tree, tmp_path)
    assert on_disk(tmp_path) == tree
    assert MemoryStore(tree).tree() == tree


def test_names_of_temporary_files_are_numbered(tmp_path: Path) -> None:
    logs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        log = Log()
        store = RecordingStore(tmp_path / name, log)
        store.make_dir("d")
        store.write_atomic("d/a", b"1")
        store.write_atomic("d/b", b"2")
        store.create_exclusive("d/c", b"3")
        logs.append(log.ops)
    assert logs[0] == logs[1]
    assert not any(len(getattr(op, "name", "")) > 20 for op in logs[0])
