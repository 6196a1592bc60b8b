"""Shards that are odd in size: thousands of tiny tensors, next to nothing beside a lot, and no tensor at all."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_samples import flip_bit, same_bytes, save, whole
from typer.testing import CliRunner

from orchestrator.cli import app as cli
from workers.checkpoint.manifest import checkpoint_dir, read_manifest
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState
from workers.checkpoint.verify import verify_checkpoint
from workers.errors import CheckpointDamaged

TINY = 20_000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_twenty_thousand_tiny_tensors_come_back_and_a_damaged_one_is_named(store: LocalStore) -> None:
    values = torch.arange(2.0 * TINY).view(TINY, 2)
    names = [f"model.layers.{at}.scale" for at in range(TINY)]
    state = CapturedState(
        tensors=[whole(name, value) for name, value in zip(names, values, strict=True)], document={"rank": 0}
    )
    manifest = save(store, [state])
    assert read_manifest(store, manifest.name) == manifest
    assert verify_checkpoint(store, manifest.name) == []
    reader = CheckpointReader(store, manifest.name, 0)
    found = torch.stack([reader.fetch(name, offsets=(0,), shape=(2,)) for name in names])
    reader.close()
    assert same_bytes(found, values)
    shown = CliRunner().invoke(cli.build_app(), ["checkpoints", "show", str(store.root), manifest.name, "--json"])
    assert len(json.loads(shown.stdout)["shards"][0]["tensors"]) == TINY

    record = next(record for record in manifest.shards[0].tensors if record.name == names[777])
    flip_bit(store.local_path(f"{checkpoint_dir(manifest.name)}/{manifest.shards[0].file}"), record.start)
    assert [problem.tensor for problem in verify_checkpoint(store, manifest.name)] == [names[777]]
    with pytest.raises(CheckpointDamaged, match=r"layers\.777\.scale"):
        CheckpointReader(store, manifest.name, 0).fetch(names[777], offsets=(0,), shape=(2,))


def test_a_rank_with_no_tensors_and_one_with_hardly_any_save_and_restore_beside_a_large_one(store: LocalStore) -> None:
    large = torch.rand(5_000_003, generator=torch.Generator().manual_seed(1))
    states = [
        CapturedState(tensors=[whole("model.large", large)], document={"rank": 0}),
        CapturedState(tensors=[whole("rank.00001.flag", torch.tensor(True))], document={"rank": 1}),
        CapturedState(tensors=[], document={"rank": 2}),
    ]
    manifest = save(store, states)
    assert [len(shard.tensors) for shard in manifest.shards] == [1, 1, 0]
    assert verify_checkpoint(store, manifest.name) == []
    for rank in range(3):
        reader = CheckpointReader(store, manifest.name, rank)
        assert reader.document() == {"rank": rank}
        assert set(reader.names()) == {"model.large", "rank.00001.flag"}
        assert same_bytes(reader.fetch("model.large", offsets=(0,), shape=tuple(large.shape)), large)
        assert same_bytes(
            reader.fetch("model.large", offsets=(1_234_567,), shape=(3_000_001,)),
            large[1_234_567 : 1_234_567 + 3_000_001],
        )
        reader.close()
