"""Faults do what they say, to a real run directory and to real processes, and name what they have done."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoint_samples import two_ranks, write_image
from run_samples import FakeRun, killed_twice

from chaos.faults import inside, memory, processes
from chaos.faults.fault import Fault, Injected, Target
from chaos.faults.registry import FAULTS
from chaos.history import History
from orchestrator.observe.ledger import read_ledger
from workers.checkpoint.manifest import checkpoint_name
from workers.checkpoint.slots import Slot

NEWEST = checkpoint_name(12, 3, 1)


def nobody() -> dict[str, Any]:
    return {}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return killed_twice(tmp_path / "run")


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@contextmanager
def held_elsewhere(slot: Slot) -> Iterator[int]:
    """The process id of one that holds this slot and, unlike this one, no other."""
    process = subprocess.Popen(["sleep", "600"], pass_fds=[slot.fd])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def status_of(pid: int) -> dict[str, Any]:
    rank = {"rank": 0, "pid": pid, "agent_pid": pid, "node_id": "n", "step": 3}
    return {"generation": 2, "step": 3, "ranks": [rank], "keepers": [{"node_id": "n", "pid": pid}]}


def inject(fault: Fault, target: Target, seed: int = 0) -> Injected:
    injected = fault.inject(target, random.Random(seed))
    assert injected is not None
    return injected


SHARD_AND_MANIFEST_FAULTS = [
    "flip_shard",
    "tear_shard",
    "truncate_shard",
    "delete_shard",
    "flip_manifest",
    "truncate_manifest",
    "delete_manifest",
]


@pytest.mark.parametrize("name", SHARD_AND_MANIFEST_FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_damage_to_the_newest_checkpoint_is_found_by_reading_it(run: FakeRun, name: str, seed: int) -> None:
    target = Target(run_dir=run.directory, status=nobody)
    injected = inject(FAULTS[name], target, seed)
    assert injected.context["checkpoint"] == NEWEST
    assert injected.context["damage"]
    assert ("manifest" in injected.context["path"]) == ("manifest" in name)
    assert History(run.directory).problems(NEWEST)
    assert not History(run.directory).problems(checkpoint_name(8, 2, 1))


def test_a_good_checkpoint_is_always_left(run: FakeRun) -> None:
    target = Target(run_dir=run.directory, status=nobody)
    for number, expected in enumerate((NEWEST, checkpoint_name(8, 2, 1)), start=1):
        context = inject(FAULTS["flip_shard"], target).context
        assert context["checkpoint"] == expected
        run.mark(f"{number:04d}-flip_shard", "flip_shard", "any", **context)
    assert FAULTS["flip_shard"].inject(target, random.Random(0)) is None, "the last one stays"


def test_spoiled_line_of_the_ledger_is_skipped_and_all_others_are_read(run: FakeRun) -> None:
    target = Target(run_dir=run.directory, status=nobody)
    assert FAULTS["spoil_ledger"].inject(target, random.Random(0)) is None, "nothing to spoil without harm"
    run.record("snapshot", generation=3, step=12, attempt=1)
    before = read_ledger(run.directory / "ledger.jsonl")
    inject(FAULTS["spoil_ledger"], target)
    after = read_ledger(run.directory / "ledger.jsonl")
    assert after == [entry for entry in before if entry["kind"] != "snapshot"]


def test_hidden_directory_is_left_to_those_whom_permissions_stop() -> None:
    reason = FAULTS["hide_checkpoint"].available()
    assert (reason is None) == (os.geteuid() != 0)


def test_bit_flips_in_a_complete_snapshot_in_memory_and_its_digest_does_not_hold(tmp_path: Path) -> None:
    slot, image_bytes = write_image(two_ranks()[0])
    before = bytes(slot.image[:image_bytes])
    with held_elsewhere(slot) as pid:
        target = Target(run_dir=tmp_path, status=lambda: status_of(pid))
        assert FAULTS["flip_snapshot"].inject(target, random.Random(0)) is None, "without a digest nothing could tell"
        slot.set_digest(xxhash.xxh3_128(before).hexdigest())
        context = inject(FAULTS["flip_snapshot"], target).context
    after = bytes(slot.image[:image_bytes])
    slot.close()
    assert context["damage"]
    (changed,) = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert (changed[0] ^ changed[1]).bit_count() == 1
    assert xxhash.xxh3_128(after).hexdigest() != xxhash.xxh3_128(before).hexdigest()


def test_a_snapshot_that_is_not_complete_is_left_alone(tmp_path: Path) -> None:
    slot = Slot.create(4096)
    slot.begin(rank=0, generation=1, step=1)
    with held_elsewhere(slot) as pid:
        target = Target(run_dir=tmp_path, status=lambda: status_of(pid))
        assert FAULTS["flip_snapshot"].inject(target, random.Random(0)) is None
    slot.close()


def test_killed_rank_is_named_and_dead(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    target = Target(run_dir=tmp_path, status=lambda: status_of(sleeper.pid))
    context = inject(FAULTS["kill_rank"], target).context
    assert (context["rank"], context["rank_pid"], context["generation"], context["step"]) == (0, sleeper.pid, 2, 3)
    assert sleeper.wait(timeout=30) == -signal.SIGKILL
    assert FAULTS["kill_rank"].inject(target, random.Random(0)) is None, "it is gone"


def test_rank_and_its_keeper_die_together(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    keeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    status = {**status_of(sleeper.pid), "keepers": [{"node_id": "n", "pid": keeper.pid}]}
    context = inject(FAULTS["kill_rank_and_keeper"], Target(run_dir=tmp_path, status=lambda: status)).context
    assert context["victim_pids"] == [sleeper.pid, keeper.pid]
    assert [keeper.wait(timeout=30), sleeper.wait(timeout=30)] == [-signal.SIGKILL] * 2


def test_stopped_process_goes_on_when_it_is_released(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    import psutil

    target = Target(run_dir=tmp_path, status=lambda: status_of(sleeper.pid))
    injected = inject(FAULTS["stop_keeper"], target)
    process = psutil.Process(sleeper.pid)
    wait_for_state(process, {psutil.STATUS_STOPPED})
    assert injected.release is not None
    injected.release()
    wait_for_state(process, {psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING})


def wait_for_state(process: Any, states: set[str]) -> None:
    deadline = time.monotonic() + 30
    while process.status() not in states:
        assert time.monotonic() < deadline
        os.sched_yield()


def test_faults_without_a_victim_are_tried_again_later(tmp_path: Path) -> None:
    target = Target(run_dir=tmp_path, status=nobody)
    for fault in (*processes.PROCESS_FAULTS, *inside.INSIDE_FAULTS, *memory.MEMORY_FAULTS):
        assert fault.inject(target, random.Random(0)) is None


OBEDIENT = """
import sys, time
from chaos.faults import inside
inside.obey(sys.argv[1])
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("name", "code", "words"), [("raise", 1, "InjectedError"), ("exit_zero", 0, "")])
def test_rank_that_obeys_does_what_it_is_told(tmp_path: Path, name: str, code: int, words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OBEDIENT, str(tmp_path / inside.ORDERS_DIR)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        inject(FAULTS[name], Target(run_dir=tmp_path, status=lambda: status_of(process.pid)))
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert words in said


def test_rank_that_has_not_come_to_its_loop_is_not_ordered(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    target = Target(run_dir=tmp_path, status=lambda: status_of(sleeper.pid))
    assert FAULTS["raise"].inject(target, random.Random(0)) is None
    assert sleeper.poll() is None


def test_markers_carry_json_only(run: FakeRun) -> None:
    context = inject(FAULTS["flip_shard"], Target(run_dir=run.directory, status=nobody)).context
    assert json.loads(json.dumps(dict(context))) == dict(context)
