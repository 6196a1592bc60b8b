"""A session at a step whose loss is bad, and after the rollback: what it tells, saves, and hands out."""

import math
from typing import Any, NoReturn

import pytest
import torch
from fakes import Loop, Rig
from torch import nn
from torch.distributed.tensor import Partial

from workers.data.course import SKIPPED_MAX
from workers.data.journal import read_journal
from workers.errors import CallerError
from workers.messages import RankError


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        assert code == 1
        raise Ended

    monkeypatch.setattr("workers.bad_step.os._exit", end)


def told(rig: Rig) -> RankError:
    """As the agent understands it."""
    (message,) = rig.agent.messages("error")
    del message["kind"]
    return RankError(**message)


def end_badly(loop: Loop, **values: Any) -> None:
    loop.optimizer.zero_grad()
    with pytest.raises(Ended):
        loop.session.end_step(**values)


def test_a_bad_step_is_told_with_its_batches_and_neither_saved_nor_counted(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=3)).track().restore()
    loop.train(2)
    mine = loop.data.next_sample_ids()
    loop.next_batch()
    end_badly(loop, loss=math.nan)
    error = told(rig)
    assert (error.cause, error.type, error.exit_code) == ("loss", "TrainingDiverged", 1)
    assert math.isnan(error.detail.pop("value"))
    assert error.detail == {"step": 3, "what": "loss", "limit": None, "batches": [[0, 2]]}
    samples = ", ".join(map(str, mine))
    assert (
        error.message
        == f"the loss is nan in step 3 on rank 0, which used batch 2 of epoch 0 (on this rank: samples {samples})"
    )
    assert "test_bad_step.py" in error.traceback and error.traceback.endswith(f"{error.message}\n")
    assert rig.keeper.snapshot_steps() == []
    assert sorted(read_journal(rig.run_dir / "samples/g0001-rank-00000.jsonl").steps) == [1, 2]
    assert loop.session.step == 2


def test_all_batches_of_an_accumulation_window_are_blamed(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.train(1)
    for _ in range(2):
        loop.next_batch()
        loop.session.end_micro_step()
    loop.next_batch()
    end_badly(loop, grad_norm=math.inf)
    assert told(rig).detail["batches"] == [[0, 1], [0, 2], [0, 3]]


def test_a_step_that_goes_on_with_an_earlier_batch_blames_that_one(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    batch = loop.next_batch()
    loop.step(batch)
    loop.backward(batch)
    end_badly(loop, loss=math.nan)
    assert told(rig).detail["batches"] == [[0, 0]]


def test_more_batches_than_can_be_skipped_still_fit_the_message(rig: Rig) -> None:
    loop = Loop(rig.session(), samples=5, batch=1).track().restore()
    for _ in range(SKIPPED_MAX + 500):
        loop.next_batch()
    end_badly(loop, loss=math.nan)
    assert len(told(rig).detail["batches"]) == SKIPPED_MAX + 1


def test_an_overflowing_gradient_norm_is_normal_while_a_scaler_is_enabled(rig: Rig) -> None:
    for enabled in (True, False):
        loop = Loop(rig.session())
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        loop.session.track(model=loop.model, optimizer=loop.optimizer, scheduler=None, data=loop.data, scaler=scaler)
        loop.restore()
        loop.next_batch()
        if enabled:
            loop.session.end_step(grad_norm=math.inf)
            loop.next_batch()
            end_badly(loop, loss=math.inf, grad_norm=math.inf)
            assert told(rig).detail["what"] == "loss"
        else:
            end_badly(loop, grad_norm=math.inf)


def test_numbers_in_tensors_are_judged_and_what_is_no_number_is_refused(rig: Rig) -> None:
    loop = Loop(rig.session()).track().restore()
    loop.session.end_step(loss=torch.tensor(1.0))  # type: ignore[arg-type]
    for value in ("high", torch.ones(2)):
        with pytest.raises(CallerError, match=r"session\.end_step\(loss=.*it has to be a number"):
            loop.session.end_step(loss=value)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match=r"grad_norm=.*holds a part; pass grad_norm\.full_tensor\(\)\.item\(\)"):
        loop.session.end_step(grad_norm=Part())  # type: ignore[arg-type]
    end_badly(loop, loss=torch.tensor(math.nan))


def test_what_a_spike_is_measured_by_survives_a_restore(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=20, loss_spike_factor=10.0)).track().restore()
    for _ in range(20):
        loop.backward(loop.next_batch())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.session.end_step(loss=2.0)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [20]
    order = rig.keeper.commit(rig.run_dir, 20)
    again = Loop(rig.session(restore=order, loss_spike_factor=10.0)).track().restore()
    again.next_batch()
    end_badly(again, loss=21.0)
    assert told(rig).detail["limit"] == 20.0


class Part:
    """A sharded tensor, as far as it matters here."""

    placements = (Partial(),)

    def __float__(self) -> float:
        return 0.5


# ---------------------------------------------------------------- after the rollback


def test_a_restored_rank_skips_what_it_is_told_also_the_very_next_batch(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2)).track().restore()
    loop.train(2)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    order = rig.keeper.commit(rig.run_dir, 2)
    again = Loop(rig.session(restore=order, skip=((0, 2), (0, 4)))).track().restore()
    again.train(2)  # the certificate knows of another next batch
    content = read_journal(rig.run_dir / f"samples/g{rig.generation:04d}-rank-00000.jsonl")
    data = again.data.order
    assert list(content.steps.values()) == [tuple((0, i) for i in data.batch_ids(0, batch)) for batch in (3, 5)]
    assert content.skipped == {(0, batch): tuple(data.global_batch_ids(0, batch)) for batch in (2, 4)}
    assert again.session.progress.samples == 4 * 4


def test_a_fresh_start_skips_what_it_is_told(rig: Rig) -> None:
    loop = Loop(rig.session(skip=((0, 0),))).track().restore()
    assert loop.next_batch().tolist() == loop.data.order.batch_ids(0, 1)


def test_a_checkpoint_remembers_what_was_skipped_behind_it_and_ahead(rig: Rig) -> None:
    loop = Loop(rig.session(save_every_steps=2, skip=((0, 1), (0, 5)))).track().restore()
    loop.train(2)
    loop.next_batch()
    assert rig.keeper.snapshot_steps() == [2]
    order = rig.keeper.commit(rig.run_dir, 2)
    again = Loop(rig.session(restore=order)).track().restore()  # nobody tells it any more
    assert again.data.skipped == [(0, 1), (0, 5)]
    assert again.data.samples_consumed == 8


def test_a_rollback_needs_a_loader_that_can_skip(rig: Rig) -> None:
    session = rig.session(skips_bad_batches=True)
    session.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, data=None)
    with pytest.raises(CallerError, match=r"RecoveryConfig\.on_bad_loss is 'rollback'.*session\.data_loader\(\)"):
        session.restore()
    Loop(rig.session(skips_bad_batches=True)).track().restore()
