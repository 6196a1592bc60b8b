"""A bit that flips in what ranks must hold alike: it is found at the next save, which is not committed."""

from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loop_kinds
import pytest
from harness import SAVE_EVERY, entries

from orchestrator import SupervisedTrainer
from workers.errors import TrainingFailed

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)

FLIPPED_AFTER = 23
SAVED_BEFORE = FLIPPED_AFTER // SAVE_EVERY * SAVE_EVERY
FOUND_AT = SAVED_BEFORE + SAVE_EVERY


def flipping(
    storage: Path, name: str, generations: tuple[int, ...], *, ranks: int = 2, **recovery: Any
) -> SupervisedTrainer:
    """DDP of which rank 1 flips a bit of a weight after step 23, in these generations.

    Each save is waited for: were one skipped because the disk is slow, the bit would be found at a later one. Between
    saves no snapshots are compared.
    """
    config = {
        "flip": {"rank": 1, "step": FLIPPED_AFTER, "generations": generations},
        "batch": 16 * ranks,
        "wait_every_steps": SAVE_EVERY,
    }
    return harness.trainer(
        storage, name, loop_kinds.ddp_loop, config=config, ranks=ranks, **{"snapshot_every_steps": None} | recovery
    )


@pytest.fixture(scope="module")
def calm(ray_cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same training without the flip."""
    return flipping(tmp_path_factory.mktemp("calm"), "calm", ()).fit().run_dir


def test_a_bit_that_flips_on_one_of_two_ranks_is_found_at_the_next_save_and_undone(tmp_path: Path, calm: Path) -> None:
    result = flipping(tmp_path, "flipped", (1,)).fit()
    run_dir = result.run_dir
    assert result.generation == 2
    (found,) = entries(run_dir, "corruption")
    assert (found["generation"], found["step"], found["tensors"]) == (1, FOUND_AT, ["model.encode.weight"])
    assert found["odd"] == [], "of two nobody can tell which is right"
    assert found["nodes"].keys() == {"0", "1"}
    (failure,) = entries(run_dir, "failure")
    assert (failure["cause"], failure["rank"], failure["exit_code"]) == ("corruption", -1, None)
    assert failure["detail"]["tensors"] == ["model.encode.weight"]
    assert failure["failed_at"] <= failure["noticed_at"] + 1
    # Not a byte of the bad generation was committed from then on, and what is on disk is what a calm run has.
    committed = [(entry["generation"], entry["step"]) for entry in entries(run_dir, "commit")]
    assert max(step for generation, step in committed if generation == 1) == SAVED_BEFORE
    (refused,) = entries(run_dir, "save_skipped")
    assert (refused["generation"], refused["step"]) == (1, FOUND_AT)
    assert "model.encode.weight differs between ranks 0, 1" in refused["reason"]
    started = [(entry["restored_step"], entry["source"]) for entry in entries(run_dir, "generation")]
    assert started == [(0, "fresh"), (SAVED_BEFORE, "checkpoint")], "memory of the bad generation is not trusted"
    assert not entries(run_dir, "quarantine")
    harness.assert_equal_runs(run_dir, calm)


@pytest.mark.slow
def test_a_rank_that_does_it_every_time_is_named_and_stops_the_run(tmp_path: Path) -> None:
    supervised = flipping(tmp_path, "again", (1, 2, 3, 4), ranks=3)
    with pytest.raises(TrainingFailed) as raised:
        supervised.fit()
    message = str(raised.value)
    run_dir = supervised.run_dir
    found = entries(run_dir, "corruption")
    node = found[0]["nodes"]["1"]
    assert [(entry["generation"], entry["step"], entry["odd"]) for entry in found] == [
        (1, FOUND_AT, [1]),
        (2, FOUND_AT, [1]),
    ]
    assert [entry["rank"] for entry in entries(run_dir, "failure")] == [1]
    assert message.startswith(
        f"at step {FOUND_AT}, for the second time in a row, model.encode.weight differs on rank 1"
    )
    assert f"rank 1 on node {node}" in message
    assert max(entry["step"] for entry in entries(run_dir, "commit")) == SAVED_BEFORE


@pytest.mark.slow
def test_a_bit_that_flips_is_found_in_a_snapshot_that_was_only_to_stay_in_memory(tmp_path: Path, calm: Path) -> None:
    result = flipping(tmp_path, "in-memory", (1,), snapshot_every_steps=1, snapshot_slots=4).fit()
    (found,) = entries(result.run_dir, "corruption")
    assert FLIPPED_AFTER <= found["step"] < FOUND_AT
    assert entries(result.run_dir, "generation")[1]["source"] == "checkpoint"
    harness.assert_equal_runs(result.run_dir, calm)


@pytest.mark.slow
def test_with_the_check_turned_off_it_goes_unnoticed_and_another_model_comes_out(tmp_path: Path, calm: Path) -> None:
    result = flipping(tmp_path, "unchecked", (1,), check_replicas=False).fit()
    assert result.generation == 1
    assert not entries(result.run_dir, "corruption")
    assert harness.final_digests(result.run_dir) != harness.final_digests(calm)
