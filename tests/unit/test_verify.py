"""Verification reads every byte and says which file and which tensor is bad."""

from pathlib import Path

import pytest
from checkpoint_samples import flip_bit, save, two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint.manifest import MANIFEST_FILE, Manifest, checkpoint_dir
from workers.checkpoint.store import LocalStore
from workers.checkpoint.verify import Problem, verify_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def manifest(store: LocalStore) -> Manifest:
    return save(store, two_ranks())


def shard_path(store: LocalStore, manifest: Manifest, rank: int) -> Path:
    return store.local_path(f"{checkpoint_dir(manifest.name)}/{manifest.shards[rank].file}")


def test_a_good_checkpoint_has_no_problems(store: LocalStore, manifest: Manifest) -> None:
    assert verify_checkpoint(store, manifest.name) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_flipped_bit_in_a_tensor_names_that_tensor_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    manifest = save(store, two_ranks())
    shard = manifest.shards[data.draw(st.integers(0, 1))]
    record = data.draw(st.sampled_from([record for record in shard.tensors if record.start < record.stop]))
    path = shard_path(store, manifest, shard.rank)
    flip_bit(path, data.draw(st.integers(record.start, record.stop - 1)), data.draw(st.integers(0, 7)))
    assert verify_checkpoint(store, manifest.name) == [
        Problem(file=shard.file, tensor=record.name, reason="its bytes are not the committed ones")
    ]


@pytest.mark.parametrize("at", [0, 8, 100, 4000])
def test_a_flipped_bit_in_the_header_is_a_problem_of_the_header(store: LocalStore, manifest: Manifest, at: int) -> None:
    flip_bit(shard_path(store, manifest, 1), at)
    [problem] = verify_checkpoint(store, manifest.name)
    assert (problem.file, problem.tensor) == (manifest.shards[1].file, None)
    assert "header" in problem.reason


def test_a_truncated_file_names_its_length_and_the_tensors_that_are_cut(store: LocalStore, manifest: Manifest) -> None:
    shard = manifest.shards[0]
    last = max(shard.tensors, key=lambda record: record.stop)
    path = shard_path(store, manifest, 0)
    path.write_bytes(path.read_bytes()[: last.start + 1])
    problems = verify_checkpoint(store, manifest.name)
    assert [problem.tensor for problem in problems] == [None, last.name]
    assert f"has {last.start + 1} bytes" in problems[0].reason


def test_a_longer_file_is_a_problem(store: LocalStore, manifest: Manifest) -> None:
    path = shard_path(store, manifest, 0)
    path.write_bytes(path.read_bytes() + b"\0")
    [problem] = verify_checkpoint(store, manifest.name)
    assert (problem.file, problem.tensor) == (manifest.shards[0].file, None)


def test_missing_files_are_all_named(store: LocalStore, manifest: Manifest) -> None:
    for rank in (0, 1):
        shard_path(store, manifest, rank).unlink()
    assert [problem.file for problem in verify_checkpoint(store, manifest.name)] == [
        shard.file for shard in manifest.shards
    ]


def test_a_checkpoint_without_or_with_a_bad_manifest_has_that_one_problem(
    store: LocalStore, manifest: Manifest
) -> None:
    path = store.local_path(f"{checkpoint_dir(manifest.name)}/{MANIFEST_FILE}")
    flip_bit(path, 200)
    [damaged] = verify_checkpoint(store, manifest.name)
    path.unlink()
    [missing] = verify_checkpoint(store, manifest.name)
    assert damaged.file == missing.file == MANIFEST_FILE
    assert "never committed" in missing.reason


def test_a_directory_in_place_of_a_shard_is_a_problem_and_not_a_crash(store: LocalStore, manifest: Manifest) -> None:
    path = shard_path(store, manifest, 0)
    path.unlink()
    path.mkdir()
    [problem] = verify_checkpoint(store, manifest.name)
    assert (problem.file, problem.tensor) == (manifest.shards[0].file, None)
