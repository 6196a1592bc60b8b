"""What is asked of the machine and of what is installed, for real where that is quick."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from orchestrator.doctor import machine, tracing
from orchestrator.doctor.facts import Gpu
from orchestrator.doctor.software import look_at_packages, try_imports
from workers import memory_watch, stacks


def test_the_machine_is_described() -> None:
    found = machine.look_at_machine()
    assert found.cpus >= 1
    assert 0 < found.memory_available_bytes <= found.memory_bytes
    assert set(found.limits) == {"nofile", "memlock", "nproc", "core"}


def test_gpus_are_read_as_nvidia_smi_lists_them() -> None:
    listing = "NVIDIA H200, 143771, 570.86.15\nNVIDIA GH200, with a comma, [N/A], 570.86.15\n\nNo devices\n"
    assert machine.parse_gpus(listing) == [
        Gpu(name="NVIDIA H200", memory_bytes=143771 << 20, driver="570.86.15"),
        Gpu(name="NVIDIA GH200, with a comma", memory_bytes=None, driver="570.86.15"),
    ]


def test_the_clocks_are_compared() -> None:
    watch = machine.ClockWatch()
    found = watch.look()
    assert found.watched_seconds >= 0
    assert abs(found.wall_drift_seconds) < 60


def test_a_control_groups_limit_and_use_are_read(tmp_path: Path) -> None:
    for name, text in (
        ("memory.max", "1000000\n"),
        ("memory.current", "500000\n"),
        ("memory.stat", "anon 1\ninactive_file 200000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert (memory_watch.limit_bytes(tmp_path), memory_watch.used_bytes(tmp_path)) == (1_000_000, 300_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_watch.limit_bytes(tmp_path) is None


def test_a_process_of_ones_own_says_where_it_stands_when_it_is_asked() -> None:
    found = tracing.try_tracing()
    assert found.answered
    assert found.traced is not bool(found.problem)


def test_tracing_that_is_refused_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(stacks, "_PY_SPY", refusing)
    found = tracing.try_tracing()
    assert (found.traced, found.answered) == (False, True)
    assert "Permission denied" in found.problem


def test_packages_are_compared_with_the_range_that_is_wanted() -> None:
    xxhash = version("xxhash")
    found = look_at_packages(
        [f"xxhash=={xxhash}", "numpy<0.1", "lastgood-is-not-this", 'pytest<0; extra == "dev"', "psutil"]
    )
    assert [(package.name, package.version is not None, package.fits) for package in found] == [
        ("xxhash", True, True),
        ("numpy", True, False),
        ("lastgood-is-not-this", False, False),
        ("psutil", True, True),
    ]


def test_a_module_that_does_not_import_is_told_and_the_others_are_tried() -> None:
    found, cuda = try_imports(("json", "no_such_module", "xxhash"))
    assert [(each.module, each.problem) for each in found] == [
        ("json", ""),
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("xxhash", ""),
    ]
    assert cuda is None


def test_a_module_that_takes_its_process_down_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os\nprint('noise')\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [found], _ = try_imports(("deadly",))
    assert "status -9" in found.problem


def test_examining_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys; import orchestrator.cli.doctor, orchestrator.doctor.examine; "
        "print(sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
