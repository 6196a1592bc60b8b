"""Other kinds of loops, killed and compared, bit by bit, with their own undisturbed runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loop_kinds
import pytest
from harness import entries

from workers.checkpoint.manifest import read_manifest
from workers.checkpoint.store import LocalStore
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)


def train_twice(
    tmp_path: Path, loop: Callable[[dict[str, Any]], None], kills: dict[int, int], *, ranks: int = 2
) -> tuple[Path, Path]:
    """Run directories of an undisturbed run, and of one in which a rank is killed after each step of `kills`.

    `kills` maps the step to the one that has to be restored.
    """
    # Slots for every save before the kill: none is skipped, however slow the disk is.
    protection: dict[str, Any] = {"ranks": ranks, "snapshot_slots": 4, "snapshot_every_steps": None}
    calm = harness.trainer(tmp_path, "calm", loop, **protection).fit().run_dir
    arms = [
        Arm(id=f"kill-{step}", point="step.end", when={"rank": ranks - 1, "step": step, "generation": number})
        for number, step in enumerate(kills, start=1)
    ]
    attacked = harness.trainer(tmp_path, "attacked", loop, failpoints=arms, **protection).fit().run_dir
    assert len(list((attacked / "faults").iterdir())) == len(kills)
    restored = [entry["restored_step"] for entry in entries(attacked, "generation")[1:]]
    assert restored == list(kills.values())
    assert harness.final_digests(attacked) == harness.final_digests(calm)
    return attacked, calm


def tensor_digests(run_dir: Path, name: str) -> list[str]:
    """Of every stored tensor whose name ends so, in the last checkpoint."""
    digests = harness.final_digests(run_dir)
    return [digest for (tensor, _), digest in sorted(digests.items()) if tensor.endswith(name)]


@pytest.mark.slow
def test_each_rank_of_a_ddp_loop_gets_its_own_batchnorm_statistics_back(tmp_path: Path) -> None:
    attacked, calm = train_twice(tmp_path, loop_kinds.ddp_loop, {27: 20})
    statistics = tensor_digests(attacked, "norm.running_mean")
    assert len(statistics) == 2
    assert statistics[0] != statistics[1], "the ranks' buffers are equal, so this test proves nothing"
    assert len(tensor_digests(attacked, "encode.weight")) == 1, "replicated weights are stored once"
    assert harness.consumed(attacked) == harness.consumed(calm)


@pytest.mark.slow
def test_a_single_rank_that_accumulates_gradients_continues_at_the_step_boundary(tmp_path: Path) -> None:
    attacked, calm = train_twice(tmp_path, loop_kinds.accumulating_loop, {34: 30}, ranks=1)
    consumed = harness.consumed(attacked)
    assert consumed == harness.consumed(calm)
    assert {len(step[0]) for step in consumed.values()} == {16 * loop_kinds.ACCUMULATED}
    newest = entries(attacked, "commit")[-1]["checkpoint"]
    progress = read_manifest(LocalStore(attacked), newest).progress
    assert progress["samples"] == harness.STEPS * 16 * loop_kinds.ACCUMULATED


@pytest.mark.slow
def test_a_loop_over_torchdatas_loader_continues_in_the_middle_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    assert loop_kinds.BATCHES_PER_EPOCH == 20
    train_twice(tmp_path, loop_kinds.torchdata_loop, {15: 10, 27: 20})
