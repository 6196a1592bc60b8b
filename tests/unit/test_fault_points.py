"""The list of fault points is the one that the source has, and an unarmed point is as good as none."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import orchestrator
import workers
from chaos.command import register
from chaos.points import POINTS, Fault, point_named
from workers import failpoint
from workers.failpoint import Arm

PACKAGES = [Path(str(package.__file__)).parent for package in (workers, orchestrator)]


@pytest.fixture(autouse=True)
def disarmed(tmp_path: Path) -> Iterator[None]:
    yield
    failpoint.arm((), tmp_path)


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of a function or method of this name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == name:
                yield node


def steps_of_the_store() -> dict[str, list[str]]:
    """Method of LocalStore -> the steps at which it passes fault points of its caller."""
    tree = ast.parse((PACKAGES[0] / "checkpoint" / "store.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def steps(name: str) -> list[str]:
        found = [str(ast.literal_eval(call.args[1])) for call in calls(functions[name], "hit_point")]
        inner = steps("_write_temporary") if name != "_write_temporary" else []
        return inner + found

    return {name: steps(name) for name in ("write_atomic", "create_exclusive")}


def points_in_the_source() -> dict[str, list[str]]:
    """Point -> the files that pass it."""
    found = defaultdict(list)
    steps = steps_of_the_store()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            tree = ast.parse(path.read_text())
            for call in calls(tree, "hit"):
                if isinstance(call.args[0], ast.Constant):
                    found[call.args[0].value].append(path.name)
                else:
                    assert path.name == "store.py", f"{path}: a fault point whose name nobody can look up"
            for method, of_method in steps.items():
                for call in calls(tree, method):
                    for keyword in call.keywords:
                        if keyword.arg == "points":
                            for step in of_method:
                                found[f"{ast.literal_eval(keyword.value)}.{step}"].append(path.name)
    return found


def test_every_fault_point_of_the_source_is_listed_and_every_listed_one_exists() -> None:
    assert set(points_in_the_source()) == {point.name for point in POINTS}


def test_names_are_unique_and_lines_are_short() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert all(len(point.what) <= 80 for point in POINTS)


def test_what_can_be_torn_is_what_tells_how(tmp_path: Path) -> None:
    """A call of `hit` passes a way to tear exactly where the list says that something is written."""
    steps = {"write": True}
    tearing = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            for call in calls(ast.parse(path.read_text()), "hit"):
                has_tear = len(call.args) > 1
                if has_tear and isinstance(call.args[0], ast.Constant):
                    tearing.add(call.args[0].value)
    tearing |= {point.name for point in POINTS if steps.get(point.name.partition(".")[2])}
    assert tearing == {point.name for point in POINTS if Fault.TORN in point.faults}


def test_a_point_that_does_not_exist_is_told_as_such() -> None:
    with pytest.raises(KeyError, match="lists them"):
        point_named("persist.nothing")
    assert point_named("persist.block").process == "keeper"


def test_the_command_prints_one_line_for_each() -> None:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["chaos", "points"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    for point in POINTS:
        [line] = [line for line in lines if line.split()[:1] == [point.name]]
        assert point.what in line
    listed = json.loads(CliRunner().invoke(app, ["chaos", "points", "--json"]).output)
    assert [one["name"] for one in listed] == [point.name for point in POINTS]


def test_a_torn_write_leaves_its_first_half_and_a_dead_process(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from workers import failpoint
from workers.checkpoint.store import LocalStore
failpoint.arm([failpoint.Arm(id="t", point="commit.write", action="torn_write")], Path({str(tmp_path / "faults")!r}))
LocalStore(Path({str(tmp_path)!r})).write_atomic("manifest.json", b"0123456789", points="commit")
"""
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -9
    [left] = tmp_path.glob("manifest.json*")
    assert left.suffix == ".tmp"
    assert left.read_bytes() == b"01234"
    assert json.loads((tmp_path / "faults" / "t.json").read_bytes())["action"] == "torn_write"


def test_an_unarmed_point_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> bool:
        raise AssertionError("an unarmed point looked for a fault")

    monkeypatch.setattr(failpoint, "_matches", fails)
    failpoint.hit("step.end", rank=0, step=1)
    monkeypatch.setattr(failpoint, "_armed", (Arm(id="a", point="step.begin"),))
    failpoint.hit("step.end", rank=0, step=1)
