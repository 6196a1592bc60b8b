"""The judge passes a history that kept every promise, and fails each doctored one for its own guarantee alone."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from run_samples import FakeRun, edit_ledger, flip_last_bit, killed_twice, undisturbed
from typer.testing import CliRunner

from chaos.command import register
from chaos.history import History, unreadable
from chaos.judge import conduct, keeping, leaks, restores, sameness
from chaos.judge.guarantee import Guarantee
from chaos.judge.judge import CHECKS, judge
from chaos.judge.terms import Terms, read_terms, write_terms
from chaos.verdict import Outcome, Verdict
from workers.checkpoint.manifest import checkpoint_dir, checkpoint_name
from workers.errors import CallerError

Histories = Callable[..., dict[str, Verdict]]
FAILED = (Outcome.BROKEN, Outcome.UNRECOVERED)


@pytest.fixture
def reference(tmp_path: Path) -> FakeRun:
    return undisturbed(tmp_path / "reference")


@pytest.fixture
def attacked(tmp_path: Path) -> FakeRun:
    run = killed_twice(tmp_path / "attacked")
    write_observations(run)
    return run


def write_observations(
    run: FakeRun,
    rss_bytes: Callable[[int], int] = lambda look: 80 << 20,
    memfds: Callable[[int], int] = lambda look: 6,
    **end: Any,
) -> None:
    looks = [
        {
            "at": 1000.0 + number,
            "descendants": 12,
            "processes": [
                {
                    "role": "keeper",
                    "pid": 7,
                    "rss_bytes": rss_bytes(number),
                    "descriptors": 30,
                    "memfds": memfds(number),
                }
            ],
        }
        for number in range(18)
    ]
    lines = [*looks, {"at": 1020.0, "after": True, "left": [], "shm_left_bytes": 0, **end}]
    (run.directory / leaks.OBSERVATIONS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def verdicts_of(run: FakeRun, reference: FakeRun | None, **terms: Any) -> dict[str, Verdict]:
    given = Terms(reference=str(reference.directory) if reference else None, **terms)
    return {verdict.name: verdict for verdict in judge(run.directory, given)}


def failed(verdicts: Mapping[str, Verdict]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict.outcome in FAILED}


def assert_fails_only(guarantee: Guarantee, run: FakeRun, reference: FakeRun, evidence: str, **terms: Any) -> None:
    verdicts = verdicts_of(run, reference, **terms)
    assert failed(verdicts) == {guarantee.name}, {name: verdicts[name].detail for name in failed(verdicts)}
    verdict = verdicts[guarantee.name]
    assert verdict.outcome is guarantee.broken_as
    assert guarantee.promise in verdict.detail
    assert evidence in verdict.detail


def test_history_that_kept_every_promise_passes_all(attacked: FakeRun, reference: FakeRun) -> None:
    verdicts = verdicts_of(attacked, reference, steps=12, keep_last=3)
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == dict.fromkeys(verdicts, Outcome.HELD)
    assert len(verdicts) == len(CHECKS)


def test_without_a_reference_exactness_is_skipped_and_says_why(attacked: FakeRun) -> None:
    verdicts = verdicts_of(attacked, None)
    assert not failed(verdicts)
    assert verdicts["exact"].outcome is Outcome.SKIPPED
    assert "--reference" in verdicts["exact"].detail


def test_judging_writes_nothing(attacked: FakeRun, reference: FakeRun) -> None:
    def everything() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in attacked.directory.rglob("*")}

    before = everything()
    verdicts_of(attacked, reference)
    assert everything() == before


# One doctored history for each guarantee.


def test_committed_bytes_that_changed_by_themselves_are_torn(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(4, 1, 1)
    flip_last_bit(attacked, name)
    assert_fails_only(restores.NEVER_TORN, attacked, reference, name)


def test_committed_bytes_that_nobody_has_restored_are_read_as_well(tmp_path: Path, reference: FakeRun) -> None:
    run = undisturbed(tmp_path / "untouched")
    name = checkpoint_name(8, 1, 1)
    flip_last_bit(run, name)
    assert_fails_only(restores.NEVER_TORN, run, reference, f"checkpoints/{name}/rank-00000-of-00002.safetensors")


def test_committed_checkpoint_that_vanished_is_lost(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(8, 2, 1)
    shutil.rmtree(attacked.directory / checkpoint_dir(name))
    assert_fails_only(keeping.NEVER_LOST, attacked, reference, name)


def test_restart_from_an_older_step_than_the_newest_is_seen(tmp_path: Path, reference: FakeRun) -> None:
    run = FakeRun(tmp_path / "stale")
    run.generation(1, 0, None)
    run.train(1, 1, 9)
    run.commit(1, 4)
    run.commit(1, 8)
    run.kill(1, "random moment", rank=0, generation=1, step=9)
    run.generation(2, 4, 1)
    run.train(2, 5, 12)
    run.commit(2, 12)
    run.finish(2)
    assert_fails_only(restores.NEWEST_WINS, run, reference, "generation 2 restored 4, not 8")


def test_restart_from_a_timeline_that_was_left_is_seen(tmp_path: Path, reference: FakeRun) -> None:
    run = FakeRun(tmp_path / "rolled-back")
    run.generation(1, 0, None)
    run.train(1, 1, 8)
    run.commit(1, 4)
    run.kill(1, "random moment", rank=0, generation=1, step=8)
    run.generation(2, 4, 1)
    run.commit(1, 8)  # too late: generation 2 does not come from it
    run.kill(2, "random moment", rank=0, generation=2, step=5)
    run.generation(3, 8, 1)
    run.train(3, 9, 12)
    run.commit(3, 12)
    run.finish(3)
    assert_fails_only(restores.NEWEST_WINS, run, reference, "rolled back")


def test_one_different_bit_at_the_end_is_not_exact(tmp_path: Path, reference: FakeRun) -> None:
    run = FakeRun(tmp_path / "other")
    run.generation(1, 0, None)
    run.train(1, 1, 12)
    run.commit(1, 12, value=12.000001)
    run.finish(1)
    assert_fails_only(sameness.EXACT, run, reference, "rank.00000.w differs")


def test_generators_that_the_loop_did_not_seed_are_hinted_at(tmp_path: Path) -> None:
    runs = [FakeRun(tmp_path / name) for name in ("one", "other")]
    for number, run in enumerate(runs):
        run.generation(1, 0, None)
        run.train(1, 1, 12)
        run.commit(1, 12, value=float(number), tensor="rng.numpy.state.key")
        run.finish(1)
    verdict = verdicts_of(runs[0], runs[1])["exact"]
    assert verdict.outcome is Outcome.BROKEN
    assert "does the loop seed all of them" in verdict.detail


def test_sample_that_was_used_twice_is_seen(attacked: FakeRun, reference: FakeRun) -> None:
    path = attacked.journal(3, 1)
    path.write_text(path.read_text().replace("[0,[111]]", "[0,[101]]"))
    assert_fails_only(sameness.EACH_SAMPLE_ONCE, attacked, reference, "101 of epoch 0")


def test_step_without_a_record_is_seen_without_a_reference(attacked: FakeRun) -> None:
    lines = attacked.journal(2, 0).read_text().splitlines(keepends=True)
    attacked.journal(2, 0).write_text("".join(lines[1:]))
    verdicts = verdicts_of(attacked, None)
    assert failed(verdicts) == {sameness.EACH_SAMPLE_ONCE.name}
    assert "samples/g0002-rank-00000.jsonl" in verdicts[sameness.EACH_SAMPLE_ONCE.name].detail


def test_restore_of_a_save_that_was_never_committed_is_seen(attacked: FakeRun, reference: FakeRun) -> None:
    def uncommitted(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "restored" and entry["generation"] == 2 and entry["rank"] == 1:
            entry["checkpoint"] = checkpoint_name(7, 1, 1)
        return True

    edit_ledger(attacked, uncommitted)
    assert_fails_only(restores.NOTHING_UNVERIFIED, attacked, reference, checkpoint_name(7, 1, 1))


def test_deletion_below_the_floor_is_seen(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(8, 2, 1)
    attacked.record("deleted", checkpoint=name, reason="older than the newest 2")
    shutil.rmtree(attacked.directory / checkpoint_dir(name))
    assert_fails_only(keeping.RETENTION_FLOOR, attacked, reference, name, keep_last=2)
    assert not failed(verdicts_of(attacked, reference, keep_last=1))


def test_full_disk_lowers_the_floor(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(8, 2, 1)
    attacked.record("deleted", checkpoint=name, reason="older than the newest 1, and the disk is full")
    shutil.rmtree(attacked.directory / checkpoint_dir(name))
    assert not failed(verdicts_of(attacked, reference, keep_last=2, keep_last_min=1))


def test_restart_that_took_too_long_is_seen(attacked: FakeRun, reference: FakeRun) -> None:
    def slow(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "first_step" and entry["generation"] == 2:
            entry["at_step"] += 30
        return True

    edit_ledger(attacked, slow)
    assert_fails_only(conduct.RECOVERY_IN_TIME, attacked, reference, "generation 2 trained", recovery_seconds_max=20)


def test_recovery_counts_from_the_last_fault_in_it(attacked: FakeRun, reference: FakeRun) -> None:
    def slow(entry: dict[str, Any]) -> bool:
        if entry["kind"] == "first_step" and entry["generation"] == 2:
            entry["at_step"] += 30
        return True

    edit_ledger(attacked, slow)
    (failure,) = [
        entry for entry in map(json.loads, ledger_lines(attacked)) if entry.get("rank") == 1 and "echoes" in entry
    ]
    attacked.now = failure["failed_at"] + 25
    attacked.mark("late", "kill_agent", "recovery", rank=0)
    assert not failed(verdicts_of(attacked, reference, recovery_seconds_max=20))


def ledger_lines(run: FakeRun) -> list[str]:
    return (run.directory / "ledger.jsonl").read_text().splitlines()


def test_generation_that_was_ended_for_nothing_is_a_false_alarm(attacked: FakeRun, reference: FakeRun) -> None:
    (attacked.directory / "faults/kill-2.json").unlink()
    assert_fails_only(conduct.NO_FALSE_ALARMS, attacked, reference, "generation 2 was ended (signal)")


@pytest.mark.parametrize("cause", ["signal", "agent_lost"])
def test_lost_worker_whose_place_was_filled_late_is_explained_by_a_fault_since_its_generation_began(
    attacked: FakeRun, reference: FakeRun, cause: str
) -> None:
    path = attacked.directory / "faults/kill-2.json"
    fault = json.loads(path.read_text())
    path.write_text(json.dumps(fault | {"at": fault["at"] - 45}))
    ledger = attacked.directory / "ledger.jsonl"
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    for entry in entries:
        if entry["kind"] == "failure" and entry["generation"] == 2:
            entry["cause"] = cause
    ledger.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    held = not failed(verdicts_of(attacked, reference))
    assert held == (cause == "agent_lost")


def test_checkpoint_that_was_set_aside_for_nothing_is_a_false_alarm(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(4, 1, 1)
    attacked.record("quarantine", checkpoint=name, reason="it looked odd")
    assert_fails_only(conduct.NO_FALSE_ALARMS, attacked, reference, name)


def test_run_that_never_ended_is_not_alive(attacked: FakeRun, reference: FakeRun) -> None:
    edit_ledger(attacked, lambda entry: entry["kind"] != "finished")
    assert_fails_only(conduct.LIVENESS, attacked, reference, "the ledger stops at")


def test_run_that_was_stopped_quotes_why(attacked: FakeRun, reference: FakeRun) -> None:
    edit_ledger(attacked, lambda entry: entry["kind"] != "finished")
    attacked.record("stopped", driver="test", reason="long report\nit failed 10 times", error_type="X", report=None)
    assert_fails_only(conduct.LIVENESS, attacked, reference, "it failed 10 times")


def test_run_that_ended_early_is_not_alive(attacked: FakeRun, reference: FakeRun) -> None:
    assert_fails_only(conduct.LIVENESS, attacked, reference, "after step 12 of 20", steps=20)


def test_process_that_grows_leaks(attacked: FakeRun, reference: FakeRun) -> None:
    write_observations(attacked, rss_bytes=lambda look: (80 + 20 * look) << 20)
    assert_fails_only(leaks.NO_LEAKS, attacked, reference, "keeper (pid 7)")


def test_process_that_has_only_just_been_handed_its_memory_does_not_leak(attacked: FakeRun, reference: FakeRun) -> None:
    write_observations(attacked, rss_bytes=lambda look: (80 if look < 2 else 300) << 20)
    assert not failed(verdicts_of(attacked, reference))


def test_keeper_that_waits_long_for_its_ranks_memory_does_not_leak(attacked: FakeRun, reference: FakeRun) -> None:
    write_observations(attacked, memfds=lambda look: 0 if look < 6 else 12)
    assert not failed(verdicts_of(attacked, reference))


def test_keeper_that_gathers_memory_files_leaks(attacked: FakeRun, reference: FakeRun) -> None:
    write_observations(attacked, memfds=lambda look: 2 * look)
    assert_fails_only(leaks.NO_LEAKS, attacked, reference, "memory files")


@pytest.mark.parametrize("end", [{"left": [4711]}, {"shm_left_bytes": 5 << 20}, {"files_left": ["/tmp/1.tmp"]}])
def test_what_is_left_after_the_end_leaks(attacked: FakeRun, reference: FakeRun, end: dict[str, Any]) -> None:
    write_observations(attacked, **end)
    assert_fails_only(leaks.NO_LEAKS, attacked, reference, "last line")


# What faults explain is no violation.


def test_damage_by_a_fault_is_not_lastgood_s(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(8, 2, 1)
    attacked.mark("flip", "flip_shard", "any moment", checkpoint=name, path="x", damage=True)
    flip_last_bit(attacked, name)
    assert not failed(verdicts_of(attacked, reference))


def test_training_from_bytes_that_a_fault_had_damaged_before_is_torn(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "blind")
    name = checkpoint_name(4, 1, 1)
    run.generation(1, 0, None)
    run.train(1, 1, 4)
    run.commit(1, 4)
    run.mark("flip", "flip_shard", "any moment", checkpoint=name, path="x", damage=True)
    run.kill(1, "random moment", rank=0, generation=1, step=4)
    run.generation(2, 4, 1)
    run.train(2, 5, 12)
    run.commit(2, 12)
    run.finish(2)
    flip_last_bit(run, name)
    verdicts = verdicts_of(run, None)
    assert failed(verdicts) == {restores.NEVER_TORN.name}
    assert "was restored and is damaged" in verdicts[restores.NEVER_TORN.name].detail


def test_older_step_is_right_when_the_newest_was_damaged_before(tmp_path: Path, reference: FakeRun) -> None:
    run = FakeRun(tmp_path / "damaged")
    name = checkpoint_name(8, 1, 1)
    run.generation(1, 0, None)
    run.train(1, 1, 8)
    run.commit(1, 4)
    run.commit(1, 8)
    run.mark("cut", "truncate_shard", "any moment", checkpoint=name, path="x", damage=True)
    (run.directory / checkpoint_dir(name) / "rank-00000-of-00002.safetensors").write_bytes(b"")
    run.kill(1, "random moment", rank=0, generation=1, step=8)
    run.archive.quarantine(name, "it has 0 bytes")
    run.record("quarantine", checkpoint=name, reason="it has 0 bytes")
    run.generation(2, 4, 1)
    run.train(2, 5, 12)
    run.commit(2, 12)
    run.finish(2)
    assert not failed(verdicts_of(run, reference))


def test_commit_that_a_killed_coordinator_did_not_record_counts(attacked: FakeRun, reference: FakeRun) -> None:
    name = checkpoint_name(4, 1, 1)
    edit_ledger(attacked, lambda entry: entry["kind"] != "commit" or entry["checkpoint"] != name)
    assert not failed(verdicts_of(attacked, reference))


def test_batches_that_were_passed_over_end_the_promise_of_equal_bits(attacked: FakeRun, reference: FakeRun) -> None:
    attacked.record("skip", generation=3, rank=0, bad_step=9, batches=[[0, 9]])
    assert verdicts_of(attacked, reference)["exact"].outcome is Outcome.SKIPPED


# The command.


def run_command(*arguments: str) -> Any:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["chaos", "judge", *arguments])


def test_command_prints_verdicts_and_exits_with_what_they_come_to(attacked: FakeRun, reference: FakeRun) -> None:
    write_terms(attacked.directory, Terms(reference=str(reference.directory), steps=12))
    done = run_command(str(attacked.directory), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["counts"]["held"] == len(CHECKS)
    assert run_command(str(attacked.directory), "--steps", "20").exit_code == 4
    flip_last_bit(attacked, checkpoint_name(4, 1, 1))
    done = run_command(str(attacked.directory))
    assert done.exit_code == 3
    assert "never torn" in done.stdout


def test_command_refuses_a_directory_without_a_ledger(tmp_path: Path) -> None:
    done = run_command(str(tmp_path))
    assert isinstance(done.exception, CallerError)
    assert "ledger.jsonl" in str(done.exception)


def test_terms_survive_their_file(tmp_path: Path) -> None:
    terms = Terms(reference="/r", steps=3, recovery_seconds_max=5.0, keep_last=2, exact=False)
    write_terms(tmp_path, terms)
    assert asdict(read_terms(tmp_path)) == asdict(terms)
    (tmp_path / "terms.json").write_text('{"speed": 3}')
    with pytest.raises(CallerError, match="terms"):
        read_terms(tmp_path)


def test_faults_that_struck_inside_a_save_are_told_from_others(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "saving")
    run.generation(1, 0, None)
    run.mark("before", "kill_keeper", "random moment")
    run.record("snapshot", generation=1, step=4, attempt=1)
    run.mark("inside", "kill_keeper", "random moment")
    run.commit(1, 4)
    run.mark("after", "kill_keeper", "random moment")
    run.mark("armed", "kill_self", "persist.fsync")
    assert [fault["id"] for fault in History(run.directory).faults_in_saves()] == ["inside", "armed"]


def test_commit_that_was_not_recorded_counts_for_the_floor(attacked: FakeRun, reference: FakeRun) -> None:
    old, unrecorded = checkpoint_name(4, 1, 1), checkpoint_name(8, 2, 1)
    edit_ledger(attacked, lambda entry: entry["kind"] != "commit" or entry["checkpoint"] != unrecorded)
    attacked.record("deleted", checkpoint=old, reason="older than the newest 2")
    shutil.rmtree(attacked.directory / checkpoint_dir(old))
    assert not failed(verdicts_of(attacked, reference, keep_last=2))


@pytest.mark.parametrize("kept_bytes", [10, -1])
def test_final_shard_that_cannot_even_be_opened_breaks_exactness_by_name(
    attacked: FakeRun, reference: FakeRun, kept_bytes: int
) -> None:
    shard = attacked.directory / checkpoint_dir(checkpoint_name(12, 3, 1)) / "rank-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    verdicts = verdicts_of(attacked, reference, steps=12, keep_last=3)
    for name in ("exact", "never torn"):
        assert verdicts[name].outcome is Outcome.BROKEN
        assert shard.name in verdicts[name].detail


def test_records_that_cannot_be_read_are_told(attacked: FakeRun) -> None:
    ledger, fault = attacked.directory / "ledger.jsonl", attacked.directory / "faults" / "broken.json"
    assert unreadable(attacked.directory) == []
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join([*lines, b'{"v": 1, "se']))
    assert unreadable(attacked.directory) == [], "whoever wrote the last line was killed"
    ledger.write_bytes(b"".join([*lines[:3], b'{"broken": tru\n', b"\xff\n", *lines[3:]]))
    fault.write_text("{")
    assert unreadable(attacked.directory) == [f"2 of {len(lines) + 2} lines of ledger.jsonl", "faults/broken.json"]
    app = typer.Typer()
    register(app)
    told = CliRunner().invoke(app, ["chaos", "judge", str(attacked.directory), "--json"])
    assert json.loads(told.stdout)["unreadable"] == unreadable(attacked.directory)
    assert "2 of" in told.stderr
