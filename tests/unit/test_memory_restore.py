"""A session that restores from its keeper's memory: session, slots and keeper as in a run, the coordinator aside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLink, Loop, Rig
from peer_samples import EXCHANGE

from workers import failpoint
from workers.checkpoint.manifest import CHECKPOINTS_DIR
from workers.checkpoint.persist import ReadBack
from workers.errors import CheckpointDamaged
from workers.keeper import Keeper, keeper_address
from workers.keeper_messages import SnapshotSkipped, Snapshotted
from workers.messages import RestoreOrder


@pytest.fixture
def keeper(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Keeper]:
    monkeypatch.setattr("workers.keeper.Link", FakeLink)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (rig.run_dir / CHECKPOINTS_DIR).mkdir(parents=True, exist_ok=True)
    run = rig.address[-12:]
    rig.keeper.die()
    rig.address = keeper_address(run, "d", "n1")
    keeper = Keeper(
        run=run,
        driver="d",
        node="n1",
        run_dir=str(rig.run_dir),
        coordinator="c",
        takeover_seconds=0.1,
        read_back=ReadBack(),
        exchange=EXCHANGE,
    )
    yield keeper
    keeper.close()
    rig.revive_keeper()


def link_of(keeper: Keeper) -> Any:
    return keeper._link


def trained(rig: Rig, keeper: Keeper, steps: int, **orders: Any) -> Loop:
    """A loop that has finished `steps` and asked for its next batch, with a snapshot of the last of them in memory."""
    loop = Loop(rig.session(snapshot_every_steps=steps, snapshot_slots=3, **orders)).track().restore()
    loop.train(steps)
    loop.next_batch()
    return loop


def from_memory(step: int) -> RestoreOrder:
    return RestoreOrder(source="memory", generation=1, step=step, checkpoint=None)


def test_a_session_goes_on_from_a_snapshot_that_was_only_in_memory(rig: Rig, keeper: Keeper) -> None:
    loop = trained(rig, keeper, 3)
    told = link_of(keeper).wait_for(Snapshotted).snapshot
    assert (told.step, told.durable) == (3, False)
    assert told.copy_seconds >= told.stall_seconds > 0
    weights = loop.weights()
    loop.train(2)
    again = Loop(rig.session(restore=from_memory(3), snapshot_slots=3)).track().restore()
    assert again.session.step == 3
    assert all(ours.equal(theirs) for ours, theirs in zip(again.weights(), weights, strict=True))
    restored = rig.agent.messages("restored")[0]
    assert (restored["source"], restored["checkpoint"], restored["step"]) == ("memory", None, 3)
    again.train(1)  # the certificate is compared before the first batch


def test_a_flipped_bit_in_the_slot_is_damage_and_nothing_is_trained(rig: Rig, keeper: Keeper) -> None:
    trained(rig, keeper, 3)
    link_of(keeper).wait_for(Snapshotted)
    slot = keeper._ranks[0].held[1, 3].slot
    slot.image[slot.image_bytes - 1] ^= 1
    with pytest.raises(CheckpointDamaged, match=r"rank 0's snapshot in memory of step 3, generation 1, is damaged"):
        Loop(rig.session(restore=from_memory(3))).track().restore()


def test_a_snapshot_that_the_keeper_does_not_hold_is_damage(rig: Rig, keeper: Keeper) -> None:
    trained(rig, keeper, 3)
    link_of(keeper).wait_for(Snapshotted)
    with pytest.raises(CheckpointDamaged, match=r"does not hold rank 0's snapshot of step 4, generation 1"):
        Loop(rig.session(restore=from_memory(4))).track().restore()


def test_the_fault_points_of_a_restore_are_passed_with_memory_too(
    rig: Rig, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(rig, keeper, 3)
    link_of(keeper).wait_for(Snapshotted)
    passed: list[str] = []
    monkeypatch.setattr(failpoint, "hit", lambda name, *_tear, **_: passed.append(name))
    Loop(rig.session(restore=from_memory(3))).track().restore()
    points = ("restore.begin", "restore.read", "restore.apply", "restore.done")
    assert [name for name in passed if name in points] == list(points)


def test_what_only_stays_in_memory_never_takes_the_last_slot(rig: Rig, keeper: Keeper) -> None:
    loop = Loop(rig.session(save_every_steps=3, snapshot_every_steps=1, snapshot_slots=2)).track().restore()
    for step in (1, 2, 3):
        loop.train(1)
        loop.next_batch()
        if step == 2:
            assert not link_of(keeper).wait_for(SnapshotSkipped).durable
        else:
            told = link_of(keeper).wait_for(Snapshotted).snapshot
            assert (told.step, told.durable) == (step, step == 3)


def test_a_rank_takes_the_word_on_how_often(rig: Rig, keeper: Keeper) -> None:
    loop = Loop(rig.session(snapshot_every_steps=None, snapshot_slots=4)).track().restore()
    loop.train(1)
    rig.agent.channel.send("save_every", generation=1, tier="memory", steps=2)
    for _ in range(4):
        loop.step(loop.next_batch())
    loop.next_batch()
    steps = [link_of(keeper).wait_for(Snapshotted).snapshot.step for _ in range(2)]
    assert steps == [2, 4]
