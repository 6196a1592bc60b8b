"""What cannot succeed stops quickly, with the user's own words first."""

from pathlib import Path

import harness
import loops
import pytest
from harness import Run, entries

from workers.errors import CallerError, EnvironmentProblem, TrainingFailed
from workers.failpoint import Arm

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_loop_that_fails_before_any_progress_stops_with_the_users_traceback_on_top(tmp_path: Path) -> None:
    supervised = harness.trainer(tmp_path, "hopeless", loops.failing_loop)
    with pytest.raises(TrainingFailed) as raised:
        supervised.fit()
    message = str(raised.value)
    assert message.startswith("Traceback (most recent call last):")
    assert "ValueError: this loop cannot work with 0" in message
    assert "in failing_loop" in message
    assert len(entries(supervised.run_dir, "failure")) == 2


@pytest.mark.slow
def test_the_first_cause_is_named_and_not_its_echo(tmp_path: Path) -> None:
    supervised = harness.trainer(tmp_path, "mistake", loops.failing_later_loop, config={"fails_after": 5})
    with pytest.raises(TrainingFailed, match="ZeroDivisionError: the user's mistake"):
        supervised.fit()
    assert {entry["rank"] for entry in entries(supervised.run_dir, "failure")} == {1}


@pytest.mark.slow
def test_max_failures_bounds_the_restarts(tmp_path: Path) -> None:
    arms = [Arm(id=f"kill-{n}", point="step.end", when={"rank": 1, "generation": n}) for n in range(1, 9)]
    supervised = harness.trainer(tmp_path, "budget", loops.train_loop, failpoints=arms, max_failures=1, cadence=None)
    with pytest.raises(TrainingFailed, match="max_failures"):
        supervised.fit()
    assert len(entries(supervised.run_dir, "failure")) == 2


@pytest.mark.slow
def test_snapshots_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    supervised = harness.trainer(tmp_path, "memory", loops.train_loop, memory_fraction_max=0.0001)
    with pytest.raises(
        EnvironmentProblem, match=r"snapshots need .* MiB .* which leaves .* MiB; lower RecoveryConfig.snapshot_slots"
    ):
        supervised.fit()
    assert not entries(supervised.run_dir, "first_step")


@pytest.mark.slow
def test_a_ray_train_call_inside_the_loop_names_its_replacement(tmp_path: Path) -> None:
    def loop(config: dict[str, object]) -> None:
        import ray.train

        ray.train.report({"loss": 1.0})

    with pytest.raises(CallerError, match=r"ray.train.report\(\) cannot work inside .* session.report"):
        Run(harness.trainer(tmp_path, "guard", loop)).result()


@pytest.mark.slow
def test_a_loop_without_a_session_runs_unprotected_and_says_so(tmp_path: Path) -> None:
    def loop(config: dict[str, object]) -> None:
        return None

    result = harness.trainer(tmp_path, "plain", loop).fit()
    assert result.committed_checkpoint is None
    assert entries(result.run_dir, "finished")[0]["protected"] is False
