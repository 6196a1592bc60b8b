"""A save on its way: what a waiting loop is told, and what happens without a free slot or a keeper."""

from typing import Any

import pytest
from fakes import Loop, Rig

from workers.checkpoint.slots import SlotState
from workers.snapshots import SnapshotWriter

# ---------------------------------------------------------------- waiting for a save


def test_save_now_that_waits_returns_when_its_step_is_committed(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([True], commit=True) as committed:
        assert loop.session.save_now(wait=True)
    assert [order.step for order in committed] == [1]
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == []  # it is not due a second time


def test_a_step_that_is_committed_is_not_waited_for_again(rig: Rig) -> None:
    loop = Loop(rig.session(save_timeout_seconds=60.0)).track().restore()
    loop.train(1)
    with rig.answering([True]):
        assert loop.session.save_now(wait=True)
    assert loop.session.save_now(wait=True)
    assert rig.keeper.snapshot_steps() == []


def test_a_step_that_turns_out_to_be_the_last_is_saved_once_more_and_says_so(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([True, True]):  # ends only when two snapshots were taken
        assert loop.session.save_now(wait=True)
        loop.session.finish()
    assert loop.session.progress.finished


def test_a_save_that_was_given_up_is_taken_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([False, True]):
        assert loop.session.save_now(wait=True)
    assert "the save of step 1 was given up: the disk is full" in caplog.text


def test_a_save_that_is_given_up_each_time_is_false_and_training_goes_on(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([False] * 4):
        assert not loop.session.save_now(wait=True)
    loop.train(1)
    with rig.answering([True]):
        assert loop.session.save_now(wait=True)


def test_a_step_that_was_given_up_for_good_is_tried_afresh_when_the_loop_returns(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    with rig.answering([False, False, False, False, True], commit=True) as committed:
        assert not loop.session.save_now(wait=True)
        loop.session.finish()
    assert [order.step for order in committed] == [1]


def test_without_word_on_a_save_the_loop_goes_on_after_the_timeout(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(rig.session(save_timeout_seconds=0.2)).track().restore()
    loop.train(1)
    assert not loop.session.save_now(wait=True)
    assert "no word on the save of step 1 in time" in caplog.text
    loop.train(1)


def test_word_on_an_older_step_is_not_taken_for_that_of_this_one(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1, save_timeout_seconds=0.2)).track().restore()
    loop.train(2)
    rig.agent.tell_outcome(1, committed=True)
    assert not loop.session.save_now(wait=True)


# ---------------------------------------------------------------- slots and keepers


def test_a_save_is_skipped_and_told_when_no_slot_is_free(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(4)
    taken, skipped = [], []
    while (message := rig.keeper.next_message()) is not None:
        if message["kind"] == "snapshot":
            taken.append(message["step"])
        elif message["kind"] == "skipped":
            skipped.append((message["step"], message["reason"]))
    assert taken == [1, 2]
    assert skipped == [(3, "no snapshot slot was free")]
    rig.keeper.slot_of(1).release()
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [4]


def test_a_loop_that_waits_for_its_save_waits_for_a_slot_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(3)
    assert rig.keeper.snapshot_steps() == [1, 2]
    monkeypatch.setattr("workers.snapshots.time.sleep", lambda _: rig.keeper.slots[0].release())
    with rig.answering([True]):
        assert loop.session.save_now(wait=True)
    assert "skipped" not in rig.keeper.seen


def test_a_keeper_that_comes_back_is_given_the_slots_with_what_is_in_them(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    loop.train(2)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    rig.keeper.die()
    loop.train(1)
    loop.next_batch()  # nobody to save for: training goes on
    rig.revive_keeper()
    loop.train(1)
    assert [hello["generation"] for hello in rig.keeper.hellos] == [1]
    assert len(rig.keeper.messages("slots")) == 1
    assert rig.keeper.slot_of(2).image_bytes > 0
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [4]


def test_a_save_that_is_due_while_the_keeper_is_gone_is_taken_for_its_successor(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    loop.train(2)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    rig.keeper.die()
    loop.train(4)  # that of step 4 takes the last free slot, and that of step 6 finds none
    rig.revive_keeper()
    loop.train(1)
    assert len(rig.keeper.messages("slots")) == 1
    assert [rig.keeper.slot_of(step).step for step in (2, 4)] == [2, 4]
    assert {slot.state for slot in rig.keeper.slots} == {SlotState.COMPLETE}


def test_a_waiting_save_outlives_its_keeper(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [1]
    rig.keeper.die()
    loop.session.end_step()
    take = SnapshotWriter.take

    def take_and_revive(*arguments: Any, **keywords: Any) -> bool:
        taken = take(*arguments, **keywords)
        rig.revive_keeper()
        return taken

    monkeypatch.setattr(SnapshotWriter, "take", take_and_revive)
    with rig.answering([True]):
        assert loop.session.save_now(wait=True)
    assert rig.keeper.seen == ["slots"]


def test_the_next_generation_gets_the_slots_back_with_what_is_in_them(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [1]
    loop = Loop(rig.session(save_every_steps=1)).track().restore()
    loop.train(1)
    loop.next_batch()
    assert rig.keeper.messages("slots") == []
    assert {slot.state for slot in rig.keeper.slots} == {SlotState.COMPLETE}


# ---------------------------------------------------------------- a step that the coordinator chose


def test_a_step_that_is_ordered_ahead_is_saved_when_it_ends(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None)).track().restore()
    rig.agent.channel.send("save_at", step=3)
    loop.train(5)
    assert rig.keeper.snapshot_steps() == [3]
    assert rig.agent.messages("save_refused") == []


def test_the_step_that_just_ended_can_still_be_ordered(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None)).track().restore()
    loop.train(1)
    rig.agent.channel.send("save_at", step=2)
    loop.train(1)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]


def test_an_order_that_comes_too_late_is_refused(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=None)).track().restore()
    loop.train(2)
    rig.agent.channel.send("save_at", step=2)
    loop.train(2)
    assert rig.keeper.snapshot_steps() == []
    (refused,) = rig.agent.messages("save_refused")
    assert (refused["step"], refused["newest_step"]) == (2, 3)


def test_an_ordered_step_that_is_due_anyway_is_saved_once(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    rig.agent.channel.send("save_at", step=2)
    loop.train(3)
    assert rig.keeper.snapshot_steps() == [2]
