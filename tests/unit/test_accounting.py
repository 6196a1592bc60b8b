"""Where a run's time went, from ledgers of made-up runs: single stories with known numbers, and random ones."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_run import Entries, MadeUpRun

from orchestrator.observe.accounting import DRIVER, GOOGLE_NAMES, KINDS, Account, Accounting


def spent(account: Account) -> dict[str, float]:
    """The kinds that took any time, to the millisecond."""
    return {kind: round(seconds, 3) for kind, seconds in account.seconds.items() if seconds > 5e-4}


def account_of(run: MadeUpRun) -> Account:
    return Accounting().add_all(run.entries).at()


def training_run() -> MadeUpRun:
    """Has started within 10 s, and done its first step."""
    run = MadeUpRun()
    run.drive()
    run.now += 4
    run.begin()
    run.now += 6
    run.first_step()
    return run


def test_an_undisturbed_run_starts_and_is_productive() -> None:
    run = training_run()
    run.train(30)
    run.finish()
    account = account_of(run)
    assert spent(account) == {"startup": 10, "productive": 30}
    assert account.state == "finished"
    assert account.goodput_ratio == pytest.approx(0.75)
    assert account.save_overhead_ratio == 0.0


def test_steps_that_are_done_again_are_repeated_until_the_lost_one_is_regained() -> None:
    run = training_run()
    run.train(20)
    run.commit()
    run.train(10)  # up to step 31
    run.fail(noticed_after=2)
    run.now += 3
    run.begin(21, "memory")
    run.now += 1
    run.restore(1.5)
    run.now += 0.5
    run.first_step()  # step 22
    run.train(29)
    run.progress()  # step 51
    accounting = Accounting().add_all(run.entries)
    times = {"detection": 2, "recovery": 4.5, "restore": 1.5, "repeated": 9}
    assert spent(accounting.at()) == {"startup": 10, "productive": 30 + 20} | times
    [cost] = accounting.costs
    assert (cost.cause, cost.lost_steps, cost.source) == ("signal", 10, "memory")
    assert {kind: round(seconds, 3) for kind, seconds in cost.seconds.items()} == times
    assert cost.stepped_at == pytest.approx(cost.failed_at + 8)
    assert cost.regained_at == pytest.approx(cost.failed_at + 17)
    assert accounting.regaining is None


def test_a_second_failure_while_steps_are_done_again_pays_for_what_it_took_back() -> None:
    run = training_run()
    run.train(30)
    run.fail("signal")  # at step 31
    run.begin(21, "memory")
    run.first_step()
    run.train(4)
    run.fail("oom")  # at step 26, which the run had been beyond
    run.begin(21, "memory")
    run.first_step()
    run.train(19)
    run.progress()  # step 41
    accounting = Accounting().add_all(run.entries)
    first, second = accounting.costs
    assert second.seconds["repeated"] == pytest.approx(4)
    assert first.seconds["repeated"] == pytest.approx(4 + 5)
    assert second.regained_at is not None and first.regained_at is not None
    assert first.regained_at - second.regained_at == pytest.approx(5)
    assert accounting.at().seconds["productive"] == pytest.approx(30 + 10)


def test_a_failure_during_recovery_adds_to_the_recovery() -> None:
    run = training_run()
    run.train(5)
    run.fail("signal")
    run.now += 2
    run.begin(6, "memory")
    run.now += 3
    run.fail("exit", noticed_after=1)
    run.now += 2
    run.begin(6, "checkpoint")
    run.now += 1
    run.first_step()
    accounting = Accounting().add_all(run.entries)
    assert spent(accounting.at()) == {"startup": 10, "productive": 5, "recovery": 8, "detection": 1}
    assert [(cost.cause, round(cost.lost_seconds, 3)) for cost in accounting.costs] == [("signal", 5.0), ("exit", 4.0)]
    assert all(cost.stepped_at == run.now for cost in accounting.costs)


def test_stall_and_interference_are_taken_out_of_the_training_that_follows() -> None:
    run = training_run()
    run.train(10)
    run.snapshot(stall=0.5)
    run.snapshot(stall=0.5, attempt=2)  # the same snapshot is written again: nobody stood still for that
    run.commit(interference=1.0)
    run.train(10)
    run.progress(stall_seconds=0.25)
    run.train(1)
    run.progress()
    account = account_of(run)
    assert spent(account) == {"startup": 10, "productive": 19.25, "save_stall": 0.75, "save_interference": 1.0}
    assert account.save_overhead_ratio == pytest.approx(1.75 / 21)


def test_between_drivers_the_run_is_down() -> None:
    run = training_run()
    run.train(10)
    run.progress()
    run.stop()
    run.now += 500
    run.drive()
    run.now += 7
    run.begin(5, "checkpoint")
    run.first_step()
    run.train(10)
    run.progress()
    accounting = Accounting().add_all(run.entries)
    assert spent(accounting.at()) == {"startup": 17, "down": 500, "productive": 10 + 5, "repeated": 5}
    [cost] = accounting.costs
    assert (cost.cause, cost.lost_steps) == (DRIVER, 0 + 11 - 5)
    assert accounting.at().ettr_ratio == pytest.approx(15 / 37)


def test_what_a_driver_that_died_silently_did_after_its_last_entry_is_down() -> None:
    run = training_run()
    run.train(10)
    run.progress()
    before = Accounting().add_all(run.entries).settled()
    run.now += 1000
    run.drive()
    accounting = Accounting().add_all(run.entries)
    assert spent(accounting.at()) == {"startup": 10, "productive": 10, "down": 1000}
    assert all(accounting.settled().seconds[kind] >= before.seconds[kind] for kind in KINDS)


def test_a_restarted_coordinator_changes_nothing() -> None:
    run = training_run()
    run.train(10)
    run.coordinator_again()
    run.train(10)
    run.commit()
    assert spent(account_of(run)) == {"startup": 10, "productive": 20}


def test_a_driver_that_is_refused_does_not_end_the_run_of_the_one_at_work() -> None:
    run = training_run()
    run.train(10)
    run.commit()
    run.drive()
    run.now += 30
    run.stop()
    run.driver = 1
    run.train(10)
    run.commit()
    account = account_of(run)
    assert account.state == "training"
    assert account.seconds["startup"] == pytest.approx(10 + 30)  # what the second one said of itself meanwhile
    run.finish()
    assert account_of(run).state == "finished"


def test_a_late_commit_of_a_failed_generation_is_no_training() -> None:
    run = training_run()
    run.train(10)
    run.snapshot()
    run.fail()
    run.now += 2
    run.commit()
    run.now += 1
    run.begin(11, "checkpoint")
    assert spent(account_of(run)) == {"startup": 10, "productive": 10, "recovery": 3}


def test_what_the_ledger_says_after_the_end_adds_no_time() -> None:
    run = training_run()
    run.train(10)
    run.finish()
    run.now += 50
    run.add("deleted", checkpoint="step-000000001-g0001-a01", reason="retention")
    run.commit()
    account = Accounting().add_all(run.entries).at(run.now + 1000)
    assert spent(account) == {"startup": 10, "productive": 10}


def test_lost_samples_follow_from_what_a_step_uses() -> None:
    run = training_run()
    run.train(19)
    run.commit(samples=640)
    run.train(5)
    run.fail()
    run.begin(20, "checkpoint")
    [cost] = Accounting().add_all(run.entries).costs
    assert cost.lost_samples == 5 * 32


def test_an_empty_ledger_has_no_account_and_one_without_its_beginning_one_from_there() -> None:
    empty = Accounting().at(5.0)
    assert (empty.state, empty.elapsed_seconds, empty.goodput_ratio, empty.ettr_ratio) == ("empty", 0.0, None, None)
    run = training_run()
    assert spent(Accounting().add_all(run.entries[1:]).at()) == {"startup": 6}


def test_all_kinds_have_a_name_of_googles() -> None:
    assert GOOGLE_NAMES.keys() == KINDS.keys()


# ---------------------------------------------------------------- random runs

seconds = st.floats(0, 100).map(lambda value: round(value, 3))


EVENTS = ("begin", "first", "train", "progress", "snapshot", "commit", "late", "restore", "fail")
EVENTS += ("again", "drive", "kill", "finish", "stop", "other", "skew")


@st.composite
def ledgers(draw: st.DrawFn) -> Entries:
    """What happens to a run, in any order that a ledger may have, with clocks that jitter."""
    run = MadeUpRun()
    run.drive()
    for _ in range(draw(st.integers(0, 30))):
        event = draw(st.sampled_from(EVENTS))
        run.now += draw(seconds) * (event != "train")
        match event:
            case "begin":
                run.begin(draw(st.integers(0, max(0, run.step))), draw(st.sampled_from(["memory", "checkpoint"])))
            case "first":
                run.first_step()
            case "train":
                run.train(draw(st.integers(0, 50)), draw(st.floats(0, 3)))
            case "progress":
                run.progress(draw(seconds))
            case "snapshot":
                run.snapshot(draw(seconds))
            case "commit":
                run.commit(interference=draw(st.floats(-5, 50)))
            case "late":
                run.commit(step=draw(st.integers(0, max(1, run.step))))
            case "restore":
                run.restore(draw(seconds))
            case "fail":
                run.fail(noticed_after=draw(seconds), rank=draw(st.integers(-1, 1)))
            case "again":
                run.coordinator_again()
            case "drive":
                run.drive()
            case "kill":
                run.now += draw(seconds) * 100
                run.drive()
            case "finish":
                run.finish()
            case "stop":
                run.stop(draw(st.sampled_from([None, 1])))
            case "other":
                run.add("deleted", checkpoint="x", reason="y", generation=run.generation)
            case "skew":
                run.add("keeper", node="n", pid=3, at=run.now - draw(seconds))
    return json.loads(json.dumps(run.entries))


@settings(max_examples=300)
@given(ledgers())
def test_of_any_ledger_the_parts_are_never_negative_only_grow_and_add_up_to_the_time_that_passed(
    entries: Entries,
) -> None:
    accounting = Accounting()
    before = accounting.settled().seconds
    last_at = entries[0]["at"]
    for entry in entries:
        accounting.add(entry)
        last_at = max(last_at, entry["at"])
        now = accounting.at()
        settled = accounting.settled().seconds
        assert all(settled[kind] >= before[kind] for kind in KINDS)
        assert all(now.seconds[kind] >= settled[kind] for kind in KINDS)
        before = settled
        if now.state in ("finished", "stopped"):
            assert now.elapsed_seconds <= last_at - entries[0]["at"] + 1e-6
        else:
            assert math.isclose(now.elapsed_seconds, last_at - entries[0]["at"], abs_tol=1e-6)
            later = accounting.at(last_at + 17.0)
            assert math.isclose(later.elapsed_seconds, last_at + 17.0 - entries[0]["at"], abs_tol=1e-6)
            assert all(later.seconds[kind] >= now.seconds[kind] for kind in KINDS)
        assert min(now.seconds.values()) >= 0


@settings(max_examples=200)
@given(ledgers())
def test_of_any_ledger_what_failures_are_charged_with_is_part_of_the_account(entries: Entries) -> None:
    accounting = Accounting().add_all(entries)
    for kind in ("detection", "recovery", "restore", "repeated"):
        charged = math.fsum(cost.seconds[kind] for cost in accounting.costs)
        assert charged <= accounting.settled().seconds[kind] + 1e-6
    for cost in accounting.costs:
        assert cost.lost_steps >= 0 and cost.lost_samples >= 0
        assert min(cost.seconds.values()) >= 0
        if cost.regained_at is not None:
            assert cost.stepped_at is not None and cost.regained_at >= cost.stepped_at
