"""Snapshots that are due for storage, and those between them that stay in memory."""

from typing import Any

import pytest
import torch
from fakes import Loop, Rig

from workers import failpoint
from workers.state.training import TrainingState


def taken(rig: Rig) -> list[tuple[int, bool]]:
    return [(message["step"], message["durable"]) for message in rig.keeper.messages("snapshot")]


def train(loop: Loop, rig: Rig, steps: int) -> list[tuple[int, bool]]:
    """What was taken while there was always a slot free."""
    found: list[tuple[int, bool]] = []
    for _ in range(steps):
        loop.train(1)
        found += taken(rig)
        rig.keeper.release_all()
    loop.next_batch()
    return found + taken(rig)


def test_between_saves_snapshots_are_taken_that_stay_in_memory(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=6, snapshot_every_steps=2)).track().restore()
    assert train(loop, rig, 12) == [(2, False), (4, False), (6, True), (8, False), (10, False), (12, True)]


def test_without_an_order_only_saves_are_snapshotted(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=3)).track().restore()
    assert train(loop, rig, 6) == [(3, True), (6, True)]


def test_how_often_is_changed_by_a_notice(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=100, snapshot_every_steps=2)).track().restore()
    before = train(loop, rig, 4)
    rig.agent.channel.send("save_every", tier="memory", steps=3)
    assert before == [(2, False), (4, False)]
    assert train(loop, rig, 6) == [(6, False), (9, False)]


def test_a_step_that_is_ordered_to_be_saved_is_durable_though_one_in_memory_is_due(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None, snapshot_every_steps=2)).track().restore()
    rig.agent.channel.send("save_at", step=2)
    assert train(loop, rig, 3) == [(2, True)]


def test_a_snapshot_in_memory_is_no_save_for_those_who_wait_for_one(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None, snapshot_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    with rig.answering([True, True]):  # ends only when two snapshots were taken
        assert loop.session.save_now(wait=True)


def test_a_snapshot_in_memory_for_which_only_the_slot_of_the_next_save_is_free_costs_no_look_at_the_state(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(rig.session(save_every_steps=None, snapshot_every_steps=1)).track().restore()
    loop.train(2)
    assert taken(rig) == [(1, False)]
    monkeypatch.setattr(TrainingState, "capture", None)
    loop.next_batch()
    (skipped,) = rig.keeper.messages("skipped")
    assert (skipped["step"], skipped["durable"], skipped["reason"]) == (2, False, "no snapshot slot was free")


def test_the_keeper_is_told_how_long_the_copy_took_and_how_long_the_loop_stood_still(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None, snapshot_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    (told,) = rig.keeper.messages("snapshot")
    assert told["copy_seconds"] > 0
    assert told["stall_seconds"] > 0


def test_time_that_the_loop_waits_for_a_copy_is_no_part_of_its_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    copier = loop.session._saver._snapshots._copier
    batch = loop.next_batch()
    copier._waited_seconds = 1000.0
    started = loop.session._step_started
    monkeypatch.setattr(loop.session, "_advance", lambda tokens: 0.0)
    loop.step(batch)
    assert loop.session._step_started >= started + 1000.0


@pytest.mark.parametrize("point", ["snapshot.begin", "snapshot.copy", "snapshot.complete"])
def test_the_fault_points_of_a_snapshot_are_passed_once_it_is_due(point: str, rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    when: dict[str, Any] = {"rank": 0, "step": 1, "generation": 1}
    fault = failpoint.Arm(id="seen", point=point, action="raise", when=when)
    failpoint.arm((fault,), rig.run_dir / "faults")
    with pytest.raises(failpoint.InjectedError):
        loop.next_batch()
        rig.settle()
    failpoint.arm((), rig.run_dir)


def test_the_copy_is_passed_in_its_middle_whatever_the_number_of_tensors(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track()
    loop.model.append(torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(3)]))
    loop.restore()
    loop.train(1)
    fault = failpoint.Arm(id="middle", point="snapshot.copy", action="raise", when={"index_fraction": 0.5})
    failpoint.arm((fault,), rig.run_dir / "faults")
    with pytest.raises(failpoint.InjectedError):
        loop.next_batch()
        rig.settle()
    failpoint.arm((), rig.run_dir)
    record = (rig.run_dir / "faults/middle.json").read_text()
    assert '"index": 0' not in record
