"""Damaged, orphaned and rolled-back checkpoints: what a run that is started again makes of them."""

import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import damage
import harness
import loops
import pytest
from harness import entries

from orchestrator import SupervisedResult
from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import GenerationRecord
from workers.checkpoint.manifest import CHECKPOINTS_DIR, checkpoint_name
from workers.checkpoint.store import LocalStore
from workers.errors import NothingVerifies
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

STOPPED_AT = 35
SAVED = (10, 20, 30, STOPPED_AT)
RAY_INDEX = "checkpoint_manager_snapshot.json"
NAME = "copy"

Damage = Callable[[Path, str], str]


@pytest.fixture(scope="session")
def stopped_run(ray_cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training that ended early, with a checkpoint of each step in SAVED."""
    storage = tmp_path_factory.mktemp("stopped")
    run_dir = harness.trainer(storage, "stopped", loops.train_loop, config={"steps": STOPPED_AT}).fit().run_dir
    assert damage.checkpoints(run_dir) == {step: checkpoint_name(step, 1, 1) for step in SAVED}
    return run_dir


@pytest.fixture
def run_dir(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(stopped_run, tmp_path / NAME)


def go_on(run_dir: Path) -> SupervisedResult:
    return harness.trainer(run_dir.parent, run_dir.name, loops.train_loop).fit()


def attack(run_dir: Path, damages: Mapping[int, Damage]) -> dict[str, str]:
    """Damage the checkpoint of each step; name -> what the reason has to match."""
    names = damage.checkpoints(run_dir)
    return {names[step]: inflict(run_dir, names[step]) for step, inflict in damages.items()}


def found_in(run_dir: Path, names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: damage.contents(run_dir / CHECKPOINTS_DIR / name) for name in names}


def assert_set_aside(run_dir: Path, expected: Mapping[str, str]) -> None:
    """In quarantine, in the ledger, each once, with a reason that names the place."""
    quarantined = RunArchive(LocalStore(run_dir)).scan().quarantined
    assert quarantined.keys() == expected.keys()
    recorded = {entry["checkpoint"]: entry["reason"] for entry in entries(run_dir, "quarantine")}
    assert recorded == quarantined
    assert len(entries(run_dir, "quarantine")) == len(expected)
    for name, pattern in expected.items():
        assert re.search(pattern, quarantined[name]), f"{quarantined[name]!r} does not say {pattern!r}"


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(
            {35: damage.flip_a_bit_of_a_tensor, 30: damage.flip_a_bit_of_the_header},
            id="flipped bits in shards",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {35: damage.cut_a_shard, 30: damage.remove_a_shard},
            id="a short and a missing shard",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {35: damage.remove_the_manifest, 30: damage.flip_a_bit_of_the_manifest},
            id="a missing and a bad manifest",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_restored(
    run_dir: Path, reference: Path, damages: dict[int, Damage]
) -> None:
    # Twice in a row: once the checkpoint of step 35 is out of the way, the damaged one of step 30 is the newest.
    expected = attack(run_dir, damages)
    before = found_in(run_dir, expected)
    result = go_on(run_dir)
    assert_set_aside(run_dir, expected)
    assert found_in(run_dir, expected) == before, "what is in quarantine was touched"
    restored = [entry for entry in entries(run_dir, "restored") if entry["generation"] > 1]
    assert {(entry["step"], entry["checkpoint"]) for entry in restored if entry["generation"] == result.generation} == {
        (20, checkpoint_name(20, 1, 1))
    }
    assert not [entry for entry in entries(run_dir, "first_step") if 1 < entry["generation"] < result.generation]
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_what_is_not_needed_may_be_missing_and_leftovers_are_cleaned_up(run_dir: Path, reference: Path) -> None:
    # Someone removed an old checkpoint, the ledger and the end of Ray's own list; a killed save and a killed deletion
    # left their remains, the save's shards being complete and of a later step than anything that was committed.
    shutil.rmtree(run_dir / CHECKPOINTS_DIR / checkpoint_name(10, 1, 1))
    (run_dir / "ledger.jsonl").unlink()
    index = run_dir / RAY_INDEX
    index.write_bytes(index.read_bytes()[:-20])
    orphan = run_dir / CHECKPOINTS_DIR / checkpoint_name(40, 1, 1)
    shutil.copytree(run_dir / CHECKPOINTS_DIR / checkpoint_name(STOPPED_AT, 1, 1), orphan)
    (orphan / "manifest.json").rename(orphan / "manifest.json.tmp")
    shutil.copytree(orphan, run_dir / "trash" / checkpoint_name(5, 1, 1))
    go_on(run_dir)
    assert {entry["checkpoint"] for entry in entries(run_dir, "restored")} == {checkpoint_name(STOPPED_AT, 1, 1)}
    assert not entries(run_dir, "quarantine")
    deleted = {entry["checkpoint"]: entry["reason"] for entry in entries(run_dir, "deleted")}
    assert deleted == {orphan.name: "its save was never completed"}
    first_commit = entries(run_dir, "commit")[0]["seq"]
    assert entries(run_dir, "deleted")[0]["seq"] > first_commit, "deleted before something newer was committed"
    assert not orphan.exists()
    assert not list((run_dir / "trash").iterdir())
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_stops_with_each_reason_and_trains_nothing(run_dir: Path) -> None:
    damages = {
        35: damage.flip_a_bit_of_a_tensor,
        30: damage.cut_a_shard,
        20: damage.remove_the_manifest,
        10: damage.flip_a_bit_of_the_manifest,
    }
    expected = attack(run_dir, damages)
    before = damage.contents(run_dir / CHECKPOINTS_DIR)
    steps = len(entries(run_dir, "first_step"))
    with pytest.raises(NothingVerifies) as raised:
        go_on(run_dir)
    message = str(raised.value)
    assert message.startswith(f"no checkpoint in {run_dir} can be restored")
    for name, pattern in expected.items():
        assert re.search(f"{name}: .*{pattern}", message)
    assert_set_aside(run_dir, expected)
    assert len(entries(run_dir, "first_step")) == steps, "something was trained"
    assert all(entry["source"] != "fresh" for entry in entries(run_dir, "generation")[1:])
    assert damage.contents(run_dir / CHECKPOINTS_DIR) == before
    # Nor does it start from scratch when it is tried again.
    with pytest.raises(NothingVerifies, match=checkpoint_name(10, 1, 1)):
        go_on(run_dir)


@pytest.mark.slow
def test_a_pickle_planted_in_a_checkpoint_is_never_executed(run_dir: Path, tmp_path: Path, reference: Path) -> None:
    marker = tmp_path / "executed"
    newest = checkpoint_name(STOPPED_AT, 1, 1)
    expected = {newest: damage.replace_a_shard_by_a_pickle(run_dir, newest, marker)}
    damage.plant_pickles(run_dir, marker)
    go_on(run_dir)
    assert not marker.exists()
    assert_set_aside(run_dir, expected)
    harness.assert_equal_runs(run_dir, reference)
    with open(run_dir / CHECKPOINTS_DIR / newest / "state.pkl", "rb") as bomb:
        pickle.load(bomb)
    assert marker.exists(), "the pickle does nothing, so this test proves nothing"


@pytest.mark.slow
def test_a_rolled_back_timeline_never_comes_back_however_high_its_steps(run_dir: Path, reference: Path) -> None:
    archive = RunArchive(LocalStore(run_dir))
    rolled_back = GenerationRecord(
        number=2,
        driver="one that is gone",
        parent=checkpoint_name(20, 1, 1),
        parent_generation=1,
        restored_step=20,
        source="checkpoint",
        reason="rollback",
        created_at=0.0,
        world_size=2,
    )
    archive.create_generation(rolled_back, seen=archive.scan())
    go_on(run_dir)
    latest = entries(run_dir, "generation")[-1]
    assert (latest["generation"], latest["restored_step"]) == (3, 20)
    assert {entry["step"] for entry in entries(run_dir, "restored") if entry["generation"] == 3} == {20}
    newer = [checkpoint_name(30, 1, 1), checkpoint_name(STOPPED_AT, 1, 1)]
    assert all((run_dir / CHECKPOINTS_DIR / name).exists() for name in newer), "there was nothing to come back"
    assert json.loads((run_dir / "generations" / "00000003.json").read_bytes())["content"]["parent_generation"] == 1
    harness.assert_equal_runs(run_dir, reference)


def test_saves_that_were_killed_or_met_a_full_disk_are_made_again_and_their_remains_deleted(
    tmp_path: Path, reference: Path
) -> None:
    arms = [
        Arm(id="killed", point="persist.block", action="kill_self", when={"rank": 1, "step": 20}),
        Arm(id="full", point="persist.block", action="enospc", when={"rank": 0, "step": 40}),
    ]
    result = harness.trainer(tmp_path, "saves", loops.train_loop, failpoints=arms, config={"pace_seconds": 0.05}).fit()
    run_dir = result.run_dir
    assert {path.stem for path in (run_dir / "faults").iterdir()} == {"killed", "full"}
    assert result.generation == 1, "training was interrupted by a save"
    (failed,) = entries(run_dir, "persist_failed")
    assert (failed["step"], failed["transient"]) == (40, True)
    committed = {entry["step"]: entry["checkpoint"] for entry in entries(run_dir, "commit")}
    assert committed[20] == checkpoint_name(20, 1, 2)
    assert committed.get(40, checkpoint_name(40, 1, 2)) == checkpoint_name(40, 1, 2), "or the one of step 50 was newer"
    skipped = {entry["step"] for entry in entries(run_dir, "save_skipped")}  # a newer one was complete before its turn
    assert committed.keys() | skipped | {40} == set(range(10, harness.STEPS + 1, 10))
    deleted = {entry["checkpoint"]: entry["reason"] for entry in entries(run_dir, "deleted")}
    assert deleted.pop(checkpoint_name(10, 1, 1)) == "older than the newest 1, and the disk is full"
    orphans = {checkpoint_name(20, 1, 1), checkpoint_name(40, 1, 1)}
    assert deleted == dict.fromkeys(orphans, "its save failed")
    left = {path.name for path in (run_dir / CHECKPOINTS_DIR).iterdir()}
    assert left == set(committed.values()) - {checkpoint_name(10, 1, 1)}
    assert not list((run_dir / "trash").iterdir())
    harness.assert_equal_runs(run_dir, reference)
