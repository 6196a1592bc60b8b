"""The manifest and sealed files: every change of any bit is noticed, and names and paths cannot be forged."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import make_manifest, save, two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardRecord,
    TensorRecord,
    checkpoint_dir,
    checkpoint_name,
    parse_checkpoint_name,
    read_manifest,
    shard_file,
)
from workers.checkpoint.sealed import seal, unseal
from workers.checkpoint.store import LocalStore
from workers.errors import CheckpointDamaged


def tensor(name: str = "model.weight") -> TensorRecord:
    return TensorRecord(
        name=name,
        dtype="BF16",
        shape=(3, 2),
        offsets=(4, 0),
        global_shape=(7, 2),
        start=4096,
        stop=4108,
        digest="00ff",
    )


def shard(rank: int = 0, world_size: int = 2, **changes: Any) -> ShardRecord:
    record = ShardRecord(
        file=shard_file(rank, world_size),
        rank=rank,
        bytes=4108,
        digest="aa55",
        verified_from="device",
        tensors=(tensor(),),
    )
    return dataclasses.replace(record, **changes)


def manifest() -> Manifest:
    return make_manifest((shard(0), shard(1)))


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_bytes(manifest().to_bytes()) == manifest()


@pytest.mark.parametrize("verified_from", ["device", "cache", "memory", "nothing"])
def test_a_manifest_says_where_each_shard_was_read_back_from(verified_from: Any) -> None:
    written = make_manifest((shard(0, verified_from=verified_from), shard(1)))
    assert Manifest.from_bytes(written.to_bytes()).shards[0].verified_from == verified_from


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_every_flipped_bit_of_a_manifest_is_noticed(data: st.DataObject) -> None:
    content = bytearray(manifest().to_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointDamaged):
        Manifest.from_bytes(bytes(content))


def test_every_truncation_of_a_manifest_is_noticed() -> None:
    content = manifest().to_bytes()
    for length in range(len(content)):
        with pytest.raises(CheckpointDamaged):
            Manifest.from_bytes(content[:length])


@given(st.binary(max_size=60) | st.text().map(str.encode) | st.integers().map(lambda n: json.dumps(n).encode()))
def test_any_bytes_at_all_are_damage_and_nothing_worse(content: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.from_bytes(content)


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("format_version", to=1), "format version 1"),
        (_set("step", to="120"), "'step' is '120'"),
        (_set("step", to=True), "'step' is True"),
        (_set("identity", to=[]), "'identity'"),
        (_set("created_at", to=None), "'created_at'"),
        (_set("world_size", to=3), "world size is 3"),
        (_set("shards", 0, "file", to="../../outside"), "'../../outside'"),
        (_set("shards", 1, "rank", to=0), r"ranks \[0, 0\]"),
        (_set("shards", 0, "verified_from", to="hope"), "'hope'"),
        (_set("shards", 0, "tensors", 0, "stop", to=5000), "lies outside"),
        (_set("shards", 0, "tensors", 0, "shape", to=[3, -2]), "'shape'"),
        (_set("shards", 0, "tensors", 0, "offsets", to=[1]), "unequal lengths"),
        (_set("shards", 0, "tensors", 0, to=7), "'name'"),
    ],
)
def test_a_sealed_manifest_with_a_wrong_field_is_damage_that_names_it(
    change: Callable[[dict[str, Any]], None], said: str
) -> None:
    content = json.loads(manifest().to_bytes())["content"]
    change(content)
    with pytest.raises(CheckpointDamaged, match=said):
        Manifest.from_bytes(seal(content))


def test_no_manifest_is_written_for_an_incomplete_set_of_shards() -> None:
    for shards in ((shard(0),), (shard(1), shard(0)), (shard(0), shard(0))):
        with pytest.raises(ValueError, match="no manifest can be written"):
            dataclasses.replace(manifest(), shards=shards).to_bytes()


def test_a_missing_manifest_means_never_committed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match="never committed"):
        read_manifest(LocalStore(tmp_path), "step-000000120-g0007-a01")


def test_a_manifest_in_another_checkpoints_directory_is_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    name = save(store, two_ranks()).name
    other = checkpoint_name(999, 7, 1)
    store.make_dir(checkpoint_dir(other))
    store.write_atomic(
        f"{checkpoint_dir(other)}/{MANIFEST_FILE}", store.read_bytes(f"{checkpoint_dir(name)}/{MANIFEST_FILE}")
    )
    assert read_manifest(store, name).step == 120
    with pytest.raises(CheckpointDamaged, match=f"belongs to checkpoint {name}"):
        read_manifest(store, other)


def test_a_checkpoint_name_is_padded_and_sorts_by_step() -> None:
    assert checkpoint_name(120, 7, 1) == "step-000000120-g0007-a01"
    assert checkpoint_name(99, 9, 9) < checkpoint_name(100, 1, 1)


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 10**4))
def test_every_checkpoint_name_is_parsed_to_what_made_it(step: int, generation: int, attempt: int) -> None:
    assert parse_checkpoint_name(checkpoint_name(step, generation, attempt)) == (step, generation, attempt)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-120-g7-a1",
        "step-0000000120-g0007-a01",
        "step-000000120-g0007-a01.tmp",
        " step-000000120-g0007-a01",
        "step-000000120-g0007-a01\n",
        "step-00000012\u0660-g0007-a01",
        "checkpoint_000012",
    ],
)
def test_other_names_are_not_checkpoints(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_a_sealed_file_is_one_line_and_readable_without_us() -> None:
    data = seal({"b": [1, 2.5, None], "a": "\u00e9"})
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert json.loads(data)["content"] == {"a": "\u00e9", "b": [1, 2.5, None]}
    assert unseal(data, "x") == {"a": "\u00e9", "b": [1, 2.5, None]}


def test_a_sealed_file_with_a_digest_that_is_not_its_own_says_so() -> None:
    with pytest.raises(CheckpointDamaged, match="the file has another digest"):
        unseal(seal({"a": 1}).replace(b'"a":1', b'"a":2'), "the file")


def test_a_sealed_file_with_equal_content_in_other_bytes_is_refused() -> None:
    data = seal({"a": "\u00e9"})
    with pytest.raises(CheckpointDamaged, match="canonical"):
        unseal(data.replace(b"u00e9", b"u00E9"), "the file")
