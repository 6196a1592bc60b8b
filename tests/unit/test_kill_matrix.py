"""The kill matrix tries what it says, holds where production code does, and goes red where that is broken."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from chaos.command import register
from chaos.matrix.cells import ONLY_SUPERVISED, Cell, all_cells
from chaos.matrix.runner import Settings, chosen, run_cells
from chaos.points import POINTS, Fault
from chaos.verdict import Outcome, Verdict
from workers.failpoint import Arm

SCRIPT = Path(__file__).parent / "matrix_script.py"


HOLD = (
    "2 ranks, rank 1, snapshot.copy, SIGKILL",
    "2 ranks, keeper of rank 1, persist.block, torn write",
    "2 ranks, coordinator, commit.rename, SIGKILL",
    "2 ranks, rank 0, commit.fsync, SIGKILL",
    "2 ranks, rank 1, restore.read, EIO, restoring from memory",
    "2 ranks, coordinator, quarantine.write, torn write",
)
BREAK = {
    "bytes-after-the-commit": ("2 ranks, keeper of rank 1, persist.block, torn write", "never torn"),
    "newest-is-passed-over": (
        "2 ranks, coordinator, restore.choose, SIGKILL, restoring from storage",
        "newest verified wins",
    ),
    "retention-keeps-one": ("2 ranks, coordinator, retention.done, SIGKILL", "retention keeps"),
    "other-bytes-are-restored": ("2 ranks, rank 1, step.end, SIGKILL", "exact"),
    "no-points": ("2 ranks, rank 1, step.begin, SIGKILL", "never fired"),
}
"""What is broken in the production code, the cell that is to notice, and what it says."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Verdicts on what is to hold and what is to break, in one process of its own, which forks; and its directory."""
    out = tmp_path_factory.mktemp("matrix")
    pairs = [("none", cell) for cell in HOLD] + [(sabotage, cell) for sabotage, (cell, _) in BREAK.items()]
    subprocess.run(
        [sys.executable, str(SCRIPT), str(out), *(word for pair in pairs for word in pair)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return out, json.loads((out / "verdicts.json").read_bytes())


def test_every_point_meets_every_fault_or_the_cell_says_why_not() -> None:
    cells = all_cells()
    tried = {(cell.point, cell.fault) for cell in cells}
    assert tried == {(point.name, fault) for point in POINTS for fault in Fault}
    for point in POINTS:
        for fault in Fault:
            of_both = [cell for cell in cells if (cell.point, cell.fault) == (point.name, fault)]
            possible = fault in point.faults and point.name not in ONLY_SUPERVISED
            assert all(bool(cell.impossible) != possible for cell in of_both)
    assert len({cell.name for cell in cells}) == len(cells)


def test_every_rank_dies_at_every_point_and_so_does_whoever_passes_it() -> None:
    for point in POINTS:
        for size in (2, 3):
            victims = {
                cell.victim
                for cell in all_cells()
                if (cell.world_size, cell.point, cell.fault) == (size, point.name, Fault.KILL)
            }
            ranks = {f"rank {rank}" for rank in range(size)}
            others = {"keeper": {f"keeper of {rank}" for rank in ranks}, "coordinator": {"coordinator"}}
            assert victims == ranks | others.get(point.process, set())


def test_a_part_of_the_matrix_can_be_chosen() -> None:
    cells = all_cells()
    assert {cell.point for cell in chosen(cells, "persist.fsync")} == {"persist.fsync"}
    [one] = chosen(cells, "2 ranks, keeper of rank 1, persist.fsync, SIGKILL, in a save")
    assert one.arms(first=True) == (
        Arm(id="fault", point="persist.fsync", action="kill_self", when={"rank": 1, "step_min": 4}),
    )
    assert len(chosen(cells, "3 ranks, coordinator, commit.*, torn*")) == 10
    assert chosen(cells, None) == cells


@pytest.fixture
def impossible() -> Iterator[list[Cell]]:
    yield [cell for cell in all_cells() if cell.impossible][:5]


def test_what_was_judged_before_is_not_tried_again_unless_the_seed_is_another(
    impossible: list[Cell], tmp_path: Path
) -> None:
    def told(settings: Settings, cells: list[Cell]) -> list[Verdict]:
        return run_cells(cells, settings, replay=lambda cell: cell.name, told=lambda verdict: None)

    settings = Settings(out=tmp_path, seed=1, jobs=1)
    file = tmp_path / "verdicts.jsonl"
    assert [verdict.outcome for verdict in told(settings, impossible[:2])] == [Outcome.SKIPPED] * 2
    with file.open("a") as end:
        end.write('{"seed": 1, "na')  # its writer was killed
    lines = file.read_text().splitlines()
    known = json.loads(lines[0])
    file.write_text("\n".join([json.dumps(known | {"detail": "of before"}), *lines[1:]]) + "\n")
    again = told(settings, impossible)
    assert again[0].detail == "of before"
    assert [verdict.name for verdict in again] == [cell.name for cell in impossible]
    other = told(Settings(out=tmp_path, seed=2, jobs=1), impossible[:1])
    assert other[0].detail == impossible[0].impossible


def test_usage_errors_are_told(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    for options, wanted in (
        (["--only", "nothing at all"], "--only"),
        (["--ranks", "1"], "--ranks"),
        (["--ranks", "99"], "at most 8"),
    ):
        result = CliRunner().invoke(app, ["chaos", "matrix", "--out", str(tmp_path), *options])
        assert result.exit_code != 0
        assert wanted in str(result.exception)


def test_command_tries_the_cells_that_are_asked_for_and_writes_the_report(tmp_path: Path) -> None:
    lastgood = Path(sys.executable).parent / "lastgood"
    done = subprocess.run(
        [str(lastgood), "chaos", "matrix", "--only", HOLD[2], "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["cells"], summary["held"]) == (1, 1)
    assert HOLD[2] in Path(summary["report"]).read_text(encoding="utf-8")


def test_one_cell_of_each_kind_holds(tried: tuple[Path, list[dict[str, Any]]]) -> None:
    out, verdicts = tried
    held = verdicts[: len(HOLD)]
    assert {one["name"]: one["detail"] for one in held if one["outcome"] != "held"} == {}
    assert all(one["facts"]["fired"] is not None for one in held)
    left = {path.name for path in (out / "cells").iterdir()}
    assert left == {str(number) for number in range(len(HOLD), len(HOLD) + len(BREAK))}, "evidence of what broke only"


@pytest.mark.parametrize("sabotage", BREAK)
def test_the_matrix_goes_red_where_production_code_is_broken(
    sabotage: str, tried: tuple[Path, list[dict[str, Any]]]
) -> None:
    verdict = tried[1][len(HOLD) + list(BREAK).index(sabotage)]
    assert verdict["outcome"] == Outcome.BROKEN
    assert BREAK[sabotage][1] in verdict["detail"]
