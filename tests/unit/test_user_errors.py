"""The errors that a user meets: one sentence each, which says what is wrong, where, and what to do."""

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from fakes import FakeLink, Loop, Rig
from peer_samples import EXCHANGE
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from torch import nn

import workers
from orchestrator import RecoveryConfig, SupervisedTrainer, driver
from workers.errors import CallerError, EnvironmentProblem, LastgoodError, StateNotStorable
from workers.failpoint import Arm
from workers.keeper import Keeper


def told(error: LastgoodError | str) -> str:
    """The message, which must be one sentence."""
    text = str(error)
    assert text
    assert "\n" not in text
    assert ". " not in text.replace("e.g. ", ""), f"more than one sentence: {text}"
    assert len(text) < 400
    return text


# ---------------------------------------------------------------- in the loop


@pytest.mark.parametrize("method", ["end_step", "end_micro_step", "save_now"])
def test_a_boundary_before_track_names_the_calls_to_make_first(method: str, rig: Rig) -> None:
    with pytest.raises(CallerError) as caught:
        getattr(rig.session(), method)()
    assert f"session.{method}() was called before session.track()" in told(caught.value)
    assert "session.restore() first" in told(caught.value)


@pytest.mark.parametrize("method", ["end_step", "end_micro_step", "save_now"])
def test_a_boundary_before_restore_says_what_would_happen(method: str, rig: Rig) -> None:
    loop = Loop(rig.session()).track()
    with pytest.raises(CallerError) as caught:
        getattr(loop.session, method)()
    assert f"session.{method}() was called before session.restore()" in told(caught.value)


def test_restore_before_track_is_refused(rig: Rig) -> None:
    with pytest.raises(CallerError) as caught:
        rig.session().restore()
    assert "session.restore() was called before session.track()" in told(caught.value)


def test_track_after_restore_is_refused(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    with pytest.raises(CallerError) as caught:
        loop.session.track(late=nn.Linear(1, 1))
    assert "track everything first" in told(caught.value)


def test_the_session_outside_a_supervised_loop_names_the_trainer() -> None:
    with pytest.raises(CallerError) as caught:
        workers.get_session()
    assert "pass the loop to SupervisedTrainer" in told(caught.value)


def test_too_little_memory_for_the_snapshots_says_needed_available_and_which_setting(rig: Rig) -> None:
    loop = Loop(rig.session(memory_fraction_max=1e-9, snapshot_slots=3, local_world_size=2)).track()
    with pytest.raises(EnvironmentProblem) as caught:
        loop.session.restore()
    text = told(caught.value)
    assert "(3 slots x 1 MiB x 2 ranks)" in text
    assert "need 6 MiB more on this node" in text
    assert "0% may be in use, which leaves 0 MiB" in text
    assert "lower RecoveryConfig.snapshot_slots, raise RecoveryConfig.memory_fraction_max, or use more nodes" in text


def test_memory_that_cannot_be_allocated_skips_the_save_and_names_the_setting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    monkeypatch.setattr("os.posix_fallocate", full)
    loop.next_batch()  # training goes on
    assert "step 1 is not saved" in caplog.text
    assert "lower RecoveryConfig.snapshot_slots" in caplog.text


class Unstorable:
    def state_dict(self) -> dict[str, Any]:
        return {"hooks": [{"callback": print}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_tracked_object_whose_state_cannot_be_stored_is_named_with_its_key(rig: Rig) -> None:
    with pytest.raises(StateNotStorable) as caught:
        rig.session().track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, data=None, mine=Unstorable())
    assert told(caught.value).startswith("mine.hooks.0.callback: ")


def test_a_loader_that_cannot_be_resumed_names_two_that_can(rig: Rig) -> None:
    loader = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(CallerError) as caught:
        rig.session().track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, data=loader)
    text = told(caught.value)
    assert text.startswith("data: the loader of type DataLoader is iterable, but is not resumable")
    assert "use session.data_loader(...) or torchdata's StatefulDataLoader" in text


def test_a_shape_that_changed_since_the_checkpoint_is_named(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    rig.keeper.messages("snapshot")
    order = rig.keeper.commit(rig.run_dir, 1)
    changed = Loop(rig.session(restore=order))
    changed.model[0] = nn.Linear(1, 5)
    changed.optimizer = torch.optim.SGD(changed.model.parameters(), lr=0.01, momentum=0.9)
    changed.track()
    with pytest.raises(CallerError) as caught:
        changed.session.restore()
    text = told(caught.value)
    assert "0.weight" in text
    assert "(4, 1)" in text
    assert "(5, 1)" in text


def test_a_keeper_that_never_answers_is_named_with_its_address(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.snapshots._CONNECT_SECONDS", 0.05)
    loop = Loop(rig.session(keeper_address="lastgood-not-there")).track()
    with pytest.raises(ConnectionError, match="the keeper of this node does not answer at 'lastgood-not-there'"):
        loop.session.restore()


# ---------------------------------------------------------------- storage and machine


def test_a_storage_path_that_cannot_be_written_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as caught:
        driver.prepare_run_dir(tmp_path / "file" / "run")
    text = told(caught.value)
    assert text.startswith(f"RunConfig.storage_path: {tmp_path}/file/run cannot be written (Not a directory)")
    assert "choose a directory that this user may write on every node" in text


def test_checkpoint_storage_that_cannot_be_written_is_named_with_the_setting(tmp_path: Path, s3_url: str) -> None:
    url = s3_url.replace("bucket-", "no-bucket-")
    with pytest.raises(EnvironmentProblem) as caught:
        driver.prepare_storage(tmp_path, url)
    place = f"{url.partition('?')[0]}/{tmp_path.name}"
    assert told(caught.value).startswith(f"RecoveryConfig.checkpoint_storage: {place} cannot be written")


def test_a_full_disk_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        driver.prepare_run_dir(tmp_path)


@pytest.fixture
def lone_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A keeper on a node that does not see what the driver made."""
    monkeypatch.setattr("workers.keeper.Link", FakeLink)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keeper = Keeper(
        run=uuid.uuid4().hex[:8],
        driver="d",
        node="n7",
        run_dir=str(tmp_path / "run"),
        coordinator="c",
        takeover_seconds=0.1,
        read_back=None,
        exchange=EXCHANGE,
    )
    yield keeper
    keeper.close()


def test_storage_that_a_node_does_not_see_is_named_with_path_and_node(lone_keeper: Keeper, tmp_path: Path) -> None:
    problem = lone_keeper._introduce().problem
    assert problem is not None
    assert problem.startswith(f"RunConfig.storage_path: {tmp_path}/run, which the driver made, is not there on node n7")
    assert "use a directory that all nodes share" in told(problem)
    (tmp_path / "run" / "generations").mkdir(parents=True)
    assert lone_keeper._introduce().problem is None


def test_processes_of_an_earlier_driver_that_will_not_end_are_named(lone_keeper: Keeper) -> None:
    lone_keeper._predecessors = [11, 12]
    problem = lone_keeper._introduce().problem
    assert problem is not None
    assert "pids 11, 12; end them, or raise RecoveryConfig.takeover_seconds" in told(problem)


@pytest.mark.parametrize("version", ["2.10.0", "2.59.9", "2.61.0", "3.0.0rc1"])
def test_a_ray_version_out_of_range_is_refused_naming_both(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    with pytest.raises(EnvironmentProblem) as caught:
        driver.check_ray_version()
    text = told(caught.value)
    assert text.startswith(f"Ray {version} is installed, but lastgood supports ")
    assert "<2.61" in text
    assert ">=2.60" in text


@pytest.mark.parametrize("version", ["2.60.0", "2.60.7", "2.60.1rc1"])
def test_a_ray_version_in_range_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    driver.check_ray_version()


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if the driver goes as far as to look at the cluster."""

    def started(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr(driver, "stop_predecessor", started)
    monkeypatch.setattr(driver, "start_coordinator", started)
    monkeypatch.setattr(ray, "init", started)


@pytest.mark.usefixtures("nothing_starts")
def test_the_ray_version_is_checked_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.10.0")
    trainer = SupervisedTrainer(print, run_config=RunConfig(name="run", storage_path=str(tmp_path)))
    with pytest.raises(EnvironmentProblem):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cadence", [0, -1, 2.5, "20", True]),
        ("save_overhead_max", [0, -0.1, 1.5, "much", True]),
        ("failures_per_node_day", [0, -1, float("inf"), "few", None]),
        ("keep_last", [0, None, 1.5]),
        ("keep_last_min", [0, 4, None]),
        ("max_failures", [-1, "3", 0.5, {"signal": -1}, {"signals": 3}, {"drain": 3}]),
        ("save_stalled_seconds", [0, None]),
        ("unprotected_seconds_max", [0, -1, float("inf"), "60", True]),
        ("on_unprotected", ["ignore", None]),
        ("verify_saves", [None, 1, "yes"]),
        ("verify_bytes_per_second_max", [0, -1, float("inf"), "1e9", True]),
        ("snapshot_slots", [1, 0, None]),
        ("snapshot_every_steps", [0, -1, 2.5, "20", True]),
        ("snapshot_overhead_max", [0, 1.1, float("nan"), "0.1", True]),
        ("memory_fraction_max", [0, 1.1, -0.5, float("nan"), "0.9"]),
        ("save_timeout_seconds", [0, -1, float("nan"), float("inf"), None]),
        ("collective_timeout_seconds", [0, "600"]),
        ("takeover_seconds", [0, -3]),
        ("preload", ["torch", ["torch"], (1,)]),
        ("volatile", ["config.steps", ["config.steps"], (None,)]),
        ("failpoints", [[], ("kill",), Arm(id="a", point="b")]),
    ],
)
def test_a_recovery_setting_that_cannot_work_is_named_with_its_value(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(CallerError) as caught:
            RecoveryConfig(**{field: value})
        assert told(caught.value).startswith(f"RecoveryConfig.{field} is {value!r}; it has to be ")


def test_recovery_settings_at_their_limits_are_accepted() -> None:
    RecoveryConfig(cadence=1, keep_last=1, max_failures=0, memory_fraction_max=1, save_timeout_seconds=0.1)
    RecoveryConfig(
        cadence=None,
        save_overhead_max=None,
        snapshot_overhead_max=None,
        max_failures=None,
        verify_saves=False,
        verify_bytes_per_second_max=1,
    )
    RecoveryConfig(snapshot_every_steps=1, snapshot_overhead_max=1)
    RecoveryConfig(snapshot_every_steps=None)
    RecoveryConfig(keep_last=2, keep_last_min=2, max_failures={"signal": 0, "hang": 9}, unprotected_seconds_max=1)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"failure_config": FailureConfig(max_failures=3)}, "RecoveryConfig(max_failures=...)"),
        ({"checkpoint_config": CheckpointConfig(num_to_keep=2)}, "RecoveryConfig(keep_last=...)"),
        ({"storage_filesystem": object()}, "a path that every node can open as a directory"),
        ({"storage_path": "s3://bucket/runs"}, "a directory that all nodes share"),
    ],
)
def test_a_run_setting_that_conflicts_is_refused_naming_what_to_use_instead(
    settings: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    run_config = RunConfig(**{"name": "run", "storage_path": str(tmp_path), **settings})
    with pytest.raises(CallerError) as caught:
        SupervisedTrainer(print, run_config=run_config)
    text = told(caught.value)
    assert text.startswith(f"RunConfig.{next(iter(settings))} is ")
    assert wanted in text


def test_settings_of_ray_that_say_what_is_done_anyway_are_accepted(tmp_path: Path) -> None:
    run_config = RunConfig(
        name="run", storage_path=str(tmp_path), failure_config=FailureConfig(), checkpoint_config=CheckpointConfig()
    )
    assert SupervisedTrainer(print, run_config=run_config).run_dir == tmp_path / "run"


def test_no_workers_are_refused() -> None:
    with pytest.raises(CallerError) as caught:
        SupervisedTrainer(print, scaling_config=ScalingConfig(num_workers=0))
    assert told(caught.value).startswith("ScalingConfig.num_workers is 0")


@pytest.mark.parametrize("loop", [5, None, "train"])
def test_a_loop_that_is_no_function_is_refused(loop: Any, tmp_path: Path) -> None:
    trainer = SupervisedTrainer(loop, run_config=RunConfig(name="run", storage_path=str(tmp_path)))
    with pytest.raises(CallerError) as caught:
        trainer.fit()
    assert told(caught.value) == f"train_loop_per_worker is {loop!r}; it has to be a function"


@pytest.mark.usefixtures("nothing_starts")
def test_a_loop_that_cannot_be_pickled_says_what_to_do(tmp_path: Path) -> None:
    lock = threading.Lock()

    def loop() -> None:
        lock.acquire()

    trainer = SupervisedTrainer(loop, run_config=RunConfig(name="run", storage_path=str(tmp_path)))
    with pytest.raises(CallerError) as caught:
        trainer.fit()
    text = told(caught.value)
    assert "cannot be pickled (TypeError: " in text
    assert "create such objects inside the loop" in text
