"""Groups, locks and pids: nothing outlives a run, and nothing that is not ours is killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import processes
from workers.groups import GroupRecord
from workers.processes import ProcessId, RunLock

LEADER = (
    "import os, subprocess, sys, time; os.setpgid(0, 0); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(child.pid, flush=True); time.sleep(600)"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return uuid.uuid4().hex[:16]


@pytest.fixture
def group() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    yield leader, child
    processes.kill_group(leader.pid)
    leader.wait()
    leader.stdout.close()


def wait_until_gone(pid: int) -> None:
    """Wait for the process to end; pidfd works for any process, not only for children."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    assert select.select([fd], [], [], 10)[0], f"process {pid} is still there"
    os.close(fd)


def test_children_die_with_their_group_even_when_the_leader_is_already_gone(
    group: tuple["subprocess.Popen[str]", int],
) -> None:
    leader, child = group
    identity = processes.identify(leader.pid)
    assert identity is not None
    leader.kill()
    leader.wait()
    processes.kill_leftover_group(identity)
    wait_until_gone(child)


def test_a_group_whose_number_was_given_to_another_process_is_left_alone(
    group: tuple["subprocess.Popen[str]", int],
) -> None:
    leader, child = group
    identity = processes.identify(leader.pid)
    assert identity is not None
    processes.kill_leftover_group(ProcessId(pid=leader.pid, start_ticks=identity.start_ticks - 1))
    assert processes.start_ticks(child) is not None
    assert leader.poll() is None


def test_a_zombie_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_ticks(child.pid) is None
    child.wait()


def test_a_process_that_asked_for_it_dies_with_its_parent() -> None:
    source = (
        "import os, subprocess, sys; "
        "code = 'import os, sys, time; from workers import processes; "
        "processes.die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)'; "
        "child = subprocess.Popen([sys.executable, '-c', code, str(os.getpid())]); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(child)


def test_shared_memory_of_a_dead_loader_worker_is_removed_and_that_of_a_living_process_is_not() -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    left, used = (Path(f"/dev/shm/torch_{pid}_lastgood_test") for pid in (dead.pid, os.getpid()))
    try:
        left.touch()
        used.touch()
        processes.remove_torch_shared_memory([dead.pid, os.getpid()])
        assert not left.exists()
        assert used.exists()
    finally:
        for path in (left, used):
            path.unlink(missing_ok=True)


def test_temporary_directory_of_a_killed_process_is_removed_with_the_sockets_that_its_children_left_there(
    tmp_path: Path,
) -> None:
    source = (
        "import multiprocessing, sys, time; from multiprocessing import util; from pathlib import Path; "
        "from workers import processes; processes.use_temporary_dir(Path(sys.argv[1])); "
        "where = multiprocessing.get_context('fork').SimpleQueue(); "
        "child = multiprocessing.get_context('fork').Process(target=lambda: where.put(util.get_temp_dir())); "
        "child.start(); child.join(); assert where.get() == util.get_temp_dir(); "
        "Path(util.get_temp_dir(), 'socket').touch(); print(util.get_temp_dir(), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.parent == tmp_path
    processes.remove_temporary_dirs(tmp_path)
    assert directory.exists(), "its process lives"
    process.kill()
    process.wait()
    process.stdout.close()
    processes.remove_temporary_dirs(tmp_path)
    assert not directory.exists()


def test_a_process_that_gets_no_temporary_directory_of_its_own_goes_on_with_the_usual_one(tmp_path: Path) -> None:
    before = dict(multiprocessing.current_process()._config)  # type: ignore[attr-defined]
    processes.use_temporary_dir(tmp_path / "not there")
    assert before == multiprocessing.current_process()._config  # type: ignore[attr-defined]


def test_a_lock_is_held_as_long_as_any_process_that_inherited_it_lives(run: str) -> None:
    lock = RunLock(run, "first")
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fd])
    lock.close()
    assert processes.lock_holders(lock.path) == [heir.pid]
    heir.kill()
    heir.wait()
    assert processes.lock_holders(lock.path) == []
    assert not lock.path.exists()


def test_a_process_that_opens_and_closes_other_files_all_the_time_is_still_named(run: str) -> None:
    lock = RunLock(run, "d")
    busy = "import os\nprint('ready', flush=True)\nwhile True: os.close(os.open('/dev/null', os.O_RDONLY))"
    heir = subprocess.Popen([sys.executable, "-c", busy], pass_fds=[lock.fd], stdout=subprocess.PIPE, text=True)
    lock.close()
    try:
        assert heir.stdout is not None
        assert heir.stdout.readline() == "ready\n"
        assert {tuple(processes.lock_holders(lock.path)) for _ in range(100)} == {(heir.pid,)}
    finally:
        heir.kill()
        heir.communicate()


def test_a_new_driver_kills_the_recorded_groups_of_the_old_one(
    run: str, group: tuple["subprocess.Popen[str]", int]
) -> None:
    leader, child = group
    GroupRecord(run, "old", "node").record(leader.pid, generation=3)
    assert GroupRecord(run, "new", "node").end_predecessors(timeout_seconds=10) == []
    assert leader.wait(timeout=10) == -signal.SIGKILL
    wait_until_gone(child)


def test_a_new_driver_names_the_pids_that_will_not_go(run: str) -> None:
    lock = RunLock(run, "old")
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fd])
    lock.close()
    try:
        assert GroupRecord(run, "new", "node").end_predecessors(timeout_seconds=0.2) == [heir.pid]
    finally:
        heir.kill()
        heir.wait()


def test_ranks_that_somebody_still_looks_after_are_not_killed(
    run: str, group: tuple["subprocess.Popen[str]", int]
) -> None:
    leader, child = group
    GroupRecord(run, "old", "node").record(leader.pid, generation=3)
    lock = RunLock(run, "old")
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fd])
    lock.close()
    new = GroupRecord(run, "new", "node")
    try:
        assert new.end_predecessors(timeout_seconds=0.2) == [agent.pid]
        assert leader.poll() is None
    finally:
        agent.kill()
        agent.wait()
    assert new.end_predecessors(timeout_seconds=10) == []
    assert leader.wait(timeout=10) == -signal.SIGKILL
    wait_until_gone(child)


def test_a_keeper_that_comes_back_still_knows_the_groups_it_recorded(
    run: str, group: tuple["subprocess.Popen[str]", int]
) -> None:
    leader, child = group
    GroupRecord(run, "d", "node").record(leader.pid, generation=2)
    reborn = GroupRecord(run, "d", "node")
    reborn.kill_up_to(1)
    assert leader.poll() is None
    reborn.kill_up_to(2)
    assert leader.wait(timeout=10) == -signal.SIGKILL
    wait_until_gone(child)


def test_a_run_that_is_over_leaves_nothing_in_the_node_directory(run: str, tmp_path: Path) -> None:
    record = GroupRecord(run, "d", "node")
    record.record(os.getpid(), generation=1)
    lock = RunLock(run, "d")
    lock.close()
    record.remove()
    assert list(tmp_path.rglob("*")) == []
