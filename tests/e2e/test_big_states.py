"""States of gigabytes, and of thousands of tensors, are saved, verified, committed and restored like any other."""

from pathlib import Path

import cloudpickle
import harness
import loop_kinds
import pytest
import torch
from harness import entries

from workers.checkpoint.manifest import read_manifest
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.store import LocalStore
from workers.checkpoint.verify import verify_checkpoint
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(loop_kinds)

STEPS = 3
KILLED_AFTER = 2


def parameter_after(steps: int) -> float:
    """The momentum is 1, 1.5, 1.75, ..., and each step takes it off."""
    return -sum(2 - 0.5 ** (step - 1) for step in range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "mib"),
    [
        pytest.param(8, 64, id="64-MiB"),
        pytest.param(8, 4096, id="4-GiB"),
        pytest.param(2_500, 64, id="5000-tensors"),
        pytest.param(20_000, 5, id="20000-tiny-parameters"),
    ],
)
def test_a_state_of_this_size_is_saved_killed_and_restored(tmp_path: Path, tensors: int, mib: int) -> None:
    numel = (mib << 20) // 2 // 4 // tensors
    supervised = harness.trainer(
        tmp_path,
        "big",
        loop_kinds.big_loop,
        ranks=1,
        config={"tensors": tensors, "numel": numel, "steps": STEPS},
        cadence=None,
        snapshot_every_steps=None,
        snapshot_slots=2,
        keep_last=1,
        failpoints=[Arm(id="kill", point="step.end", when={"step": KILLED_AFTER + 1})],
        start_seconds_max=1800.0,
    )
    run_dir = supervised.fit().run_dir
    assert [entry["restored_step"] for entry in entries(run_dir, "generation")] == [0, KILLED_AFTER]
    newest = entries(run_dir, "commit")[-1]
    assert newest["step"] == STEPS
    assert newest["bytes"] >= 2 * tensors * numel * 4

    store = LocalStore(run_dir)
    assert verify_checkpoint(store, newest["checkpoint"]) == []
    (shard,) = read_manifest(store, newest["checkpoint"]).shards
    parameters = [record for record in shard.tensors if record.name.startswith("model.")]
    assert len(parameters) == tensors
    reader = CheckpointReader(store, newest["checkpoint"], 0)
    for record in (parameters[0], parameters[-1]):
        values = reader.fetch(record.name, offsets=(0,), shape=(numel,))
        assert bool((values == torch.tensor(parameter_after(STEPS))).all())
    reader.close()
