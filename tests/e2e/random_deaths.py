"""Kills the supervisor's own parts at random moments, alone or with a rank, and compares what comes out.

`python random_deaths.py [--trials N] [--seed S] [--victim NAME ...]`. A trial is decided by its seed, which is printed
first: what dies, after which save, and how long after it; the machine's own timing does the rest.
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import harness
import loops
import psutil
import ray
from harness import entries, wait_for

cloudpickle.register_pickle_by_value(loops)

VICTIMS = ("coordinator", "keeper", "zygote", "agent", "driver", "head")
ATTACKS_MAX = 2
COMMIT_SECONDS = 60.0
DELAY_SECONDS_MAX = 0.6  # about as long as from one save to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """After `commits` saves and `delay_seconds` more, `victim` dies, with a rank or alone."""

    victim: str
    with_rank: bool
    commits: int
    delay_seconds: float


def plan(seed: int, victims: tuple[str, ...] = VICTIMS, with_rank: bool | None = None) -> list[Attack]:
    rng = random.Random(seed)
    commits = sorted(rng.sample(range(1, harness.STEPS // harness.SAVE_EVERY - 1), rng.randint(1, ATTACKS_MAX)))
    return [
        Attack(
            victim=rng.choice(victims),
            with_rank=rng.random() < 0.5 if with_rank is None else with_rank,
            commits=count,
            delay_seconds=rng.uniform(0, DELAY_SECONDS_MAX),
        )
        for count in commits
    ]


def run_trial(attacks: list[Attack], storage: Path, name: str, reference: Path) -> None:
    """Train under attack to the end, with as many drivers as it takes; AssertionError if the result differs."""
    driver = _Driver(storage, name, attacks)
    try:
        for attack in attacks:
            driver.wait_for_commits(attack.commits)
            time.sleep(attack.delay_seconds)
            driver.suffer(attack)
        assert driver.process.wait(timeout=120) == 0, driver.log()
    finally:
        driver.close()
    run_dir = storage / name
    assert entries(run_dir, "finished")
    causes = {entry["cause"] for entry in entries(run_dir, "failure")}
    assert causes <= {"signal", "agent_lost"}, f"the first cause of a failure was not recognised: {causes}"
    harness.assert_equal_runs(run_dir, reference)


class _Driver:
    """The run's driver in a process of its own; another one takes over when it is killed."""

    def __init__(self, storage: Path, name: str, attacks: list[Attack]) -> None:
        self._storage, self._name = storage, name
        self._own_ray = any(attack.victim == "head" for attack in attacks)
        self._ray_directories: list[str] = []
        self._log = open(storage / f"{name}.log", "w+", encoding="utf-8")  # noqa: SIM115
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        here = Path(__file__).parent
        if self._own_ray:
            self._ray_directories.append(tempfile.mkdtemp(prefix="lg-ray-"))
            command = [
                str(here / "own_ray_script.py"),
                self._ray_directories[-1],
                str(self._storage),
                self._name,
                "-",
                "0.05",
            ]
        else:
            address = ray.get_runtime_context().gcs_address
            command = [str(here / "driver_script.py"), address, str(self._storage), self._name]
        return subprocess.Popen([sys.executable, *command], stdout=self._log, stderr=subprocess.STDOUT)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def wait_for_commits(self, count: int) -> None:
        run_dir = self._storage / self._name

        def look() -> bool | None:
            assert self.process.poll() is None, self.log()
            started = (run_dir / "ledger.jsonl").exists()
            return True if started and len(entries(run_dir, "commit")) >= count else None

        wait_for(look, COMMIT_SECONDS)

    def suffer(self, attack: Attack) -> None:
        pids = {
            "coordinator": lambda: self._newest("coordinator"),
            "keeper": lambda: self._newest("keeper"),
            "agent": lambda: self._newest("agent"),
            "zygote": lambda: [zygote.pid for zygote in self._zygotes()][:1],
            "driver": lambda: [self.process.pid],
            "head": self._head,
        }[attack.victim]()
        ranks = self._ranks()[-1:] if attack.with_rank else []
        for pid in [*pids, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        if attack.victim in ("driver", "head"):
            self.process.wait(timeout=30)
            self.process = self._start()

    def _newest(self, kind: str) -> list[int]:
        """The pid that the ledger names last."""
        return [entry["pid"] for entry in entries(self._storage / self._name, kind)][-1:]

    def _zygotes(self) -> list[psutil.Process]:
        found = []
        for entry in entries(self._storage / self._name, "agent"):
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(entry["pid"]).children()
                found += [child for child in children if "workers.zygote" in child.cmdline()]
        return found

    def _ranks(self) -> list[int]:
        """The ranks that train: of each zygote's children, the oldest; the other one waits."""
        pids = []
        for zygote in self._zygotes():
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in sorted(zygote.children(), key=psutil.Process.create_time)][:1]
        return pids

    def _head(self) -> list[int]:
        """The driver with Ray's own processes; what Ray started there has to notice by itself."""
        children = psutil.Process(self.process.pid).children()
        return [self.process.pid, *(child.pid for child in children if child.name() in ("gcs_server", "raylet"))]

    def close(self) -> None:
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            self.process.wait()
        self._log.close()
        for directory in self._ray_directories:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the first trial")
    parser.add_argument("--victim", action="append", choices=VICTIMS, help="may be given several times; default: all")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="lg-deaths-") as directory, _own_cluster():
        reference = harness.trainer(Path(directory), "reference", loops.train_loop).fit().run_dir
        for seed in range(options.seed, options.seed + options.trials):
            attacks = plan(seed, tuple(options.victim or VICTIMS))
            print(f"seed {seed}: " + "; ".join(map(_in_words, attacks)), flush=True)
            try:
                run_trial(attacks, Path(directory), f"s{seed}", reference)
            except Exception as error:
                print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
                failed.append(seed)
    print(f"{options.trials} trials, {len(failed)} failed" + (f": seeds {failed}" if failed else ""))
    sys.exit(1 if failed else 0)


def _in_words(attack: Attack) -> str:
    rank = " with a rank" if attack.with_rank else ""
    return f"{attack.victim}{rank}, {attack.delay_seconds:.2f} s after save {attack.commits}"


@contextlib.contextmanager
def _own_cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="lg-ray-", ignore_cleanup_errors=True) as directory:
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        try:
            yield
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
