"""`lastgood checkpoints` tells which checkpoint counts, and finds every damaged byte."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import make_manifest, save_shards, two_ranks
from click.testing import Result
from typer.testing import CliRunner

from orchestrator.archive import RunArchive
from orchestrator.cli import app as cli
from orchestrator.decide.lineage import GenerationRecord
from workers.checkpoint.manifest import Manifest, checkpoint_dir, checkpoint_name
from workers.checkpoint.store import LocalStore
from workers.errors import CallerError, GuaranteeBroken

NEWEST = checkpoint_name(50, 2, 1)
ROLLED_BACK = checkpoint_name(60, 1, 1)
UNFINISHED = checkpoint_name(70, 2, 1)
SHARD = "rank-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 1 saved steps 20, 40 and 60; generation 2 restored step 40, saved step 50, died in a save."""
    directory = tmp_path_factory.mktemp("run")
    store = LocalStore(directory)
    archive = RunArchive(store)
    archive.create_generation(generation(1, None, None, 0), seen=archive.scan())
    for step in (20, 40, 60):
        commit(store, archive, step, 1)
    archive.create_generation(generation(2, checkpoint_name(40, 1, 1), 1, 40), seen=archive.scan())
    commit(store, archive, 50, 2)
    save_shards(store, two_ranks(), UNFINISHED)
    return directory


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(finished_run, tmp_path / "run")


def generation(number: int, parent: str | None, parent_generation: int | None, step: int) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver="test",
        parent=parent,
        parent_generation=parent_generation,
        restored_step=step,
        source="checkpoint" if parent else "fresh",
        reason="start",
        created_at=1764000000.0,
        world_size=2,
    )


def commit(store: LocalStore, archive: RunArchive, step: int, number: int) -> Manifest:
    shards = save_shards(store, two_ranks(), checkpoint_name(step, number, 1))
    manifest = replace(make_manifest(shards, step), generation=number)
    archive.commit(manifest)
    return manifest


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.build_app(), ["checkpoints", *map(str, arguments)])


def run_json(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def flip_bit(run_dir: Path, name: str, tensor: str) -> None:
    """Damage one tensor of rank 1's shard."""
    shown = run_json("show", run_dir, name)
    record = next(record for record in shown["shards"][1]["tensors"] if record["name"] == tensor)
    path = run_dir / checkpoint_dir(name) / SHARD
    data = bytearray(path.read_bytes())
    data[record["start"]] ^= 1
    path.write_bytes(data)


def test_list_shows_every_attempt_and_which_one_a_restart_would_restore(run_dir: Path) -> None:
    rows = {row["name"]: row for row in run_json("list", run_dir)["checkpoints"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        UNFINISHED: "unfinished",
        NEWEST: "newest",
        ROLLED_BACK: "rolled back",
        checkpoint_name(40, 1, 1): "older",
        checkpoint_name(20, 1, 1): "older",
    }
    assert rows[NEWEST]["bytes"] == sum(
        path.stat().st_size for path in (run_dir / checkpoint_dir(NEWEST)).glob("rank*")
    )
    assert rows[UNFINISHED]["bytes"] is None


def test_list_without_json_has_a_line_for_each(run_dir: Path) -> None:
    result = run("list", run_dir)
    assert result.exit_code == 0
    assert [name in result.stdout for name in (NEWEST, ROLLED_BACK, UNFINISHED)] == [True] * 3
    assert len(result.stdout.splitlines()) == 1 + 5


def test_quarantined_newest_gives_way_to_the_one_before_and_shows_its_reason(run_dir: Path) -> None:
    RunArchive(LocalStore(run_dir)).quarantine(NEWEST, "a bit flipped")
    rows = {row["name"]: row for row in run_json("list", run_dir)["checkpoints"]}
    assert (rows[NEWEST]["status"], rows[NEWEST]["reason"]) == ("quarantined", "a bit flipped")
    assert rows[checkpoint_name(40, 1, 1)]["status"] == "newest"


def test_damaged_manifest_is_listed_as_damage(run_dir: Path) -> None:
    (run_dir / checkpoint_dir(NEWEST) / "manifest.json").write_text("{}", encoding="utf-8")
    rows = {row["name"]: row for row in run_json("list", run_dir)["checkpoints"]}
    assert rows[NEWEST]["status"] == "damaged"
    assert "manifest.json" in rows[NEWEST]["reason"]


def test_show_takes_the_newest_by_default_and_names_its_tensors(run_dir: Path) -> None:
    assert run_json("show", run_dir)["step"] == 50
    text = run("show", run_dir).stdout
    assert NEWEST in text
    assert "model.weight" in text
    assert "optimizer.state.weight.step" in text


def test_show_of_an_unfinished_save_says_why_there_is_nothing_to_show(run_dir: Path) -> None:
    result = run("show", run_dir, UNFINISHED)
    assert isinstance(result.exception, GuaranteeBroken)
    assert "unfinished" in str(result.exception)


def test_verify_passes_over_unfinished_saves_and_reads_all_others(run_dir: Path) -> None:
    result = run("verify", run_dir, "--json")
    assert result.exit_code == 0
    checked = json.loads(result.stdout)
    assert checked["ok"]
    assert [entry["name"] for entry in checked["checkpoints"]] == [
        NEWEST,
        ROLLED_BACK,
        checkpoint_name(40, 1, 1),
        checkpoint_name(20, 1, 1),
    ]


@pytest.mark.parametrize("tensor", ["model.weight", "model.half", "model.mask", "rank.00001.rng.torch"])
def test_verify_names_the_tensor_with_a_flipped_bit_and_exits_with_3(run_dir: Path, tensor: str) -> None:
    flip_bit(run_dir, NEWEST, tensor)
    result = run("verify", run_dir)
    assert result.exit_code == 3
    assert f"{NEWEST}  DAMAGED" in result.stdout
    assert f"{SHARD}: tensor {tensor}: " in result.stdout
    assert f"{ROLLED_BACK}  ok" in result.stdout


def test_verify_of_one_checkpoint_leaves_the_others_unread(run_dir: Path) -> None:
    flip_bit(run_dir, NEWEST, "model.weight")
    assert run("verify", run_dir, NEWEST).exit_code == 3
    assert run("verify", run_dir, checkpoint_name(40, 1, 1)).exit_code == 0


def test_verify_finds_a_missing_shard_and_a_damaged_manifest(run_dir: Path) -> None:
    (run_dir / checkpoint_dir(NEWEST) / SHARD).unlink()
    (run_dir / checkpoint_dir(ROLLED_BACK) / "manifest.json").write_bytes(b"")
    problems = {entry["name"]: entry["problems"] for entry in run_json("verify", run_dir)["checkpoints"]}
    assert [problem["file"] for problem in problems[NEWEST]] == [SHARD]
    assert [problem["file"] for problem in problems[ROLLED_BACK]] == ["manifest.json"]


def test_json_is_the_only_thing_on_standard_output(run_dir: Path) -> None:
    for command in ("list", "show", "verify"):
        assert isinstance(run_json(command, run_dir), dict)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_directory_that_is_no_run_is_the_callers_mistake(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path)
    assert isinstance(result.exception, CallerError)
    assert str(tmp_path) in str(result.exception)


@pytest.mark.parametrize("command", ["show", "verify"])
def test_unknown_name_is_the_callers_mistake(run_dir: Path, command: str) -> None:
    result = run(command, run_dir, checkpoint_name(999, 1, 1))
    assert isinstance(result.exception, CallerError)


def test_inspecting_writes_nothing(run_dir: Path) -> None:
    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in [run_dir, *run_dir.rglob("*")]}

    before = state()
    for command in ("list", "show", "verify"):
        run(command, run_dir)
    assert state() == before


def test_a_checkpoint_that_was_not_read_back_is_shown_as_such_and_can_be_verified(run_dir: Path) -> None:
    store = LocalStore(run_dir)
    name = checkpoint_name(80, 2, 1)
    shards = save_shards(store, two_ranks(), name, read_back=None)
    RunArchive(store).commit(replace(make_manifest(shards, 80), generation=2))
    assert run_json("list", run_dir)["checkpoints"][0]["verified_from"] == ["nothing"]
    assert "read back  from nothing: verify_saves was off" in run("show", run_dir, name).stdout
    assert re.search("read back  from (device|cache|memory), digests equal", run("show", run_dir, NEWEST).stdout)
    assert run("verify", run_dir, name).exit_code == 0
