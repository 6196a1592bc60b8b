"""Each thing that is wrong becomes one finding of the right level, with what was seen and what to do."""

from dataclasses import replace
from typing import Any

import pytest
from doctor_samples import FACTS, MACHINE, STORAGE, SYNC

from orchestrator.doctor.expect import Expectation, Scale, Speeds, expect
from orchestrator.doctor.facts import Check, Facts, Gpu, Import, Package
from orchestrator.doctor.findings import Finding, judge_machine
from orchestrator.doctor.findings_storage import judge_scale, judge_storage

GPU = Gpu(name="H200", memory_bytes=139 << 30, driver="570.1")


def findings(facts: Facts) -> list[Finding]:
    return [*judge_machine(facts), *judge_storage(facts.storage)]


def bad(facts: Facts) -> list[Finding]:
    return [finding for finding in findings(facts) if finding.level != "ok"]


def test_nothing_is_found_where_all_is_well() -> None:
    assert bad(FACTS) == []
    assert len(findings(FACTS)) > 15


MACHINES: list[tuple[dict[str, Any], str]] = [
    ({"swap_bytes": 1 << 30}, "memory.swap"),
    ({"load": 9.0}, "load"),
    ({"limits": {**MACHINE.limits, "nofile": 1024}}, "limit.nofile"),
    ({"limits": {**MACHINE.limits, "nproc": 1024}}, "limit.nproc"),
    ({"limits": {**MACHINE.limits, "core": None}}, "limit.core"),
    ({"shm_bytes": 64 << 20}, "shm"),
    ({"shm_bytes": None}, "shm"),
]


@pytest.mark.parametrize(("changes", "name"), MACHINES)
def test_what_a_machine_lacks_is_advice(changes: dict[str, Any], name: str) -> None:
    [finding] = bad(replace(FACTS, machine=replace(MACHINE, **changes)))
    assert (finding.id, finding.level) == (name, "advice")
    assert finding.seen and finding.why and finding.do


def test_unlimited_files_and_core_dumps_into_a_pipe_are_fine() -> None:
    limits = {**MACHINE.limits, "nofile": None, "nproc": None, "core": None}
    assert bad(replace(FACTS, machine=replace(MACHINE, limits=limits, core_pattern="|/usr/bin/handler"))) == []


def test_a_small_limit_of_locked_memory_matters_with_gpus_only() -> None:
    limits = {**MACHINE.limits, "memlock": 64 << 10}
    software = replace(FACTS.software, cuda=True)
    without = replace(FACTS, software=software, machine=replace(MACHINE, limits=limits))
    assert bad(without) == []
    assert [found.id for found in bad(replace(without, machine=replace(without.machine, gpus=[GPU])))] == [
        "limit.memlock"
    ]


def test_gpus_that_torch_cannot_use_are_told() -> None:
    [finding] = bad(replace(FACTS, machine=replace(MACHINE, gpus=[GPU, GPU])))
    assert (finding.id, finding.seen) == ("gpus", "2 (H200, driver 570.1); torch cannot use them")


def test_a_wrong_version_is_a_problem_with_the_range_that_is_right() -> None:
    old = Package(name="ray", version="2.9.0", wanted="<2.61,>=2.60", fits=False)
    [finding] = bad(replace(FACTS, software=replace(FACTS.software, packages=[old])))
    assert (finding.id, finding.level, finding.seen) == ("package.ray", "problem", "2.9.0")
    assert "<2.61,>=2.60" in finding.do


def test_a_package_that_is_missing_or_does_not_import_is_a_problem() -> None:
    missing = Package(name="torch", version=None, wanted="<2.14,>=2.9", fits=False)
    failed = Import(module="torch", seconds=0.1, problem="ModuleNotFoundError: No module named 'torch'")
    software = replace(FACTS.software, packages=[missing], imports=[failed])
    assert [(found.id, found.level) for found in bad(replace(FACTS, software=software))] == [
        ("package.torch", "problem"),
        ("import.torch", "problem"),
    ]


def test_tracing_that_is_not_allowed_says_what_to_do_and_what_is_left() -> None:
    denied = replace(FACTS.tracing, traced=False, problem="Operation not permitted", ptrace_scope=1)
    [finding] = bad(replace(FACTS, tracing=denied))
    assert (finding.id, finding.level) == ("tracing", "advice")
    assert "Operation not permitted" in finding.seen
    assert "faulthandler" in finding.why
    assert "kernel.yama.ptrace_scope=0" in finding.do
    [deaf] = bad(replace(FACTS, tracing=replace(denied, answered=False, ptrace_scope=None)))
    assert "SYS_PTRACE" in deaf.do
    assert "nobody can tell" in deaf.why


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"wall_drift_seconds": -0.2}, "clock.drift"),
        ({"synchronized": False}, "clock.synchronized"),
        ({"source": "hpet"}, "clock.source"),
    ],
)
def test_a_clock_that_cannot_be_relied_on_is_advice(changes: dict[str, Any], name: str) -> None:
    [finding] = bad(replace(FACTS, clock=replace(FACTS.clock, **changes)))
    assert (finding.id, finding.level) == (name, "advice")


@pytest.mark.parametrize("setting", [None, "250"])
def test_rays_memory_monitor_is_told_unless_it_is_off(setting: str | None) -> None:
    software = replace(FACTS.software, ray_monitor={"raylet 7": setting})
    [finding] = bad(replace(FACTS, software=software))
    assert finding.id == "ray.memory_monitor"
    assert "raylet 7" in finding.seen


def test_no_memory_to_measure_with_is_a_problem() -> None:
    [finding] = bad(replace(FACTS, memory=None, memory_problem="3 MiB are available"))
    assert (finding.id, finding.level, finding.seen) == ("memory.speed", "problem", "3 MiB are available")


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize("kind", ["memory", "overlay", "object", "unknown"])
def test_a_kind_of_storage_that_keeps_less_than_it_says_is_advice(kind: Any) -> None:
    assert [found.id for found in bad(replace(FACTS, storage=replace(STORAGE, kind=kind)))] == ["storage.kind"]


@pytest.mark.parametrize(("option", "name"), [("nobarrier", "storage.options"), ("soft", "storage.soft")])
def test_mount_options_that_weaken_it_are_advice(option: str, name: str) -> None:
    assert [found.id for found in bad(replace(FACTS, storage=replace(STORAGE, options=["rw", option])))] == [name]


def test_behaviour_that_is_relied_on_and_not_there_is_a_problem() -> None:
    checks = [Check(name="rename", what="a file is renamed in one step", problem="both names were there")]
    [finding] = bad(replace(FACTS, storage=replace(STORAGE, checks=checks)))
    assert (finding.id, finding.level, finding.seen) == ("storage.rename", "problem", "both names were there")
    assert "/mnt/ckpt" in finding.do


def test_storage_without_room_to_measure_is_a_problem() -> None:
    [finding] = bad(replace(FACTS, storage=replace(STORAGE, speeds=None, problem="1 MiB are free")))
    assert (finding.id, finding.level, finding.seen) == ("storage.speed", "problem", "1 MiB are free")


def test_storage_that_refuses_direct_writes_is_advice() -> None:
    assert STORAGE.speeds is not None
    speeds = replace(STORAGE.speeds, write_direct=None, read_direct=None)
    assert [found.id for found in bad(replace(FACTS, storage=replace(STORAGE, speeds=speeds)))] == ["storage.direct"]


@pytest.mark.parametrize(("seconds", "word"), [(0.3, "waits"), (1e-6, "switched off")])
def test_fsync_that_is_slow_or_faster_than_a_device_is_advice(seconds: float, word: str) -> None:
    assert STORAGE.speeds is not None
    sync = replace(SYNC, median=seconds)
    speeds = replace(STORAGE.speeds, sync_file=sync, sync_dir=sync)
    [finding] = bad(replace(FACTS, storage=replace(STORAGE, speeds=speeds)))
    assert finding.id == "storage.sync"
    assert word in finding.why


# ---------------------------------------------------------------- a size


def judged(state_bytes: int, facts: Facts = FACTS, *, ranks: int = 8, per_node: int = 8) -> list[Finding]:
    scale = Scale(state_bytes=state_bytes, ranks=ranks, ranks_per_node=per_node, slots=2)
    found = judge_scale(scale, expected(scale), facts, memory_fraction_max=0.9, keep_last=3)
    return [finding for finding in found if finding.level != "ok"]


def expected(scale: Scale) -> Expectation:
    rate = 1e9
    return expect(
        scale,
        Speeds(
            cpus=8,
            copy=rate,
            copy_all=rate,
            copy_fresh=rate,
            hash=rate,
            write=rate,
            read_back=rate,
            read=rate,
            sync_seconds=0.0,
        ),
    )


def test_a_state_that_fits_has_no_findings() -> None:
    assert judged(26 << 30) == []  # twice is 52 GiB, of 60 available less the tenth of 64 that stays free


def test_snapshots_that_do_not_fit_into_memory_are_a_problem_with_the_numbers() -> None:
    [finding] = judged(27 << 30)
    assert (finding.id, finding.level) == ("scale.memory", "problem")
    assert "54 GiB needed (2 x 27 GiB), 53.6 GiB available" in finding.seen


def test_a_limit_of_the_control_group_counts() -> None:
    limited = replace(MACHINE, memory_limit_bytes=32 << 30, memory_available_bytes=30 << 30)
    assert [found.id for found in judged(15 << 30, replace(FACTS, machine=limited))] == ["scale.memory"]
    assert judged(13 << 30, replace(FACTS, machine=limited)) == []


@pytest.mark.parametrize(("free", "levels"), [(40, []), (39, ["advice"]), (20, ["advice"]), (19, ["problem"])])
def test_room_for_fewer_checkpoints_than_are_kept_is_advice_and_for_one_a_problem(free: int, levels: list[str]) -> None:
    facts = replace(FACTS, storage=replace(STORAGE, free_bytes=free * 10**9))
    assert [found.level for found in judged(10 * 10**9, facts)] == levels


def test_a_local_disk_for_several_nodes_is_advice() -> None:
    local = replace(FACTS, storage=replace(STORAGE, kind="local", file_system="ext4"))
    assert judged(10**9, local) == []
    assert [found.id for found in judged(10**9, local, ranks=16)] == ["scale.shared"]
    assert judged(10**9, FACTS, ranks=16) == []
