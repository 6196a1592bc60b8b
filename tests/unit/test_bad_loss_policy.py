"""What becomes of a run with a bad loss: the policy, the budget, and where a skip is written down."""

import random
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recovery
from orchestrator.archive import RunArchive
from orchestrator.config import RecoveryConfig
from orchestrator.decide import bad_loss
from orchestrator.decide.bad_loss import Skip
from orchestrator.decide.budget import FailureBudget, Retry, Stop
from orchestrator.decide.rendezvous import Judge, Rendezvous
from orchestrator.generation_file import generation_bytes, parse_generation
from orchestrator.observe.ledger import Ledger
from workers.checkpoint.sealed import seal, unseal
from workers.checkpoint.store import LocalStore
from workers.data.course import SKIPPED_MAX, BatchId
from workers.errors import CallerError, CheckpointDamaged
from workers.messages import AgentJoined, RankError, RankExited


def detail(*batches: BatchId) -> dict[str, Any]:
    return {"step": 7, "what": "loss", "value": "nan", "limit": None, "batches": [list(batch) for batch in batches]}


# ---------------------------------------------------------------- the policy


def test_the_default_stops_and_names_the_setting() -> None:
    verdict = bad_loss.answer(detail((0, 3)), RecoveryConfig().on_bad_loss, ())
    assert isinstance(verdict, Stop)
    assert 'RecoveryConfig.on_bad_loss is "stop"' in verdict.reason
    assert '"rollback"' in verdict.reason


def test_a_rollback_skips_all_batches_of_the_step() -> None:
    assert bad_loss.answer(detail((0, 4), (0, 3)), "rollback", {(0, 1)}) == Skip(batches=((0, 3), (0, 4)))


def test_a_step_without_a_batch_cannot_be_skipped() -> None:
    verdict = bad_loss.answer(detail(), "rollback", ())
    assert isinstance(verdict, Stop)
    assert "no batch to skip" in verdict.reason


def test_a_run_skips_only_so_many_batches_in_all() -> None:
    skipped = {(0, batch) for batch in range(SKIPPED_MAX - 1)}
    assert isinstance(bad_loss.answer(detail((1, 0)), "rollback", skipped), Skip)
    assert isinstance(bad_loss.answer(detail((1, 0), (1, 1)), "rollback", skipped), Stop)


def test_rollbacks_that_lead_nowhere_stop_the_run_and_a_newer_checkpoint_allows_more() -> None:
    budget = FailureBudget(None, rng=random.Random(0))

    def fail(restored: int, step: int) -> Retry | Stop:
        budget.generation_started(restored)
        return budget.failure("loss", step)

    assert all(isinstance(fail(0, step), Retry) for step in range(1, 6))
    budget.committed(10)
    assert all(isinstance(fail(10, step), Retry) for step in range(11, 16))
    verdict = fail(10, 16)
    assert isinstance(verdict, Stop)
    assert "bad again after 5 rollbacks since step 10 was saved" in verdict.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [("on_bad_loss", "ignore"), ("loss_spike_factor", 1.0), ("loss_spike_factor", float("inf"))],
)
def test_settings_that_cannot_work_are_named(field: str, value: Any) -> None:
    with pytest.raises(CallerError, match=rf"RecoveryConfig\.{field} is {value!r}; it has to be"):
        RecoveryConfig(**{field: value})


# ---------------------------------------------------------------- the cause


def test_ranks_that_find_it_in_the_same_step_are_one_failure_whoever_is_heard_first() -> None:
    rendezvous = Rendezvous()
    for rank in (0, 1):
        rendezvous.joined(
            AgentJoined(
                agent=f"a{rank}",
                group="g",
                rank=rank,
                local_rank=rank,
                world_size=2,
                node="n",
                node_ip="127.0.0.1",
                pid=rank,
                ready=True,
                store_port=1,
            ),
            now=0.0,
        )
    rendezvous.created(1)
    for rank, at in ((0, 5.2), (1, 5.1)):
        error = RankError(
            type="TrainingDiverged",
            message="m",
            traceback="t",
            at=at,
            exit_code=1,
            cause="loss",
            detail=detail((0, 3)),
        )
        decisions = rendezvous.exited(
            RankExited(agent=f"a{rank}", generation=1, pid=1, exit_code=1, at=at, ordered=rank == 1, error=error)
        )
    (verdict,) = decisions
    assert isinstance(verdict, Judge)
    first, (echo,) = verdict.failure.first, verdict.failure.echoes
    assert (first.kind, first.rank, echo.kind, echo.rank) == ("loss", 1, "loss", 0)
    assert first.detail == detail((0, 3))


# ---------------------------------------------------------------- where a skip is written down


def create(archive: RunArchive, *, skip: set[BatchId], driver: str = "d") -> tuple[BatchId, ...]:
    created = recovery.create_generation(
        archive,
        run_dir=Path("run"),
        committed=(),
        begun=(),
        driver=driver,
        reason="failure",
        world_size=2,
        skip=skip,
        suspects={},
        memory=None,
        on_quarantine=lambda name, reason: None,
    )
    return created.record.skip


def test_every_generation_inherits_the_skips_of_all_before_it_also_another_drivers(tmp_path: Path) -> None:
    assert create(RunArchive(LocalStore(tmp_path)), skip=set()) == ()
    assert create(RunArchive(LocalStore(tmp_path)), skip={(1, 2), (0, 3)}) == ((0, 3), (1, 2))
    assert create(RunArchive(LocalStore(tmp_path)), skip=set(), driver="e") == ((0, 3), (1, 2))
    assert create(RunArchive(LocalStore(tmp_path)), skip={(0, 9)}, driver="e") == ((0, 3), (0, 9), (1, 2))
    records = RunArchive(LocalStore(tmp_path)).scan().generations
    assert [len(record.skip) for record in records] == [0, 2, 2, 3]


def test_a_skip_that_is_only_in_the_ledger_is_found_whichever_driver_wrote_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("coordinator", driver="d", resumed=False)
    ledger.append("skip", generation=1, rank=1, bad_step=7, batches=((0, 3), (0, 4)))
    ledger.append("coordinator", driver="e", resumed=False)
    ledger.append("skip", generation=2, rank=0, bad_step=9, batches=((1, 0),))
    assert recovery.skipped_batches(ledger.path) == {(0, 3), (0, 4), (1, 0)}


@pytest.mark.parametrize("skip", [None, 3, [3], [[1]], [[1, "2"]], [[1, 2.0]], [[1, 2, 3]]])
def test_a_generation_file_with_impossible_skips_is_damaged(tmp_path: Path, skip: Any) -> None:
    create(RunArchive(LocalStore(tmp_path)), skip={(0, 3)})
    (record,) = RunArchive(LocalStore(tmp_path)).scan().generations
    data = generation_bytes(record)
    assert parse_generation(data, 1, "g") == record
    with pytest.raises(CheckpointDamaged, match="g has a skip that is no list"):
        parse_generation(seal({**unseal(data, "g"), "skip": skip}), 1, "g")
