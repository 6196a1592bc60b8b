"""The reader: exact values or CheckpointDamaged, never anything in between."""

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoint_samples import rows, same_bytes, save, two_ranks, whole, whole_tensors, write_image
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import failpoint
from workers.checkpoint.digests import BLOCK_BYTES
from workers.checkpoint.held import HeldShard, HeldShards
from workers.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorRecord, checkpoint_dir
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState, TensorSource
from workers.errors import CallerError, CheckpointDamaged


def read_everything(source: TensorSource, manifest: Manifest) -> None:
    for shard in manifest.shards:
        for record in shard.tensors:
            source.fetch(record.name, offsets=record.offsets, shape=record.shape)
    source.document()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_parts_and_its_document_back(tmp_path: Path, rank: int) -> None:
    store = LocalStore(tmp_path)
    states = two_ranks()
    reader: TensorSource = CheckpointReader(store, save(store, states).name, rank)
    assert reader.document() == states[rank].document
    assert set(reader.names()) == set(whole_tensors(states))
    for named in states[rank].tensors:
        found = reader.fetch(named.name, offsets=named.offsets, shape=named.tensor.shape)
        assert same_bytes(found, named.tensor.clone()), named.name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_of_any_ranks_shard_is_found_whole(tmp_path: Path, rank: int) -> None:
    store = LocalStore(tmp_path)
    states = two_ranks()
    reader = CheckpointReader(store, save(store, states).name, rank)
    for name, tensor in whole_tensors(states).items():
        found = reader.fetch(name, offsets=(0,) * tensor.dim(), shape=tensor.shape)
        assert same_bytes(found, tensor), name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_window_of_a_tensor_is_put_together_from_its_parts(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    height, width = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    tensor = torch.arange(float(height * width)).reshape(height, width)
    cuts = sorted(data.draw(st.lists(st.integers(0, height), min_size=2, max_size=2)))
    bounds = [(0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], height)]
    store = LocalStore(tmp_path_factory.mktemp("run"))
    manifest = save(store, [CapturedState(tensors=[rows("w", tensor, *bound)], document={}) for bound in bounds])
    first = data.draw(st.integers(0, height))
    last = data.draw(st.integers(first, height))
    left = data.draw(st.integers(0, width))
    right = data.draw(st.integers(left, width))
    reader = CheckpointReader(store, manifest.name, data.draw(st.integers(0, 2)))
    found = reader.fetch("w", offsets=(first, left), shape=(last - first, right - left))
    assert same_bytes(found, tensor[first:last, left:right].clone())


def test_a_part_that_several_ranks_saved_is_taken_from_the_own_shard(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    states = [CapturedState(tensors=[whole("w", torch.arange(3.0))], document={}) for _ in range(2)]
    manifest = save(store, states)
    (tmp_path / checkpoint_dir(manifest.name) / manifest.shards[0].file).unlink()
    assert CheckpointReader(store, manifest.name, 1).fetch("w", offsets=(0,), shape=(3,)).equal(torch.arange(3.0))


def test_an_unknown_name_or_a_part_outside_of_the_tensor_is_a_key_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    reader = CheckpointReader(store, save(store, two_ranks()).name, 0)
    with pytest.raises(KeyError, match=r"model\.other"):
        reader.fetch("model.other", offsets=(0,), shape=(1,))
    for offsets, shape in (((0, 0), (8, 5)), ((-1, 0), (1, 5)), ((0,), (7,)), ((), ())):
        with pytest.raises(KeyError, match=r"model\.weight"):
            reader.fetch("model.weight", offsets=offsets, shape=shape)


def test_a_part_that_no_rank_saved_is_a_key_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    tensor = torch.zeros(4, 2)
    states = [
        CapturedState(tensors=[rows("w", tensor, 0, 1)], document={}),
        CapturedState(tensors=[rows("w", tensor, 3, 4)], document={}),
    ]
    reader = CheckpointReader(store, save(store, states).name, 0)
    with pytest.raises(KeyError, match="covers 4 elements"):
        reader.fetch("w", offsets=(0, 0), shape=(4, 2))


def test_a_rank_that_did_not_save_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    name = save(store, two_ranks()).name
    with pytest.raises(CallerError, match="saved by 2 ranks"):
        CheckpointReader(store, name, 2)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed_by_a_rank_that_reads_everything(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    manifest = save(store, two_ranks())
    directory = store.local_path(checkpoint_dir(manifest.name))
    file = data.draw(st.sampled_from([MANIFEST_FILE, manifest.shards[0].file]))
    content = bytearray((directory / file).read_bytes())
    # Half of the places among the tensors, which are few among the bytes of the header.
    low = data.draw(st.sampled_from([0, manifest.shards[0].tensors[0].start])) if file != MANIFEST_FILE else 0
    at = data.draw(st.integers(low, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (directory / file).write_bytes(content)
    with pytest.raises(CheckpointDamaged):
        read_everything(CheckpointReader(store, manifest.name, 0), manifest)


def test_a_flipped_bit_names_the_file_and_the_tensor_in_the_own_and_in_another_shard(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = save(store, two_ranks())
    shard = manifest.shards[0]
    record = next(record for record in shard.tensors if record.name == "model.norm")
    with open(tmp_path / checkpoint_dir(manifest.name) / shard.file, "r+b") as file:
        file.seek(record.start)
        file.write(b"\x01")
    for rank in (0, 1):
        with pytest.raises(CheckpointDamaged, match=r"rank-00000-of-00002\.safetensors .*'model\.norm'"):
            CheckpointReader(store, manifest.name, rank).fetch("model.norm", offsets=(0,), shape=(4,))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "cut in the header", "longer"])
def test_a_file_that_is_not_the_committed_one_is_damage(tmp_path: Path, damage: str, rank: int) -> None:
    store = LocalStore(tmp_path)
    manifest = save(store, two_ranks())
    path = tmp_path / checkpoint_dir(manifest.name) / manifest.shards[0].file
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "longer":
            path.write_bytes(content + b"\0")
        case _:
            path.write_bytes(content[: {"empty": 0, "cut": len(content) - 17, "cut in the header": 100}[damage]])
    with pytest.raises(CheckpointDamaged, match=r"rank-00000-of-00002.*(bytes, and \d+ were saved|is missing)"):
        read_everything(CheckpointReader(store, manifest.name, rank), manifest)


FILLED = [
    ("large", (3 * BLOCK_BYTES // 4 + 5,)),
    ("small", ()),
    ("empty", (0, 3)),
    ("wide", (300, 70_000)),
    ("other", (17,)),
]


def filled_state() -> CapturedState:
    """Several blocks, whose borders lie within tensors; tensors of no and of one element."""
    generator = torch.Generator().manual_seed(3)
    tensors = [whole(name, torch.rand(shape, generator=generator)) for name, shape in FILLED]
    return CapturedState(tensors=[*tensors, whole("bits", torch.arange(200) % 3 == 0)], document={"a": 1})


@pytest.mark.parametrize("names", [["wide", "small", "bits", "large", "other", "empty"], ["other"], ["small", "bits"]])
@pytest.mark.parametrize("where", ["stored", "in the page cache", "in memory"])
def test_tensors_are_filled_whatever_their_order_and_size(tmp_path: Path, where: str, names: list[str]) -> None:
    reader, state = filled_reader(tmp_path, where)
    saved = {named.name: named.tensor for named in state.tensors}
    found = {name: torch.empty_like(saved[name]) for name in names}
    wanted = [(name, (0,) * tensor.ndim, tensor) for name, tensor in found.items()]
    twice, turned = torch.empty_like(saved["other"]), torch.empty(70_000, 300).t()
    reader.fill([*wanted, ("other", (0,), twice), ("wide", (0, 0), turned)])
    for name, tensor in found.items():
        assert same_bytes(tensor, saved[name]), name
    assert twice.equal(saved["other"]) and turned.equal(saved["wide"])
    assert reader.document() == state.document


def filled_reader(directory: Path, where: str) -> tuple[CheckpointReader, CapturedState]:
    state, store = filled_state(), LocalStore(directory)
    if where != "in memory":
        manifest = save(store, [state])
        if where == "in the page cache":
            (directory / checkpoint_dir(manifest.name) / manifest.shards[0].file).read_bytes()
        return CheckpointReader(store, manifest.name, 0), state
    shards = held_shards([write_image(state)[0]])
    return CheckpointReader(store, "m", 0, manifest=shards.manifest(1), shards=shards), state


@pytest.mark.parametrize("name", ["large", "small", "wide", "bits"])
@pytest.mark.parametrize("where", ["stored", "in the page cache"])
def test_a_flipped_bit_of_a_tensor_that_is_filled_is_damage_that_names_it(
    tmp_path: Path, where: str, name: str
) -> None:
    reader, state = filled_reader(tmp_path, where)
    shard = reader.manifest.shards[0]
    record = next(record for record in shard.tensors if record.name == name)
    with open(tmp_path / checkpoint_dir(reader.manifest.name) / shard.file, "r+b") as file:
        file.seek(record.stop - 1)
        last = file.read(1)[0]
        file.seek(record.stop - 1)
        file.write(bytes([last ^ 1]))
    wanted = [(named.name, (0,) * named.tensor.ndim, torch.empty_like(named.tensor)) for named in state.tensors]
    with pytest.raises(CheckpointDamaged, match=rf"rank-00000-of-00001.* tensor '{name}'"):
        reader.fill(wanted)
    reader.fill([one for one in wanted if one[0] != name])


def test_a_tensor_of_another_type_than_the_shards_is_damage_and_an_unknown_one_a_key_error(tmp_path: Path) -> None:
    reader, _ = filled_reader(tmp_path, "stored")
    with pytest.raises(CheckpointDamaged, match=r"other: the shard holds torch\.float32"):
        reader.fill([("other", (0,), torch.empty(17, dtype=torch.int32))])
    with pytest.raises(KeyError, match="another"):
        reader.fill([("another", (0,), torch.empty(17))])


def test_filling_a_shard_opens_it_once_and_needs_memory_for_a_few_blocks_only(tmp_path: Path) -> None:
    opened: list[str] = []

    class Counting(LocalStore):
        def open_existing(self, path: str, *, direct: bool = False):  # type: ignore[no-untyped-def]
            opened.append(path.rpartition("/")[2])
            return super().open_existing(path, direct=direct)

    store = Counting(tmp_path)
    state = CapturedState(tensors=[whole(f"w{at}", torch.rand(2 << 20)) for at in range(32)], document={})
    manifest = save(store, [state])
    wanted = [(named.name, (0,), torch.zeros_like(named.tensor)) for named in state.tensors]
    del state
    opened.clear()
    with high_water() as used:
        CheckpointReader(store, manifest.name, 0).fill(wanted)
    assert opened == 2 * [manifest.shards[0].file], "through the page cache and past it"
    assert used() < 4 * BLOCK_BYTES + (16 << 20), "of 256 MiB"


@contextlib.contextmanager
def high_water() -> Iterator[Callable[[], int]]:
    """How much more memory this process had at most than at the start, in bytes."""

    def read(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    began = read("VmRSS")
    yield lambda: read("VmHWM") - began


def test_a_storage_error_while_reading_is_not_taken_for_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = save(store, two_ranks())
    fault = failpoint.Arm(id="fault", point="restore.read", action="eio", when={"rank": 1, "step": 120})
    failpoint.arm([fault], tmp_path / "faults")
    try:
        CheckpointReader(store, manifest.name, 0).document()
        with pytest.raises(OSError) as raised:
            CheckpointReader(store, manifest.name, 1).document()
    finally:
        failpoint.arm((), tmp_path)
    assert raised.value.errno == errno.EIO


def held_shards(slots: list[Slot], alive: Callable[[], None] = lambda: None) -> HeldShards:
    shards = {
        rank: HeldShard(
            slot=slot,
            mapped_here=False,
            bytes=slot.image_bytes,
            digest=xxhash.xxh3_128_hexdigest(slot.image[: slot.image_bytes]),
        )
        for rank, slot in enumerate(slots)
    }
    return HeldShards(0, 1, 20, shards, alive)


def test_snapshots_in_memory_are_read_in_place_by_the_same_reader(tmp_path: Path) -> None:
    states = two_ranks()
    slots = [write_image(state)[0] for state in states]
    shards = held_shards(slots)
    manifest = shards.manifest(2)
    reader = CheckpointReader(LocalStore(tmp_path), manifest.name, 0, manifest=manifest, shards=shards)
    for name, tensor in whole_tensors(states).items():
        assert same_bytes(reader.fetch(name, offsets=(0,) * tensor.dim(), shape=tensor.shape), tensor)
    assert reader.document() == states[0].document
    norm = manifest.shards[0].tensors[0]
    slots[0].image[norm.start] ^= 1
    window = reader.fetch(norm.name, offsets=norm.offsets, shape=norm.shape)
    assert window.view(torch.uint8).flatten()[0] == slots[0].image[norm.start], "a copy"


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_bit_that_flips_in_memory_is_damage_that_names_the_snapshot(tmp_path: Path, damaged: int) -> None:
    slots = [write_image(state)[0] for state in two_ranks()]
    shards = held_shards(slots)
    manifest = shards.manifest(2)
    slots[damaged].image[slots[damaged].image_bytes - 1] ^= 1
    reader = CheckpointReader(LocalStore(tmp_path), manifest.name, 0, manifest=manifest, shards=shards)
    elsewhere = {tensor.name for tensor in manifest.shards[1 - damaged].tensors}
    record = next(one for one in manifest.shards[damaged].tensors if one.start < one.stop and one.name not in elsewhere)
    with pytest.raises(CheckpointDamaged, match=f"rank {damaged}'s snapshot in memory of step 20, generation 1, is da"):
        reader.fetch(record.name, offsets=record.offsets, shape=record.shape)


def test_a_shard_that_is_not_in_memory_here_has_no_tensors(tmp_path: Path) -> None:
    states = two_ranks()
    shards = held_shards([write_image(states[0])[0]])
    reader = CheckpointReader(LocalStore(tmp_path), "m", 0, manifest=shards.manifest(2), shards=shards)
    assert set(reader.names()) == {named.name for named in states[0].tensors}


def test_a_tensor_of_an_unknown_type_is_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = save(store, [CapturedState(tensors=[whole("w", torch.zeros(1))], document={})])
    record: TensorRecord = dataclasses.replace(manifest.shards[0].tensors[0], dtype="F128")
    shard = dataclasses.replace(manifest.shards[0], tensors=(record,))
    strange = dataclasses.replace(manifest, shards=(shard,))
    with pytest.raises(CheckpointDamaged, match="'F128'"):
        CheckpointReader(store, manifest.name, 0, manifest=strange).fetch("w", offsets=(0,), shape=(1,))
