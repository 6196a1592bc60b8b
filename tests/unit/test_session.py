"""What the loop sees: when its saves are taken, how a restored one goes on, and what is told of it."""

import errno
import logging
import os
import random
from typing import Any

import pytest
import torch
from fakes import Loop, Rig
from torch import nn

from workers import failpoint
from workers.checkpoint.header import parse_header
from workers.data.journal import read_journal
from workers.errors import CallerError, CheckpointDamaged, ResumeMismatch, StateNotStorable
from workers.messages import RestoreOrder


def saved_checkpoint(rig: Rig, *, steps: int, config: Any = None) -> tuple[RestoreOrder, Loop]:
    """A checkpoint of a step that was not the run's last, and the loop that goes on after it."""
    loop = Loop(rig.session(config, save_every_steps=steps)).track().restore()
    loop.train(steps)
    batch = loop.next_batch()
    assert rig.keeper.snapshot_steps() == [steps]
    order = rig.keeper.commit(rig.run_dir, steps)
    loop.step(batch)
    return order, loop


def finished_checkpoint(rig: Rig, *, steps: int, config: Any) -> RestoreOrder:
    """What a run of that many steps leaves when its loop has returned."""
    loop = Loop(rig.session(config)).track().restore()
    loop.train(steps)
    with rig.answering([True], commit=True) as committed:
        loop.session.finish()
    return committed[0]


# ---------------------------------------------------------------- when saves are taken


def test_a_save_that_is_due_is_taken_when_the_loop_asks_for_its_next_batch(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    loop.train(2)
    assert rig.keeper.snapshot_steps() == []
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    assert rig.keeper.slot_of(2).generation == 1


@pytest.mark.parametrize("checked", [True, False])
def test_a_save_says_what_other_ranks_hold_alike_unless_that_is_not_to_be_checked(rig: Rig, checked: bool) -> None:
    loop = Loop(rig.session(save_every_steps=2, check_replicas=checked)).track().restore()
    loop.train(2)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    document = parse_header(rig.keeper.slot_of(2).image).document
    assert document.get("replicas") == ({"sets": []} if checked else None)


def test_a_save_that_is_due_at_the_last_step_is_taken_once_when_the_loop_returns(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    loop.train(2)
    with rig.answering([True]):
        loop.session.finish()
    assert rig.keeper.snapshot_steps() == []


def test_without_a_loader_of_ours_a_save_is_taken_at_the_boundary(rig: Rig) -> None:
    session = rig.session(save_every_steps=2)
    model = nn.Linear(1, 1)
    session.track(model=model, optimizer=torch.optim.SGD(model.parameters()), scheduler=None, data=None)
    session.restore()
    session.end_step()
    assert rig.keeper.snapshot_steps() == []
    session.end_step()
    assert rig.keeper.snapshot_steps() == [2]


def test_a_save_waits_for_the_end_of_the_accumulation_window(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    first = loop.next_batch()
    loop.step(first[:2])
    loop.backward(first[2:])
    loop.session.end_micro_step()
    second = loop.next_batch()
    assert rig.keeper.snapshot_steps() == []  # the gradients of the last micro step would be lost
    loop.step(second)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]


def test_a_save_that_fell_due_is_not_lost_when_a_batch_serves_several_steps(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=3)).track().restore()
    for _ in range(2):
        batch = loop.next_batch()
        loop.step(batch)
        loop.step(batch)
    assert rig.keeper.snapshot_steps() == []
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [4]


def test_nothing_is_saved_at_the_end_of_a_loop_that_stopped_between_micro_steps(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    loop.backward(loop.next_batch())
    loop.session.end_micro_step()
    loop.session.finish()
    assert rig.keeper.snapshot_steps() == []


def test_with_save_at_end_off_the_last_step_is_not_saved(rig: Rig) -> None:
    loop = Loop(rig.session(save_at_end=False)).track().restore()
    loop.train(1)
    loop.session.finish()
    assert rig.keeper.snapshot_steps() == []
    assert rig.agent.messages("finished")[0]["step"] == 1


def test_a_save_that_is_due_when_the_loop_returns_is_taken_even_with_save_at_end_off(rig: Rig) -> None:
    loop = Loop(rig.session(save_at_end=False, save_every_steps=2)).track().restore()
    loop.train(2)
    with rig.answering([True], commit=True) as committed:
        loop.session.finish()
    assert [order.step for order in committed] == [2]


def test_save_now_between_micro_steps_is_refused(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.backward(loop.next_batch())
    loop.session.end_micro_step()
    with pytest.raises(CallerError, match=r"between micro steps; call it right after session\.end_step\(\)"):
        loop.session.save_now()


def test_save_now_without_waiting_saves_at_the_next_batch(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    assert loop.session.save_now()
    assert rig.keeper.snapshot_steps() == []
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [1]


# ---------------------------------------------------------------- restoring


def test_a_restored_session_continues_as_if_nothing_had_happened(rig: Rig) -> None:
    order, uninterrupted = saved_checkpoint(rig, steps=3)
    uninterrupted.train(2)
    again = Loop(rig.session(restore=order)).track()
    assert again.session.restore()
    assert again.session.step == 3
    told = rig.agent.messages("restored")[0]
    assert (told["checkpoint"], told["step"]) == (order.checkpoint, 3)
    again.train(3)
    for mine, theirs in zip(again.weights(), uninterrupted.weights(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_fresh_start_says_so(rig: Rig) -> None:
    loop = Loop(rig.session()).track()
    assert not loop.session.restore()
    assert rig.agent.messages("restored")[0]["checkpoint"] is None


def test_the_certificate_is_checked_before_the_first_batch_after_a_restore(rig: Rig) -> None:
    order, _ = saved_checkpoint(rig, steps=1)
    loop = Loop(rig.session(restore=order)).track().restore()
    random.seed(1)
    with pytest.raises(ResumeMismatch, match=r"rng\.python was"):
        loop.next_batch()
    assert loop.data.samples_consumed == 4  # no batch was handed over


def test_without_a_loader_of_ours_the_certificate_is_checked_by_restore(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**orders: Any) -> None:
        session = rig.session(save_every_steps=1, **orders)
        model = nn.Linear(1, 1)
        session.track(model=model, optimizer=torch.optim.SGD(model.parameters()), scheduler=None, data=None)
        session.restore()
        session.end_step()

    start()
    assert rig.keeper.snapshot_steps() == [1]
    order = rig.keeper.commit(rig.run_dir, 1)
    start(restore=order)
    monkeypatch.setattr("workers.state.rng.random.setstate", lambda state: None)
    random.seed(5)
    with pytest.raises(ResumeMismatch, match=r"rng\.python was"):
        start(restore=order)


def test_a_finished_run_with_the_same_configuration_hands_out_no_batch(rig: Rig) -> None:
    order = finished_checkpoint(rig, steps=3, config={"steps": 3})
    loop = Loop(rig.session({"steps": 3}, restore=order)).track().restore()
    assert list(loop.data) == []
    loop.session.finish()
    assert rig.keeper.snapshot_steps() == []  # there is nothing new to save
    assert rig.agent.messages("finished")[0]["step"] == 3


def test_a_finished_run_with_another_configuration_continues(rig: Rig) -> None:
    order = finished_checkpoint(rig, steps=3, config={"steps": 3})
    uninterrupted = Loop(rig.session({"steps": 5})).track().restore()
    uninterrupted.train(5)
    loop = Loop(rig.session({"steps": 5}, restore=order)).track().restore(allow=["config.steps"])
    loop.train(2)
    for mine, theirs in zip(loop.weights(), uninterrupted.weights(), strict=True):
        assert torch.equal(mine, theirs)


def test_another_configuration_is_refused_unless_it_is_allowed_or_volatile(rig: Rig) -> None:
    order, _ = saved_checkpoint(rig, steps=1, config={"lr": 1, "steps": 3})
    changed = {"lr": 2, "steps": 3}
    with pytest.raises(CallerError, match=r'config\.lr .*allow it: session\.restore\(allow=\["config\.lr"\]\)'):
        Loop(rig.session(changed, restore=order)).track().restore()
    Loop(rig.session(changed, restore=order)).track().restore(allow=["config.lr"])
    Loop(rig.session(changed, restore=order, volatile=("config.lr",))).track().restore()


def test_a_checkpoint_that_lost_a_shard_is_damaged_and_names_it(rig: Rig) -> None:
    order, _ = saved_checkpoint(rig, steps=1)
    for shard in (rig.run_dir / "checkpoints" / order.checkpoint).glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointDamaged, match=order.checkpoint):
        Loop(rig.session(restore=order)).track().restore()


@pytest.mark.parametrize(("action", "raised"), [("eio", CheckpointDamaged), ("enospc", OSError)])
def test_an_unreadable_sector_speaks_of_the_checkpoint_and_other_errors_of_the_storage(
    action: Any, raised: type[Exception], rig: Rig
) -> None:
    order, _ = saved_checkpoint(rig, steps=1)
    loop = Loop(rig.session(restore=order)).track()
    failpoint.arm((failpoint.Arm(id="bad", point="restore.read", action=action),), rig.run_dir / "faults")
    try:
        with pytest.raises(raised) as caught:
            loop.restore()
    finally:
        failpoint.arm((), rig.run_dir)
    assert type(caught.value) is raised
    loop.restore()


# ---------------------------------------------------------------- what else the loop sees


def test_progress_counts_steps_samples_tokens_and_epochs_over_restores(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=3), samples=8).track().restore()
    for _ in range(3):
        loop.step(loop.next_batch(), tokens=10)
    progress = loop.session.progress
    assert (progress.step, progress.samples, progress.tokens, progress.epoch) == (3, 12, 30, 1)
    assert progress.training_seconds > 0
    loop.next_batch()
    rig.keeper.messages("snapshot")
    order = rig.keeper.commit(rig.run_dir, 3)
    loop = Loop(rig.session(restore=order), samples=8).track().restore()
    assert loop.session.progress == progress
    loop.step(loop.next_batch(), tokens=1)
    assert (loop.session.step, loop.session.progress.samples, loop.session.progress.tokens) == (4, 16, 31)


def test_the_agent_is_told_of_the_first_step_alone_and_reads_the_others_from_the_page(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(3)
    assert [message["step"] for message in rig.agent.messages("first_step")] == [1]
    heartbeat = loop.session._page.read()
    assert (heartbeat.step, heartbeat.phase) == (3, "training")


def test_reported_metrics_reach_the_agent_and_are_told_again_at_the_end(rig: Rig) -> None:
    session = rig.session()
    session.report({"accuracy": 0.5})
    session.report({"accuracy": 0.75})
    assert [message["metrics"] for message in rig.agent.messages("report")] == [{"accuracy": 0.5}, {"accuracy": 0.75}]
    session.finish()
    assert rig.agent.messages("finished")[0]["metrics"] == {"accuracy": 0.75}


@pytest.mark.parametrize("missing", ["track", "restore", "end_step"])
def test_a_loop_without_protection_finishes_with_a_warning_that_says_so(
    missing: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(rig.session())
    if missing != "track":
        loop.track()
    if missing == "end_step":
        loop.restore()
    loop.next_batch()
    loop.session.finish()
    assert f"never called session.{missing}(): it ran unprotected" in caplog.text
    assert rig.agent.messages("finished")[0]["protected"] is False


def test_a_loop_with_protection_finishes_without_a_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([True]):
        loop.session.finish()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert rig.agent.messages("finished")[0]["protected"] is True


def test_consumed_and_dropped_samples_are_recorded(rig: Rig) -> None:
    loop = Loop(rig.session(), samples=9).track().restore()
    loop.train(3)
    content = read_journal(rig.run_dir / "samples/g0001-rank-00000.jsonl")
    assert sorted(content.steps) == [1, 2, 3]
    first_epoch = {sample for step in (1, 2) for _, sample in content.steps[step]}
    assert first_epoch | set(content.dropped[0]) == set(range(9))


def test_a_full_disk_in_the_sample_journal_neither_ends_training_nor_loses_records(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(rig.session()).track().restore()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        loop.train(2)
    assert "the sample journal cannot be written" in caplog.text
    loop.train(1)
    assert sorted(read_journal(rig.run_dir / "samples/g0001-rank-00000.jsonl").steps) == [1, 2, 3]


def test_a_sample_journal_that_cannot_be_opened_does_not_end_training(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    (rig.run_dir / "samples").write_text("in the way")
    loop = Loop(rig.session()).track().restore()
    loop.train(2)
    assert "the sample journal cannot be written" in caplog.text


def test_state_that_cannot_be_stored_is_named_when_it_appears_during_training(rig: Rig) -> None:
    class Growing:
        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.values

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state

    session, growing = rig.session(save_every_steps=1), Growing()
    session.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, data=None, extra=growing)
    session.restore()
    session.end_step()
    growing.values["callback"] = print
    with pytest.raises(StateNotStorable, match=r"^extra\.callback: "):
        session.end_step()


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 10**400, "60", None, True])
def test_a_phase_needs_a_timeout_in_seconds(rig: Rig, timeout: Any) -> None:
    session = rig.session()
    with pytest.raises(CallerError, match="timeout has to be a number of seconds"), session.phase("x", timeout=timeout):
        pass


def test_a_declared_phase_shows_on_the_page_and_counts_as_no_part_of_the_step(rig: Rig) -> None:
    session = rig.session()
    before = session._page.read()
    started = session._step_started
    with session.phase("validation", timeout=30):
        within = session._page.read()
        assert (within.phase, within.label, within.allowance_seconds) == ("declared", "validation", 30)
        with session.phase("figures", timeout=5):
            assert session._page.read().label == "figures"
        assert session._page.read().label == "validation"
    after = session._page.read()
    assert (after.phase, after.label, after.allowance_seconds) == (before.phase, "", 0)
    assert after.moves > within.moves > before.moves
    assert session._step_started > started
