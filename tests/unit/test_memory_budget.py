"""Whether the snapshots fit is known before training: beside the machine, a container's limit and Ray's count."""

from pathlib import Path

import pytest

from workers.memory_budget import Bound, Need, bounds, problem

GIB = 2**30


class Machine:
    """A node whose files the test writes: 64 GiB, of which 40 are available."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.environment: dict[str, str] = {}
        self.write(self.proc / "meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB\n")

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")

    def version_2(self, group: str, limit: object, used: int, cache: int = 0) -> None:
        self.write(self.cgroup / "cgroup.controllers", "cpu memory")
        self.write(self.proc / "self/cgroup", f"0::/{group}")
        self.write(self.cgroup / group / "memory.max", limit)
        self.write(self.cgroup / group / "memory.current", used)
        self.write(self.cgroup / group / "memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 7")

    def version_1(self, limit: int, used: int, cache: int = 0) -> None:
        self.write(self.proc / "self/cgroup", "9:pids:/a\n4:memory:/job\n0::/")
        self.write(self.cgroup / "memory/job/memory.limit_in_bytes", limit)
        self.write(self.cgroup / "memory/job/memory.usage_in_bytes", used)
        self.write(self.cgroup / "memory/job/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}")

    def bounds(self, fraction_max: float = 1.0) -> list[Bound]:
        return bounds(fraction_max, proc=self.proc, cgroup=self.cgroup, environment=self.environment)

    def room(self, fraction_max: float = 1.0) -> int:
        return min(bound.room_bytes for bound in self.bounds(fraction_max))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.environment["RAY_memory_usage_threshold"] = "1"
    return machine


def need(**changes: int) -> Need:
    return Need(**{"image_bytes": 2 * GIB, "slots": 2, "local_ranks": 4} | changes)  # type: ignore[arg-type]


def test_slots_and_replicas_count_for_every_local_rank_less_what_is_there() -> None:
    assert need().missing_bytes == 2 * 2 * 4 * GIB
    assert need(replicas=1).missing_bytes == 3 * 2 * 4 * GIB
    assert need(held_bytes=3 * GIB).missing_bytes == 1 * 4 * GIB
    assert need(held_bytes=9 * GIB).missing_bytes == 0


def test_the_machine_leaves_what_is_available_but_for_the_part_that_is_to_stay_free(machine: Machine) -> None:
    assert machine.room() == 40 * GIB
    assert machine.room(0.75) == 24 * GIB
    assert machine.room(0.25) == 0


@pytest.mark.parametrize("limit", ["max", str(1 << 63)])
def test_a_control_group_without_a_limit_is_no_bound(machine: Machine, limit: str) -> None:
    machine.version_2("job", limit, 5 * GIB)
    assert machine.room() == 40 * GIB
    assert len(machine.bounds()) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_if_it_leaves_less_than_the_machine(machine: Machine, version: int) -> None:
    if version == 1:
        machine.version_1(16 * GIB, 10 * GIB, cache=4 * GIB)
    else:
        machine.version_2("job", 16 * GIB, 10 * GIB, cache=4 * GIB)
    assert machine.room() == 10 * GIB, "the cache of files can be given up"
    assert machine.room(0.75) == 6 * GIB


def test_the_limits_of_all_groups_above_count_as_well(machine: Machine) -> None:
    machine.version_2("pod", 8 * GIB, 5 * GIB)
    machine.version_2("pod/container", "max", 1 * GIB)
    assert machine.room() == 3 * GIB
    assert machine.bounds()[-1].what == "the limit of control group /pod"


def test_a_path_that_is_the_hosts_means_the_group_that_is_mounted(machine: Machine) -> None:
    machine.version_2("", 8 * GIB, 5 * GIB)
    machine.write(machine.proc / "self/cgroup", "0::/kubepods/burstable/pod77/abc")
    assert machine.room() == 3 * GIB


def test_rays_threshold_counts_where_it_is_lower_and_is_095_unless_it_is_set(machine: Machine) -> None:
    machine.environment["RAY_memory_usage_threshold"] = "0.75"
    assert machine.room(0.9) == 24 * GIB
    assert "RAY_memory_usage_threshold" in machine.bounds(0.9)[0].remedy
    assert "memory_fraction_max" in machine.bounds(0.5)[0].remedy
    for text in ("", "much", "7"):
        machine.environment["RAY_memory_usage_threshold"] = text
        assert machine.bounds(1.0)[0].fraction_max == 0.95
    machine.environment["RAY_memory_monitor_refresh_ms"] = "0"
    assert machine.bounds(1.0)[0].fraction_max == 1.0


def test_what_fits_is_no_problem_and_what_does_not_is_told_with_numbers_and_remedy(machine: Machine) -> None:
    machine.version_2("job", 20 * GIB, 4 * GIB)
    assert problem(need(), machine.bounds()) is None
    text = problem(need(replicas=1), machine.bounds(0.75))
    assert text == (
        "the snapshots need 24,576 MiB more on this node ((2 slots + 1 replicas) x 2,048 MiB x 4 ranks), but of the "
        "limit of control group /job, 20,480 MiB, 75% may be in use, which leaves 11,264 MiB; lower "
        "RecoveryConfig.snapshot_slots, set RecoveryConfig.replicate_snapshots to False, raise "
        "RecoveryConfig.memory_fraction_max, or use more nodes"
    )
    held = problem(need(image_bytes=4 * GIB, held_bytes=3 * GIB), machine.bounds())
    assert held is not None
    assert "4,096 MiB x 4 ranks, less the 3,072 MiB that each has already)" in held
