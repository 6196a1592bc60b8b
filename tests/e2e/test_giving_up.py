"""A run that keeps failing after one checkpoint: the one before is tried, and what cannot be mended is reported."""

from pathlib import Path
from typing import Any

import harness
import loops
import pytest
from harness import entries

import workers
from workers.errors import TrainingFailed

pytestmark = pytest.mark.usefixtures("ray_cluster")

FAILS_AT = 33


@pytest.mark.slow
def test_a_checkpoint_after_which_the_run_always_fails_is_passed_over_for_the_one_before(
    tmp_path: Path, reference: Path
) -> None:
    def loop(config: dict[str, Any]) -> None:
        session = workers.get_session()
        model, optimizer, scheduler = loops.build(config, session.rank)
        data = session.data_loader(loops.Points(), global_batch_size=32, seed=3, num_workers=2)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
        session.restore()
        restored = session.step
        for batch in data:
            loops.train_step(session, model, optimizer, scheduler, batch)
            if session.step == FAILS_AT and restored != 20:
                raise FloatingPointError(f"the state of step {restored} leads nowhere")
            if session.step >= config["steps"]:
                break

    result = harness.trainer(tmp_path, "poisoned", loop, snapshot_every_steps=None).fit()
    (suspect,) = entries(result.run_dir, "probation")
    assert suspect["checkpoint"].startswith("step-000000030-")
    started = entries(result.run_dir, "generation")
    assert [(entry["restored_step"], entry["reason"]) for entry in started] == [
        (0, "start"),
        (30, "failure"),
        (20, "probation"),
    ]
    passed = [entry["checkpoint"] for entry in entries(result.run_dir, "passed_over")]
    assert passed == [suspect["checkpoint"]]
    harness.assert_equal_runs(result.run_dir, reference)


@pytest.mark.slow
def test_a_bug_at_one_step_ends_in_a_report_that_names_it_and_the_checkpoint_was_not_to_blame(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> None:
        session = workers.get_session()
        model, optimizer, scheduler = loops.build(config, session.rank)
        data = session.data_loader(loops.Points(), global_batch_size=32, seed=3)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
        session.restore()
        for batch in data:
            loops.train_step(session, model, optimizer, scheduler, batch)
            print(f"rank {session.rank} is past step {session.step}")
            if session.step == FAILS_AT and session.rank == 1:
                raise ZeroDivisionError("the user's mistake")

    supervised = harness.trainer(tmp_path, "bug", loop, snapshot_every_steps=None)
    with pytest.raises(TrainingFailed) as raised:
        supervised.fit()
    restored = [entry["restored_step"] for entry in entries(supervised.run_dir, "generation")]
    assert restored == [0, 30, 20], "the last try is made from an older checkpoint, and there is no other"
    (stopped,) = entries(supervised.run_dir, "stopped")
    message = str(raised.value)
    assert message.startswith("Traceback (most recent call last):")
    assert f"the training loop failed 3 times in a row after step {FAILS_AT}" in message
    assert message.endswith(f"The report: {stopped['report']}")
    report = Path(stopped["report"]).read_text()
    assert f"rank 1 is past step {FAILS_AT}\n" in report
    assert "rank 0 is past step" not in report
    assert f"   3 x exception of rank 1 after step {FAILS_AT}" in report
    assert "would go on from step-000000030-" in report
