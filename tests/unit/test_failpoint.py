"""Fault points fire where they are armed, once in the run, and nowhere else."""

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import failpoint
from workers.failpoint import Arm


@pytest.fixture(autouse=True)
def disarmed(tmp_path: Path) -> Iterator[None]:
    yield
    failpoint.arm((), tmp_path)


def test_a_point_that_is_not_armed_does_nothing(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="persist.fsync", action="eio")], tmp_path)
    failpoint.hit("persist.rename", rank=0)
    assert list(tmp_path.iterdir()) == []


def test_an_armed_point_fires_once_in_the_run_and_leaves_a_record(tmp_path: Path) -> None:
    armed = [Arm(id="a", point="persist.fsync", action="enospc", when={"rank": 1, "step_min": 20})]
    failpoint.arm(armed, tmp_path)
    failpoint.hit("persist.fsync", rank=0, step=40)
    failpoint.hit("persist.fsync", rank=1, step=10)
    with pytest.raises(OSError) as raised:
        failpoint.hit("persist.fsync", rank=1, step=40)
    assert raised.value.errno == errno.ENOSPC
    failpoint.arm(armed, tmp_path)  # as the next generation's process does
    failpoint.hit("persist.fsync", rank=1, step=40)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["context"] == {"rank": 1, "step": 40}


def test_a_fraction_fires_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="snapshot.copy", action="raise", when={"index_fraction": 0.5})], tmp_path)
    fired_at = []
    for index in range(10):
        try:
            failpoint.hit("snapshot.copy", index=index, total=10)
        except failpoint.InjectedError:
            fired_at.append(index)
    assert fired_at == [5]


def test_a_fraction_of_a_loop_of_one_round_is_its_start(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="persist.block", action="raise", when={"index_fraction": 0.5})], tmp_path)
    with pytest.raises(failpoint.InjectedError):
        failpoint.hit("persist.block", index=0, total=1)


def test_a_fault_may_fire_several_times_and_no_more_once_it_is_released(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="persist.fsync", action="eio", times=3)], tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            failpoint.hit("persist.fsync")
    failpoint.release("a", tmp_path)
    failpoint.hit("persist.fsync")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-2.json", "a.json", "a.released"]


def test_a_pause_lasts_until_it_is_released(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="persist.fsync", action="pause")], tmp_path)
    paused = threading.Thread(target=failpoint.hit, args=("persist.fsync",), daemon=True)
    paused.start()
    paused.join(0.1)
    assert paused.is_alive()
    failpoint.release("a", tmp_path)
    paused.join(30)
    assert not paused.is_alive()


def test_how_often_a_fault_may_fire_is_bounded(tmp_path: Path) -> None:
    failpoint.arm([Arm(id="a", point="persist.fsync", action="raise", times=2)], tmp_path)
    fired = 0
    for _ in range(5):
        try:
            failpoint.hit("persist.fsync")
        except failpoint.InjectedError:
            fired += 1
    assert fired == 2
