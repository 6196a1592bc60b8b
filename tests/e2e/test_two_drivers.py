"""Two drivers on one run, each with a Ray of its own: nothing but the storage tells them of each other."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import loops
import psutil
import pytest
import ray
from harness import Run, entries, wait_for
from own_ray_script import STEP

from orchestrator.archive import RunArchive
from orchestrator.recovery import newest_committed
from workers.checkpoint.store import LocalStore
from workers.errors import EnvironmentProblem

pytestmark = pytest.mark.usefixtures("ray_cluster")

NAME = "shared"


class FirstDriver:
    """A driver process with all that it starts. `tmpdir` stands for its machine: what is local to a node lies there."""

    def __init__(self, storage: Path, tmpdir: Path, command: list[str]) -> None:
        self.run_dir = storage / NAME
        tmpdir.mkdir(exist_ok=True)
        self._log = open(storage / "first.log", "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(tmpdir)},
        )

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def all(self) -> list[psutil.Process]:
        driver = psutil.Process(self.process.pid)
        return [driver, *driver.children(recursive=True)]

    def signal(self, number: int) -> None:
        for process in self.all():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def committed(self, at_least: int) -> bool | None:
        assert self.process.poll() is None, self.log()
        started = (self.run_dir / "ledger.jsonl").exists()
        committed = [entry["step"] for entry in entries(self.run_dir, "commit")] if started else []
        return True if max(committed, default=0) >= at_least else None

    def close(self) -> None:
        if self.process.poll() is None:
            processes = self.all()
            for process in processes:
                if process.is_running():
                    process.kill()
            psutil.wait_procs(processes, timeout=10)
        self.process.wait()
        self._log.close()


Start = Callable[..., FirstDriver]
HERE = Path(__file__).parent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[FirstDriver] = []
    directories: list[str] = []

    def start_first(
        tmpdir: Path, *, stop_at: str = "-", own_ray: bool = True, pace_seconds: float = 0.05
    ) -> FirstDriver:
        if own_ray:
            directories.append(tempfile.mkdtemp(prefix="lg-ray-"))
            command = [
                str(HERE / "own_ray_script.py"),
                directories[-1],
                str(tmp_path),
                NAME,
                stop_at,
                str(pace_seconds),
            ]
        else:
            command = [str(HERE / "driver_script.py"), ray.get_runtime_context().gcs_address, str(tmp_path), NAME]
        started.append(FirstDriver(tmp_path, tmpdir, command))
        return started[-1]

    yield start_first
    for first in started:
        first.close()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def restorable(run_dir: Path) -> str:
    newest = newest_committed(RunArchive(LocalStore(run_dir)))
    assert newest is not None
    return newest.name


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", ["commit.begin", "commit.rename"])
def test_what_a_paused_driver_still_does_after_another_has_taken_over_changes_nothing(
    tmp_path: Path, reference: Path, start: Start, stop_at: str
) -> None:
    first = start(tmp_path / "elsewhere", stop_at=stop_at)
    wait_for(lambda: (first.run_dir / "faults" / "paused.json").exists() or None, 90)
    first.signal(signal.SIGSTOP)
    result = harness.trainer(tmp_path, NAME, loops.train_loop).fit()
    assert result.generation == 2
    assert entries(first.run_dir, "generation")[-1]["restored_step"] == STEP - harness.SAVE_EVERY
    newest, kept = restorable(first.run_dir), {path.name for path in (first.run_dir / "checkpoints").iterdir()}

    first.signal(signal.SIGCONT)
    first.process.wait(timeout=90)
    assert first.process.returncode != 0
    assert "workers.errors.Fenced: another driver started generation 2" in first.log()
    assert [entry["driver"] for entry in entries(first.run_dir, "fenced")] == [
        entries(first.run_dir, "coordinator")[0]["driver"]
    ]
    assert STEP not in [entry["step"] for entry in entries(first.run_dir, "commit") if entry["generation"] == 1]
    assert kept <= {path.name for path in (first.run_dir / "checkpoints").iterdir()}, "it deleted something"
    assert restorable(first.run_dir) == newest
    harness.assert_equal_runs(first.run_dir, reference)


@pytest.mark.slow
def test_a_driver_is_refused_while_another_ones_processes_live_on_the_same_machine(
    tmp_path: Path, reference: Path, start: Start
) -> None:
    first = start(Path(tempfile.gettempdir()), pace_seconds=0.6)  # so that it is at work until the other is refused
    wait_for(lambda: first.committed(harness.SAVE_EVERY), 90)
    with pytest.raises(EnvironmentProblem, match=r"processes of an earlier driver .* are still alive .*: pids \d"):
        Run(harness.trainer(tmp_path, NAME, loops.train_loop, takeover_seconds=0.5)).result()
    first.process.wait(timeout=90)
    assert first.process.returncode == 0, first.log()
    assert not entries(first.run_dir, "failure"), "the one at work was disturbed"
    harness.assert_equal_runs(first.run_dir, reference)


@pytest.mark.slow
def test_a_later_driver_of_the_same_ray_takes_over_from_one_at_work(
    tmp_path: Path, reference: Path, start: Start
) -> None:
    first = start(Path(tempfile.gettempdir()), own_ray=False)
    wait_for(lambda: first.committed(harness.SAVE_EVERY), 90)
    result = harness.trainer(tmp_path, NAME, loops.train_loop).fit()
    assert entries(result.run_dir, "generation")[-1]["restored_step"] >= harness.SAVE_EVERY
    first.process.wait(timeout=60)
    assert "another driver took it over" in first.log()
    harness.assert_equal_runs(first.run_dir, reference)
