"""A loss that is not a number or explodes: the run stops before it is saved, or goes on as if that batch did not
exist."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loops
import poisoned_loop
import pytest
import ray
from harness import entries

from orchestrator.archive import RunArchive
from workers.checkpoint.store import LocalStore
from workers.data.course import Course
from workers.data.journal import audit_samples
from workers.data.order import DataOrder
from workers.errors import CallerError, TrainingDiverged
from workers.failpoint import Arm

cloudpickle.register_pickle_by_value(poisoned_loop)
pytestmark = pytest.mark.usefixtures("ray_cluster")

# Before anything is saved, at the end of an epoch, in a step that is to be saved, right after a save, and an explosion
# that only a rank which remembers the losses from before its restore can tell. Steps 1, 14, 20, 21 and 31 meet them.
POISON = [[0, 0], [0, 14], [1, 6], [1, 8]]
EXPLODE = [[2, 4]]
BAD = [(0, 0), (0, 14), (1, 6), (1, 8), (2, 4)]
BAD_STEPS = [1, 14, 20, 21, 31]
CONFIG = {"poison": POISON, "explode": EXPLODE}
ROLLBACK: dict[str, Any] = {"on_bad_loss": "rollback", "loss_spike_factor": 50.0}


def skips(run_dir: Path) -> list[tuple[int, ...]]:
    return [tuple(batch) for entry in entries(run_dir, "skip") for batch in entry["batches"]]


def assert_consumed_once_without(run_dir: Path, skipped: list[tuple[int, int]]) -> None:
    """Every sample of the first batches was consumed once on the lineage, and none of the skipped ones."""
    order = DataOrder(samples=loops.SAMPLES, global_batch_size=32, seed=3, rank=0, world_size=2)
    course = Course(order, frozenset(skipped))
    position = (0, 0)
    due = []
    for _ in range(harness.STEPS):
        epoch, batch = course.following(position)
        due += [(epoch, sample) for sample in order.global_batch_ids(epoch, batch)]
        position = (epoch, batch + 1)
    consumed = [one for by_rank in harness.consumed(run_dir).values() for rank in by_rank.values() for one in rank]
    assert audit_samples(consumed, due) == audit_samples([], [])


@pytest.fixture(scope="module")
def rolled_back(ray_cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that met all bad batches, and nothing else happened to it."""
    storage = tmp_path_factory.mktemp("rolled-back")
    supervised = harness.trainer(
        storage, "rolled", poisoned_loop.train_loop, config=CONFIG, snapshot_every_steps=3, **ROLLBACK
    )
    return supervised.fit().run_dir


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_before_its_step_is_saved(tmp_path: Path) -> None:
    supervised = harness.trainer(tmp_path, "stop", poisoned_loop.train_loop, config={"poison": [[0, 14]]}, cadence=5)
    with pytest.raises(TrainingDiverged) as raised:
        supervised.fit()
    message = str(raised.value)
    assert message.startswith("Traceback (most recent call last):")
    assert "in train_loop" in message.splitlines()[1]
    assert "the loss is nan in step 15 on rank 1, which used batch 14 of epoch 0" in message
    assert 'RecoveryConfig.on_bad_loss is "stop"' in message
    (failure,) = entries(supervised.run_dir, "failure")
    assert (failure["cause"], failure["rank"]) == ("loss", 1)
    expected = {"step": 15, "what": "loss", "value": "nan", "limit": None, "batches": [[0, 14]]}
    assert {name: failure["detail"][name] for name in expected} == expected
    committed = [entry["step"] for entry in entries(supervised.run_dir, "commit")]
    assert committed[:2] == [5, 10]
    assert max(committed) < 15
    assert not entries(supervised.run_dir, "skip")


def test_after_a_rollback_the_run_goes_on_as_if_the_bad_batches_did_not_exist(
    tmp_path: Path, rolled_back: Path
) -> None:
    assert skips(rolled_back) == BAD
    failures = entries(rolled_back, "failure")
    assert [(entry["cause"], entry["detail"]["step"]) for entry in failures] == [("loss", step) for step in BAD_STEPS]
    assert failures[4]["detail"]["limit"] > 0
    for generation, step in enumerate(BAD_STEPS, start=1):
        saved = [entry["step"] for entry in entries(rolled_back, "commit") if entry["generation"] == generation]
        assert all(one < step for one in saved)
    records = RunArchive(LocalStore(rolled_back)).scan().generations
    assert [record.skip for record in records] == [tuple(BAD[:count]) for count in range(6)]
    assert [record.source for record in records[:2]] == ["fresh", "fresh"]
    assert "memory" in {record.source for record in records[2:]}
    assert_consumed_once_without(rolled_back, BAD)
    without = harness.trainer(
        tmp_path, "without", poisoned_loop.train_loop, config={"poison": [], "pass_over": POISON + EXPLODE}
    ).fit()
    assert harness.final_digests(rolled_back) == harness.final_digests(without.run_dir)


@pytest.mark.slow
def test_ranks_killed_after_a_rollback_skip_the_same_batches(tmp_path: Path, rolled_back: Path) -> None:
    arms = [
        Arm(id="before-it", point="step.end", when={"rank": 0, "generation": 3, "step": 12}),
        Arm(id="after-it", point="step.end", when={"rank": 1, "generation": 4, "step": 19}),
        Arm(id="long-after", point="step.end", when={"rank": 0, "step": 44}),
    ]
    supervised = harness.trainer(
        tmp_path,
        "killed",
        poisoned_loop.train_loop,
        config=CONFIG,
        failpoints=arms,
        snapshot_every_steps=None,  # which steps a generation does is to be known beforehand
        **ROLLBACK,
    )
    result = supervised.fit()
    assert {path.stem for path in (result.run_dir / "faults").iterdir()} == {arm.id for arm in arms}
    assert skips(result.run_dir) == BAD
    harness.assert_equal_runs(result.run_dir, rolled_back)


@pytest.mark.slow
def test_all_ranks_find_it_and_the_coordinator_dies_before_the_skip_is_in_a_generation(tmp_path: Path) -> None:
    arms = [Arm(id="coordinator", point="generation.create", action="kill_self", when={"generation": 2})]
    config = {"poison": [[0, 14]], "watch": "grad_norm"}
    result = harness.trainer(
        tmp_path, "both", poisoned_loop.train_loop, config=config, failpoints=arms, on_bad_loss="rollback"
    ).fit()
    assert [entry["resumed"] for entry in entries(result.run_dir, "coordinator")] == [False, True]
    (failure,) = entries(result.run_dir, "failure")
    assert (failure["cause"], failure["detail"]["what"]) == ("loss", "grad_norm")
    assert skips(result.run_dir) == [(0, 14)]
    assert_consumed_once_without(result.run_dir, [(0, 14)])


@pytest.mark.slow
def test_a_rollback_without_a_loader_that_can_skip_is_refused_before_training(tmp_path: Path) -> None:
    supervised = harness.trainer(
        tmp_path, "no-loader", loops.failing_later_loop, config={"fails_after": 0}, on_bad_loss="rollback"
    )
    with pytest.raises(CallerError, match=r"RecoveryConfig\.on_bad_loss is 'rollback'"):
        supervised.fit()


@pytest.mark.slow
def test_a_driver_that_adopts_the_run_skips_what_the_killed_one_skipped(tmp_path: Path, rolled_back: Path) -> None:
    run_dir = tmp_path / "adopted"
    script = Path(__file__).parent / "poisoned_driver_script.py"
    address = ray.get_runtime_context().gcs_address
    arguments = [sys.executable, str(script), address, str(tmp_path), "adopted", json.dumps(CONFIG)]
    driver = subprocess.Popen([*arguments, json.dumps(ROLLBACK)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def skipped_two() -> bool | None:
            assert driver.poll() is None, "the driver ended by itself"
            begun = (run_dir / "ledger.jsonl").exists() and {e["generation"] for e in entries(run_dir, "first_step")}
            return True if begun and 3 in begun else None

        harness.wait_for(skipped_two, 90)
    finally:
        driver.kill()
        driver.wait()
    before = skips(run_dir)
    assert before[:2] == BAD[:2]
    harness.trainer(tmp_path, "adopted", poisoned_loop.train_loop, config=CONFIG, **ROLLBACK).fit()
    assert len({entry["driver"] for entry in entries(run_dir, "coordinator")}) == 2
    assert skips(run_dir) == BAD, "a batch that the first driver skipped was tried again, or one was forgotten"
    harness.assert_equal_runs(run_dir, rolled_back)
