"""What a rank's agent knows of its memory, from a made-up /proc and control group."""

import os
import signal
from pathlib import Path

import pytest

from workers import processes
from workers.memory_watch import MemoryWatch
from workers.processes import ProcessId

RANK = ProcessId(pid=100, start_ticks=1)
LOADER = ProcessId(pid=101, start_ticks=2)
MIB = 2**20


class Machine:
    """A node whose files and clock the test writes."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.seconds = 0.0
        self.group = [RANK, LOADER]
        self.scans = 0
        self.proc.mkdir()
        self.cgroup.mkdir()
        self.write(self.proc / "meminfo", "MemTotal: 100 kB\nMemAvailable:    2048 kB\n")
        self.vmstat(0)
        self.status(RANK, rss_kib=4096, peak_kib=8192)
        self.status(LOADER, rss_kib=1024, peak_kib=1024)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")

    def vmstat(self, kills: int) -> None:
        self.write(self.proc / "vmstat", f"nr_free_pages 12\noom_kill {kills}\npgfault 3\n")

    def status(self, process: ProcessId, *, rss_kib: int, peak_kib: int) -> None:
        self.write(self.proc / str(process.pid) / "status", f"Name: x\nVmHWM: {peak_kib} kB\nVmRSS: {rss_kib} kB\n")

    def version_1(self, kills: int, limit: str = "1048576") -> None:
        self.write(self.proc / "100" / "cgroup", "9:pids:/a\n4:memory:/job\n0::/\n")
        self.write(self.cgroup / "memory/job/memory.oom_control", f"under_oom 0\noom_kill {kills}\n")
        self.write(self.cgroup / "memory/job/memory.limit_in_bytes", f"{limit}\n")

    def version_2(self, kills: int, limit: str = "1048576") -> None:
        self.write(self.cgroup / "cgroup.controllers", "cpu memory\n")
        self.write(self.proc / "100" / "cgroup", "0::/job\n")
        self.write(self.cgroup / "job/memory.events", f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        self.write(self.cgroup / "job/memory.max", f"{limit}\n")

    def members(self, _group: int) -> list[ProcessId]:
        self.scans += 1
        return self.group

    def watch(self) -> MemoryWatch:
        return MemoryWatch(proc=self.proc, cgroup=self.cgroup, clock=lambda: self.seconds, members=self.members)

    def following(self) -> MemoryWatch:
        watch = self.watch()
        watch.follow(RANK)
        return watch


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_look_tells_of_the_rank_its_group_and_the_node(machine: Machine) -> None:
    seen = machine.following().look()
    assert seen is not None
    assert (seen.rss_bytes, seen.peak_bytes) == (4 * MIB, 8 * MIB)
    assert (seen.group_rss_bytes, seen.group_peak_bytes) == (5 * MIB, 5 * MIB)
    assert (seen.available_bytes, seen.limit_bytes) == (2 * MIB, None)


def test_the_groups_peak_is_the_highest_that_was_seen(machine: Machine) -> None:
    watch = machine.following()
    watch.look()
    machine.seconds = 1.0
    machine.status(LOADER, rss_kib=0, peak_kib=1024)
    seen = watch.look()
    assert seen is not None
    assert (seen.group_rss_bytes, seen.group_peak_bytes) == (4 * MIB, 5 * MIB)


def test_it_looks_once_a_second_and_searches_for_group_members_ever_more_rarely(machine: Machine) -> None:
    watch, looks = machine.following(), 0
    for tick in range(5 * 120):
        machine.seconds = tick / 5
        looks += watch.look() is not None
    assert looks == 120
    assert machine.scans <= 120 / 10 + 5


def test_a_rank_that_is_gone_is_seen_as_it_was_last(machine: Machine) -> None:
    watch = machine.following()
    before = watch.look()
    machine.seconds = 1.0
    (machine.proc / "100" / "status").unlink()
    assert watch.look() is None
    assert watch.seen == before


@pytest.mark.parametrize("where", ["vmstat", "version_1", "version_2"])
def test_a_sigkill_with_a_risen_counter_is_the_kernels(machine: Machine, where: str) -> None:
    getattr(machine, where)(3)
    watch = machine.following()
    watch.look()
    assert not watch.killed_by_kernel(-signal.SIGKILL)
    getattr(machine, where)(4)
    (machine.proc / "100" / "status").unlink()
    assert watch.killed_by_kernel(-signal.SIGKILL)
    assert not watch.killed_by_kernel(-signal.SIGSEGV)
    assert not watch.killed_by_kernel(1)


def test_the_kernel_may_count_long_before_the_process_is_gone(machine: Machine) -> None:
    watch = machine.following()
    watch.look()
    machine.vmstat(1)
    for second in range(1, 6):
        machine.seconds = float(second)
        watch.look()
    assert watch.killed_by_kernel(-signal.SIGKILL)
    machine.seconds = 60.0
    assert not watch.killed_by_kernel(-signal.SIGKILL)


def test_what_the_kernel_killed_before_says_nothing_about_the_next_rank(machine: Machine) -> None:
    watch = machine.following()
    machine.vmstat(1)
    assert watch.killed_by_kernel(-signal.SIGKILL)
    watch.follow(RANK)
    assert not watch.killed_by_kernel(-signal.SIGKILL)


@pytest.mark.parametrize("version", ["version_1", "version_2"])
def test_a_kill_elsewhere_on_the_machine_is_not_the_ranks(machine: Machine, version: str) -> None:
    getattr(machine, version)(0)
    watch = machine.following()
    watch.look()
    machine.vmstat(1)
    assert not watch.killed_by_kernel(-signal.SIGKILL)


def test_a_rank_that_moves_to_another_control_group_is_judged_by_that_ones_counter(machine: Machine) -> None:
    watch = machine.following()
    machine.version_1(7)  # not to be compared with vmstat's 0
    watch.look()
    assert not watch.killed_by_kernel(-signal.SIGKILL)
    machine.version_1(8)
    assert watch.killed_by_kernel(-signal.SIGKILL)


@pytest.mark.parametrize(
    ("version", "limit", "bytes_max"),
    [
        ("version_1", "1048576", MIB),
        ("version_1", "9223372036854771712", None),
        ("version_2", "1048576", MIB),
        ("version_2", "max", None),
    ],
)
def test_the_control_groups_limit_is_told(machine: Machine, version: str, limit: str, bytes_max: int | None) -> None:
    getattr(machine, version)(0, limit)
    seen = machine.following().look()
    assert seen is not None
    assert seen.limit_bytes == bytes_max


def test_files_that_cannot_be_read_or_understood_mean_that_nothing_is_known(machine: Machine) -> None:
    (machine.proc / "vmstat").unlink()
    machine.write(machine.proc / "100" / "cgroup", "4:memory\ngibberish\n")
    machine.write(machine.proc / "meminfo", "MemAvailable:\n")
    watch = machine.following()
    seen = watch.look()
    assert seen is not None
    assert seen.available_bytes == 0
    assert not watch.killed_by_kernel(-signal.SIGKILL)


def test_nothing_was_seen_before_anything_is_followed(machine: Machine) -> None:
    watch = machine.watch()
    assert watch.look() is None
    assert watch.seen is None
    assert not watch.killed_by_kernel(-signal.SIGKILL)


def test_the_real_proc_tells_of_this_process() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    watch = MemoryWatch()
    watch.follow(me)
    seen = watch.look()
    assert seen is not None
    assert seen.rss_bytes > MIB
    assert seen.available_bytes > MIB
