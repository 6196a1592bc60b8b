"""The run directory under other drivers' hands, kills between operations, and damage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import recovery
from orchestrator.archive import LineageMoved, RunArchive, ScanResult
from orchestrator.decide.ladder import Fresh, FromMemory, NothingVerifies, Restore
from orchestrator.decide.lineage import GenerationRecord, MemorySet, eligible
from orchestrator.generation_file import generation_bytes, parse_generation
from workers import failpoint
from workers.checkpoint.manifest import Manifest, ShardRecord, shard_file
from workers.checkpoint.store import LocalStore
from workers.errors import CheckpointDamaged, EnvironmentProblem, Fenced

WORLD = 2


class Run:
    """A run directory, and short ways to put things into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.archive = RunArchive(LocalStore(root), clock=lambda: 1000.0)

    def record(self, number: int, parent: Manifest | None = None, driver: str = "d") -> GenerationRecord:
        return GenerationRecord(
            number=number,
            driver=driver,
            parent=parent.name if parent else None,
            parent_generation=parent.generation if parent else None,
            restored_step=parent.step if parent else 0,
            source="checkpoint" if parent else "fresh",
            reason="start",
            created_at=5.0,
            world_size=WORLD,
        )

    def start(self, number: int, parent: Manifest | None = None, seen: ScanResult | None = None) -> None:
        self.archive.create_generation(self.record(number, parent), seen=seen or self.archive.scan())

    def shards(self, generation: int, step: int, attempt: int = 1) -> Manifest:
        """Written shards, and the manifest that would commit them."""
        shards = tuple(
            ShardRecord(
                file=shard_file(rank, WORLD), rank=rank, bytes=5, digest="00", verified_from="device", tensors=()
            )
            for rank in range(WORLD)
        )
        manifest = Manifest(
            run="r",
            generation=generation,
            step=step,
            attempt=attempt,
            world_size=WORLD,
            shards=shards,
            identity={},
            progress={"step": step},
            created_at=5.0,
        )
        directory = self.directory(manifest)
        directory.mkdir(parents=True)
        for shard in shards:
            (directory / shard.file).write_bytes(b"bytes")
        return manifest

    def save(self, generation: int, step: int, attempt: int = 1) -> Manifest:
        manifest = self.shards(generation, step, attempt)
        self.archive.commit(manifest, my_generation=generation)
        return manifest

    def directory(self, manifest: Manifest) -> Path:
        return self.root / "checkpoints" / manifest.name

    def names(self) -> list[str]:
        return [record.name for record in self.archive.scan().checkpoints]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def at_point(monkeypatch: pytest.MonkeyPatch, point: str, action: Callable[[], Any]) -> None:
    """Do something at the moment at which a fault point is passed, once."""
    pending = [action]

    def hit(name: str, *_tear: Any, **_context: Any) -> None:
        if name == point and pending:
            pending.pop()()

    monkeypatch.setattr(failpoint, "hit", hit)


def other_driver_starts(run: Run, number: int) -> None:
    (run.root / "generations").mkdir(exist_ok=True)
    (run.root / f"generations/{number:08d}.json").write_bytes(generation_bytes(run.record(number, driver="other")))


# Looking


def test_a_new_run_directory_is_empty_and_starts_afresh(run: Run) -> None:
    scan = run.archive.scan()
    assert (scan.generations, scan.checkpoints, scan.orphans, scan.next_number) == ((), (), (), 1)
    assert run.archive.select().choice == Fresh()


def test_a_run_directory_that_has_gone_away_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunArchive(LocalStore(tmp_path / "gone")).scan()


def test_generations_and_checkpoints_are_found_by_looking(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    unfinished = run.shards(1, 40)
    scan = run.archive.scan()
    assert scan.generations == (run.record(1),)
    assert scan.manifests == (saved,)
    assert [record.name for record in scan.orphans] == [unfinished.name]
    assert scan.next_number == 2


def test_names_that_are_not_ours_are_left_alone(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    for name in ("checkpoint_2026-01-01", "step-20", "step-000000020-g0001-a01.bak", ".probe"):
        (run.root / "checkpoints" / name).mkdir()
    (run.root / "checkpoints" / "step-000000030-g0001-a01").write_bytes(b"a file")
    (run.root / "generations" / "7.json").write_bytes(b"{}")
    (run.root / "generations" / "00000009.json.abc.tmp").write_bytes(b"{}")
    (run.root / "quarantine").mkdir()
    (run.root / "quarantine" / "notes.json").write_bytes(b"{}")
    scan = run.archive.scan()
    assert (run.names(), scan.orphans, scan.quarantined, scan.next_number) == ([saved.name], (), {}, 2)


def test_an_attempt_uses_up_its_generation_number_although_the_generation_file_is_gone(run: Run) -> None:
    run.shards(6, 20)
    assert run.archive.scan().next_number == 7


def test_reading_needs_no_write_access_if_asked_so(run: Run) -> None:
    run.start(1)
    run.save(1, 20)
    before = sorted(run.root.rglob("*"))
    times = [path.stat().st_mtime_ns for path in before]
    run.archive.scan(fresh=False)
    assert sorted(run.root.rglob("*")) == before
    assert [path.stat().st_mtime_ns for path in before] == times


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (truncate, shard_file(1, WORLD), "has 4 bytes, 5 were committed"),
        (delete, shard_file(0, WORLD), "is missing"),
        (truncate, "manifest.json", "manifest.json"),
        (flip, "manifest.json", "manifest.json"),
        (delete, "manifest.json", "manifest.json is missing, though it was committed"),
    ],
)
def test_a_damaged_newest_checkpoint_is_quarantined_with_the_reason_and_left_in_place(
    run: Run, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    run.start(1)
    older, newer = run.save(1, 20), run.save(1, 40)
    damage(run.directory(newer) / file)
    selection = run.archive.select(committed={older.name, newer.name})
    assert isinstance(selection.choice, Restore)
    assert selection.choice.name == older.name
    assert [name for name, _ in selection.choice.passed] == [newer.name]
    assert reason in selection.newly_quarantined[newer.name]
    assert run.directory(newer).is_dir()
    again = run.archive.select(committed={older.name, newer.name})
    assert again.choice == selection.choice
    assert not again.newly_quarantined
    assert reason in again.scan.quarantined[newer.name]


def test_when_nothing_is_good_the_run_stops_with_all_reasons(run: Run) -> None:
    run.start(1)
    for step in (20, 40):
        delete(run.directory(run.save(1, step)) / shard_file(0, WORLD))
    choice = run.archive.select().choice
    assert isinstance(choice, NothingVerifies)
    assert len(choice.found) == 2
    assert all("rank-00000-of-00002.safetensors is missing" in reason for _, reason in choice.found)


def test_a_parent_without_its_manifest_is_damaged_and_no_leftover_of_a_save(run: Run) -> None:
    run.start(1)
    parent = run.save(1, 20)
    run.start(2, parent)
    delete(run.directory(parent) / "manifest.json")
    scan = run.archive.scan()
    assert not scan.orphans
    assert parent.name in scan.problems


def test_committed_checkpoints_whose_directories_are_gone_never_lead_to_a_fresh_start(run: Run) -> None:
    run.start(1)
    names = [run.save(1, step).name for step in (10, 20)]
    shutil.rmtree(run.root / "checkpoints")
    choice = run.archive.select(names).choice
    assert isinstance(choice, NothingVerifies)
    assert dict(choice.found) == dict.fromkeys(names, "its directory is gone, though it was committed")
    assert run.archive.scan().quarantined == {}, "they may come back with their mount"


def test_a_newest_checkpoint_that_is_gone_is_passed_over_with_the_reason_and_an_older_one_is_not_missed(
    run: Run,
) -> None:
    run.start(1)
    names = [run.save(1, step).name for step in (10, 20, 30)]
    for name in (names[0], names[2]):
        shutil.rmtree(run.root / "checkpoints" / name)
    choice = run.archive.select(names).choice
    assert isinstance(choice, Restore)
    assert choice.name == names[1]
    assert choice.passed == ((names[2], "its directory is gone, though it was committed"),)
    record = run.record(2)
    run.archive.create_generation(record, seen=run.archive.select(names).scan)  # no other driver has moved the lineage


def test_a_manifest_in_another_checkpoints_directory_is_no_commit_of_that_one(run: Run) -> None:
    run.start(1)
    saved, unfinished = run.save(1, 20), run.shards(1, 40)
    (run.directory(unfinished) / "manifest.json").write_bytes((run.directory(saved) / "manifest.json").read_bytes())
    choice = run.archive.select().choice
    assert isinstance(choice, Restore)
    assert choice.name == saved.name


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_any_flipped_bit_in_a_generation_file_is_noticed(position: int, bit: int) -> None:
    record = Run(Path("unused")).record(3)
    data = bytearray(generation_bytes(record))
    assert parse_generation(bytes(data), 3, "g") == record
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CheckpointDamaged, match="g "):
        parse_generation(bytes(data), 3, "g")


def test_a_generation_file_in_the_place_of_another_is_noticed(run: Run) -> None:
    with pytest.raises(CheckpointDamaged, match="does not describe generation 4"):
        parse_generation(generation_bytes(run.record(3)), 4, "g")


def test_a_damaged_generation_file_still_uses_up_its_number_and_hides_what_it_came_from(run: Run) -> None:
    run.start(1)
    parent = run.save(1, 20)
    run.start(2, parent)
    mine = run.save(2, 40)
    flip(run.root / "generations/00000002.json")
    scan = run.archive.scan()
    assert scan.next_number == 3
    assert scan.generations[1].source == "unknown"
    assert [record.name for record in eligible(scan.generations, scan.checkpoints)] == [mine.name]


def test_the_first_reason_of_a_quarantine_stands(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    run.archive.quarantine(saved.name, "first")
    run.archive.quarantine(saved.name, "second")
    assert run.archive.scan().quarantined == {saved.name: "first"}


def test_a_quarantine_whose_file_is_damaged_still_holds(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    run.archive.quarantine(saved.name, "first")
    truncate(run.root / "quarantine" / f"{saved.name}.json")
    assert isinstance(run.archive.select().choice, NothingVerifies)


@pytest.mark.parametrize("name", ["../../etc", "manifest.json", ""])
def test_only_a_checkpoint_can_be_quarantined(run: Run, name: str) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint's name"):
        run.archive.quarantine(name, "x")


# Two drivers


def test_a_number_that_another_driver_took_is_refused(run: Run) -> None:
    seen = run.archive.scan()
    other_driver_starts(run, 1)
    with pytest.raises(Fenced, match="another driver started generation 1"):
        run.start(1, seen=seen)


def test_creating_the_same_generation_again_is_fine(run: Run) -> None:
    seen = run.archive.scan()
    run.start(1, seen=seen)
    assert run.archive.create_generation(run.record(1), seen=seen) == (run.record(1),)


def test_a_driver_that_is_overtaken_while_it_creates_its_generation_notices(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_point(monkeypatch, "generation.created", lambda: other_driver_starts(run, 2))
    with pytest.raises(Fenced, match="generation 2"):
        run.start(1)


def test_a_commit_between_looking_and_creating_is_not_lost(run: Run) -> None:
    run.start(1)
    older = run.save(1, 20)
    seen = run.archive.scan()
    newer = run.save(1, 40)
    with pytest.raises(LineageMoved, match=newer.name):
        run.start(2, older, seen)
    selection = run.archive.select()
    assert isinstance(selection.choice, Restore)
    assert selection.choice.name == newer.name
    assert selection.scan.next_number == 3
    run.start(3, newer, selection.scan)
    scan = run.archive.scan()
    assert [record.name for record in eligible(scan.generations, scan.checkpoints)] == [newer.name, older.name]


def from_memory(run: Run, number: int, step: int, parent: Manifest | None = None) -> GenerationRecord:
    origin = {"parent": parent.name if parent else None, "parent_generation": 1, "restored_step": step}
    return replace(run.record(number), source="memory", **origin)


def test_what_is_restored_from_memory_may_be_committed_while_its_generation_is_created(run: Run) -> None:
    run.start(1)
    run.save(1, 20)
    seen = run.archive.scan()
    run.save(1, 37)
    records = run.archive.create_generation(from_memory(run, 2, 37), seen=seen)
    assert [record.number for record in records] == [1, 2]
    scan = run.archive.scan()
    assert [record.step for record in eligible(scan.generations, scan.checkpoints)] == [37, 20]


def test_a_checkpoint_that_is_newer_than_what_is_restored_from_memory_is_not_lost(run: Run) -> None:
    run.start(1)
    seen = run.archive.scan()
    newer = run.save(1, 40)
    with pytest.raises(LineageMoved, match=newer.name):
        run.archive.create_generation(from_memory(run, 2, 37), seen=seen)


def test_the_checkpoint_of_a_state_that_is_restored_from_memory_is_named_and_has_to_stay(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 40)
    memory = MemorySet(generation=1, step=40, where={0: "k", 1: "k"})
    selection = run.archive.select(memory=memory)
    assert selection.choice == FromMemory(memory=memory, parent=saved.name)
    assert run.archive.delete(saved.name, my_generation=1)
    with pytest.raises(LineageMoved, match="is gone"):
        run.archive.create_generation(from_memory(run, 2, 40, saved), seen=selection.scan)


@pytest.mark.parametrize("point", ["commit.write", "commit.rename", "commit.dir_fsync"])
def test_a_commit_is_not_fenced_by_the_next_generation_of_the_same_driver(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    run.start(1)
    manifest = run.shards(1, 37)
    seen = run.archive.scan()
    record = from_memory(run, 2, 37)
    at_point(monkeypatch, point, lambda: run.archive.create_generation(record, seen=seen))
    run.archive.commit(manifest, my_generation=1)
    assert run.names() == [manifest.name]
    other_driver_starts(run, 3)
    with pytest.raises(Fenced, match="generation 3"):
        run.archive.commit(run.shards(2, 40), my_generation=2)


def test_a_parent_that_is_deleted_between_looking_and_creating_is_noticed(run: Run) -> None:
    run.start(1)
    older, newer = run.save(1, 20), run.save(1, 40)
    seen = run.archive.scan()
    assert run.archive.delete(older.name, my_generation=1)
    with pytest.raises(LineageMoved, match=f"{older.name}.*is gone"):
        run.start(2, older, seen)
    run.start(3, newer, run.archive.scan())


def test_passing_over_a_bad_rung_is_no_reason_to_start_over(run: Run) -> None:
    run.start(1)
    older, newer = run.save(1, 20), run.save(1, 40)
    run.archive.quarantine(newer.name, "bad")
    run.start(2, older)
    assert [record.number for record in run.archive.scan().generations] == [1, 2]


@pytest.mark.parametrize("point", ["commit.write", "commit.rename", "commit.dir_fsync"])
def test_a_commit_during_which_another_driver_takes_over_is_not_called_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    run.start(1)
    manifest = run.shards(1, 20)
    at_point(monkeypatch, point, lambda: other_driver_starts(run, 2))
    with pytest.raises(Fenced, match="generation 2"):
        run.archive.commit(manifest)
    scan = run.archive.scan()
    assert not eligible(scan.generations, scan.checkpoints)


def test_an_overtaken_driver_commits_nothing(run: Run) -> None:
    run.start(1)
    manifest = run.shards(1, 20)
    other_driver_starts(run, 2)
    with pytest.raises(Fenced):
        run.archive.commit(manifest)
    assert run.names() == []
    run.archive.commit(manifest, my_generation=2)
    assert run.names() == [manifest.name]


def test_an_overtaken_driver_deletes_nothing(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    other_driver_starts(run, 2)
    assert not run.archive.delete(saved.name, my_generation=1)
    assert run.names() == [saved.name]


def test_what_a_new_driver_may_have_chosen_is_put_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start(1)
    saved = run.save(1, 20)
    store = LocalStore(run.root)
    rename = store.rename

    def rename_and_be_overtaken(source: str, target: str) -> None:
        rename(source, target)
        if target.startswith("trash/"):
            other_driver_starts(run, 2)

    monkeypatch.setattr(store, "rename", rename_and_be_overtaken)
    assert not RunArchive(store).delete(saved.name, my_generation=1)
    assert run.names() == [saved.name]
    assert run.archive.structural_problems(saved.name) == ()


# Committing and deleting


def test_the_manifest_is_the_commit_and_its_write_passes_the_named_points(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoint, "hit", lambda name, *tear, **context: passed.append(name))
    run.start(1)
    run.save(1, 20)
    points = [name.removeprefix("commit.") for name in passed if name.startswith("commit.")]
    assert points == ["begin", "open", "write", "fsync", "rename", "dir_fsync", "parent_fsync", "done"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


@pytest.mark.parametrize("point", ["begin", "write", "fsync", "rename", "dir_fsync", "done"])
def test_killed_anywhere_in_a_commit_the_checkpoint_is_there_whole_or_not_and_the_commit_can_be_made_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    run.start(1)
    older, newer = run.save(1, 20), run.shards(1, 40)

    def die() -> None:
        raise Killed

    with monkeypatch.context() as armed, pytest.raises(Killed):
        at_point(armed, f"commit.{point}", die)
        run.archive.commit(newer)
    choice = run.archive.select().choice
    assert isinstance(choice, Restore)
    assert choice.name == (newer.name if point in ("dir_fsync", "done") else older.name)
    run.archive.commit(newer)
    assert run.names() == [older.name, newer.name]
    assert run.archive.scan().manifests[-1] == newer


def test_an_attempt_is_not_committed_twice_with_different_content(run: Run) -> None:
    run.start(1)
    first = run.save(1, 20)
    other = Manifest(**{**{name: getattr(first, name) for name in first.__slots__}, "progress": {"step": 21}})
    with pytest.raises(CheckpointDamaged, match="exists already"):
        run.archive.commit(other)
    assert run.archive.scan().manifests == (first,)


def test_shards_that_the_coordinator_cannot_see_are_not_committed_and_the_error_says_what_to_do(run: Run) -> None:
    run.start(1)
    manifest = run.shards(1, 20)
    delete(run.directory(manifest) / shard_file(1, WORLD))
    with pytest.raises(EnvironmentProblem, match="a directory that all nodes share"):
        run.archive.commit(manifest)
    assert run.names() == []


def test_deleting_leaves_nothing_and_deleting_again_is_fine(run: Run) -> None:
    run.start(1)
    saved = run.save(1, 20)
    assert run.archive.delete(saved.name, my_generation=1)
    assert run.archive.delete(saved.name, my_generation=1)
    assert not run.directory(saved).exists()
    assert list((run.root / "trash").iterdir()) == []


def test_nothing_is_called_deleted_when_the_run_directory_goes_away_meanwhile(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start(1)
    manifest = run.save(1, 10)
    elsewhere = run.root.with_name("elsewhere")
    at_point(monkeypatch, "retention.trash", lambda: run.root.rename(elsewhere))
    with pytest.raises(FileNotFoundError):
        run.archive.delete(manifest.name, my_generation=1)
    elsewhere.rename(run.root)
    assert run.names() == [manifest.name]


@pytest.mark.parametrize("point", ["retention.trash", "retention.unlink"])
def test_killed_while_deleting_the_rest_is_cleaned_up_later(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    run.start(1)
    older, newer = run.save(1, 20), run.save(1, 40)

    def die() -> None:
        raise Killed

    with monkeypatch.context() as armed, pytest.raises(Killed):
        at_point(armed, point, die)
        run.archive.delete(older.name, my_generation=1)
    assert newer.name in run.names()
    assert run.archive.empty_trash(my_generation=1)
    assert run.archive.delete(older.name, my_generation=1)
    assert run.names() == [newer.name]
    assert list((run.root / "trash").iterdir()) == []


def test_an_overtaken_driver_leaves_the_trash_to_the_other_one(run: Run) -> None:
    (run.root / "trash" / "step-000000020-g0001-a01").mkdir(parents=True)
    other_driver_starts(run, 2)
    assert not run.archive.empty_trash(my_generation=1)
    assert list((run.root / "trash").iterdir()) != []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["save", "fail", "restart", "back"]), max_size=12))
def test_whatever_happens_the_newest_state_of_the_present_path_is_selected(actions: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory))
        path: list[Manifest] = []
        generation, step = 1, 0
        run.start(1)
        for action in actions:
            step += 10
            match action:
                case "save":
                    path.append(run.save(generation, step))
                case "fail":
                    run.shards(generation, step)
                case "restart" | "back" if path:
                    path = path[:-1] if action == "back" and len(path) > 1 else path
                    generation = run.archive.scan().next_number
                    step = path[-1].step
                    run.start(generation, path[-1])
        if path:
            choice = run.archive.select().choice
            assert isinstance(choice, Restore)
            assert choice.name == path[-1].name


def test_one_look_at_what_another_driver_changes_meanwhile_is_no_reason_to_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by crash states of two drivers: the other one committed and deleted while this one listed."""
    run.start(1)
    older = run.save(1, 20)
    scan, looks = run.archive.scan, []

    def scanned(*args: Any, **kwargs: Any) -> ScanResult:
        found = scan(*args, **kwargs)
        looks.append(found)
        if len(looks) == 1:  # the listing is as of before, the rest of after
            newer = run.save(1, 40)
            shutil.rmtree(run.directory(older))
            assert newer.name not in {checkpoint.name for checkpoint in found.checkpoints}
            return replace(found, checkpoints=(), vanished=found.checkpoints)
        return found

    monkeypatch.setattr(run.archive, "scan", scanned)
    created = recovery.create_generation(
        run.archive,
        run_dir=run.root,
        committed={older.name},
        begun={1},
        driver="e",
        reason="failure",
        world_size=WORLD,
        skip=(),
        suspects={},
        memory=None,
        on_quarantine=lambda name, reason: None,
    )
    assert created.record.restored_step == 40
    assert len(looks) == 2
