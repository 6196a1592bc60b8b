"""Checkpoints on object storage: a server that speaks S3's protocol, and everything else as ever."""

import json
import shutil
from pathlib import Path

import harness
import loops
import pytest
from harness import entries
from typer.testing import CliRunner

from chaos.history import History
from chaos.judge.judge import judge
from chaos.judge.terms import Terms
from chaos.verdict import Outcome
from orchestrator.cli.app import build_app
from orchestrator.run_store import store_of
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 40


def test_killed_in_saves_and_robbed_of_its_directory_a_run_goes_on_from_object_storage(
    tmp_path: Path, s3_url: str, reference: Path
) -> None:
    arms = (
        Arm(id="rank", point="snapshot.copy", when={"rank": 1, "step": 20}),
        Arm(id="keeper", point="persist.block", when={"rank": 0, "step": 10}),
        Arm(id="coordinator", point="commit.rename", when={"step": 20}),
    )
    first = harness.trainer(
        tmp_path / "a",
        "run",
        loops.train_loop,
        config={"steps": STEPS},
        failpoints=arms,
        checkpoint_storage=s3_url,
        keep_last=2,
    ).fit()
    bucket = s3_url.partition("?")[0]
    assert str(first.committed_checkpoint).startswith(f"{bucket}/run/checkpoints/step-{STEPS:09d}-")
    assert {path.stem for path in (first.run_dir / "faults").iterdir()} == {arm.id for arm in arms}
    assert not (first.run_dir / "checkpoints").exists() and not (first.run_dir / "generations").exists()
    left = store_of(first.run_dir).list_dir("checkpoints")
    assert 2 <= len(left) <= 3  # the run may end before the last but two is deleted

    listed = CliRunner().invoke(build_app(), ["checkpoints", "verify", str(first.run_dir), "--json"])
    assert listed.exit_code == 0 and json.loads(listed.stdout)["ok"] is True

    # The node that had the run directory is lost with it.
    shutil.rmtree(first.run_dir)
    result = harness.trainer(tmp_path / "b", "run", loops.train_loop, checkpoint_storage=s3_url, keep_last=2).fit()
    (generation,) = entries(result.run_dir, "generation")
    assert (generation["source"], generation["restored_step"]) == ("checkpoint", STEPS)
    assert {entry["checkpoint"] for entry in entries(result.run_dir, "deleted")} >= set(left[:-1])
    assert harness.final_digests(result.run_dir) == harness.final_digests(reference)

    verdicts = {verdict.name: verdict for verdict in judge(result.run_dir, Terms(reference=str(reference)))}
    assert verdicts["exact"].outcome is Outcome.HELD, verdicts["exact"]
    assert History(result.run_dir).final_checkpoint is not None
