"""Stock readers open our shards, and nothing in a checkpoint is ever executed."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_samples import rows, same_bytes, save, two_ranks, whole, whole_tensors
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from workers.checkpoint.image import DTYPES
from workers.checkpoint.manifest import MANIFEST_FILE, checkpoint_dir
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState
from workers.checkpoint.verify import verify_checkpoint
from workers.errors import CheckpointDamaged


def test_stock_safetensors_reads_every_tensor_of_every_shard(tmp_path: Path) -> None:
    states = two_ranks()
    manifest = save(LocalStore(tmp_path), states)
    for state, shard in zip(states, manifest.shards, strict=True):
        with safe_open(tmp_path / checkpoint_dir(manifest.name) / shard.file, framework="pt") as file:
            assert sorted(file.keys()) == sorted(named.name for named in state.tensors)
            for named in state.tensors:
                assert same_bytes(file.get_tensor(named.name), named.tensor.clone())


def test_stock_safetensors_reads_every_element_type_we_write(tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    tensors = [whole(name, (bits % 2 if dtype is torch.bool else bits).view(dtype)) for name, dtype in DTYPES.items()]
    manifest = save(LocalStore(tmp_path), [CapturedState(tensors=tensors, document={})])
    with safe_open(tmp_path / checkpoint_dir(manifest.name) / manifest.shards[0].file, framework="pt") as file:
        for named in tensors:
            assert same_bytes(file.get_tensor(named.name), named.tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_whole_tensors_from_the_shards_of_two_ranks(tmp_path: Path) -> None:
    states = two_ranks()
    manifest = save(LocalStore(tmp_path), states)
    expected = whole_tensors(states)
    loaded = {name: torch.full_like(tensor, 1) for name, tensor in expected.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / checkpoint_dir(manifest.name)))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    for name, tensor in expected.items():
        assert same_bytes(loaded[name], tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("last", [1, 2, 3])
def test_stock_dcp_reads_a_tensor_of_which_a_rank_has_no_rows(tmp_path: Path, last: int) -> None:
    tensor = torch.arange(6.0).reshape(3, 2)
    states = [
        CapturedState(tensors=[rows("w", tensor, 0, last)], document={}),
        CapturedState(tensors=[rows("w", tensor, last, 3)], document={}),
    ]
    manifest = save(LocalStore(tmp_path), states)
    loaded = {"w": torch.zeros(3, 2)}
    reader = HuggingFaceStorageReader(str(tmp_path / checkpoint_dir(manifest.name)))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["w"].equal(tensor)


def test_the_reader_printed_in_the_format_page_reads_our_checkpoints(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    namespace: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], namespace)
    states = two_ranks()
    manifest = save(LocalStore(tmp_path), states)
    parts = list(namespace["read"](tmp_path / checkpoint_dir(manifest.name), "model.weight"))
    assert [part["offsets"] for part, _ in parts] == [[0, 0], [4, 0]]
    found = torch.cat([torch.frombuffer(bytearray(data), dtype=torch.float32) for _, data in parts]).reshape(7, 5)
    assert same_bytes(found, whole_tensors(states)["model.weight"])


class _Bomb:
    """Unpickling this creates a file."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.evidence,)


def _read_all(store: LocalStore, name: str) -> None:
    reader = CheckpointReader(store, name, 0)
    for shard in reader.manifest.shards:
        for record in shard.tensors:
            reader.fetch(record.name, offsets=record.offsets, shape=record.shape)
    reader.document()


def test_the_bomb_of_these_tests_goes_off_when_unpickled(tmp_path: Path) -> None:
    evidence = tmp_path / "executed"
    pickle.loads(pickle.dumps(_Bomb(evidence)))
    assert evidence.exists()


@pytest.mark.parametrize("where", ["shard", "tensor", "manifest", "header", "beside", "metadata"])
def test_a_pickle_planted_anywhere_in_a_checkpoint_is_never_executed(tmp_path: Path, where: str) -> None:
    evidence = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(evidence))
    store = LocalStore(tmp_path / "run")
    (tmp_path / "run").mkdir()
    manifest = save(store, two_ranks())
    directory = tmp_path / "run" / checkpoint_dir(manifest.name)
    shard = directory / manifest.shards[0].file
    match where:
        case "shard":
            shard.write_bytes(bomb)
        case "manifest":
            (directory / MANIFEST_FILE).write_bytes(bomb)
        case "header" | "tensor":
            with open(shard, "r+b") as file:
                file.seek(8 if where == "header" else manifest.shards[0].tensors[0].start)
                file.write(bomb)
        case "beside":
            for name in ("state.pt", "data.pkl", "rank-00002-of-00002.safetensors"):
                (directory / name).write_bytes(bomb)
        case "metadata":
            (directory / ".metadata").write_bytes(bomb)
    if where in ("beside", "metadata"):
        _read_all(store, manifest.name)
        assert verify_checkpoint(store, manifest.name) == []
    else:
        with pytest.raises(CheckpointDamaged):
            _read_all(store, manifest.name)
        assert verify_checkpoint(store, manifest.name) != []
    assert not evidence.exists()


def test_a_pickle_as_the_content_of_a_tensor_comes_back_as_bytes(tmp_path: Path) -> None:
    evidence = tmp_path / "executed"
    bomb = torch.frombuffer(bytearray(pickle.dumps(_Bomb(evidence))), dtype=torch.uint8)
    store = LocalStore(tmp_path)
    manifest = save(store, [CapturedState(tensors=[whole("t", bomb)], document={"t": bomb.tolist()})])
    reader = CheckpointReader(store, manifest.name, 0)
    assert reader.fetch("t", offsets=(0,), shape=bomb.shape).equal(bomb)
    assert reader.document() == {"t": bomb.tolist()}
    assert not evidence.exists()
