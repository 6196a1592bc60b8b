"""What is done about ranks that do not hold alike what they must, on a real run directory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import make_manifest, save_shards, whole
from test_rendezvous import joined

from orchestrator import corruption
from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.decide.orders import Corruption
from orchestrator.decide.rendezvous import Decision, EndRanks, Phase, Rendezvous
from orchestrator.decide.replicas import Difference
from orchestrator.observe.ledger import Ledger, read_ledger
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState

WORLD = 3
HOLDERS = tuple(range(WORLD))
GENERATION = 7  # of the checkpoints that make_manifest makes


class Life:
    """As much of the lifecycle as is needed, around a real archive, ledger and rendezvous."""

    def __init__(self, run_dir: Path) -> None:
        self.store = LocalStore(run_dir)
        self.archive = RunArchive(self.store)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.ledger.append("coordinator", driver="d", resumed=False)
        self.rendezvous = Rendezvous()
        for rank in range(WORLD):
            self.rendezvous.joined(joined(rank, world=WORLD, node=f"node-{rank}"), now=0.0)
        self.rendezvous.created(GENERATION)
        record = GenerationRecord(
            number=GENERATION,
            driver="d",
            parent=None,
            parent_generation=None,
            restored_step=0,
            source="fresh",
            reason="start",
            created_at=0.0,
            world_size=WORLD,
        )
        self.archive.create_generation(record, seen=self.archive.scan())
        self.stopped: list[tuple[str, str]] = []
        self.decided: list[Decision] = []

    def save(self, step: int, *compared: str) -> str:
        """A committed checkpoint at which these tensors were compared, and were alike."""
        said = {name: [0, 8, "same"] for name in compared}
        document = {
            "replicas": {"sets": [{"holders": list(HOLDERS), "layout": "l", "digests": said, "values": {}}]},
        }
        states = [CapturedState(tensors=[whole(f"t{rank}", torch.ones(2))], document=document) for rank in HOLDERS]
        name = make_manifest((), step).name
        manifest: Manifest = make_manifest(save_shards(self.store, states, name), step)
        self.archive.commit(manifest)
        return manifest.name

    def find(self, step: int, *tensors: str, odd: tuple[int, ...] = (1,), generation: int = GENERATION) -> None:
        differences = tuple(Difference(what=name, holders=HOLDERS, odd=odd, stop=8) for name in tensors)
        found = Corruption(generation=generation, step=step, attempt=1, differences=differences)
        life: Any = self
        asyncio.run(corruption.answer(life, found))

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in read_ledger(self.ledger.path) if entry["kind"] == kind]

    async def carry_out(self, decisions: Sequence[Decision]) -> None:
        self.decided += decisions

    def stop(self, error: str, error_type: str) -> None:
        self.stopped.append((error, error_type))


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def test_it_is_written_down_and_the_generation_ends_for_it(life: Life) -> None:
    newest = life.save(20, "w", "v")
    life.find(30, "w", "v")
    (written,) = life.entries("corruption")
    assert {key: written[key] for key in ("generation", "step", "attempt", "tensors", "odd", "nodes", "unproven")} == {
        "generation": GENERATION,
        "step": 30,
        "attempt": 1,
        "tensors": ["w", "v"],
        "odd": [1],
        "nodes": {"1": "node-1"},
        "unproven": None,
    }
    assert life.rendezvous.phase is Phase.ENDING
    assert [type(decision) for decision in life.decided] == [EndRanks]
    (cause,) = life.rendezvous._causes
    assert (cause.rank, cause.kind, cause.exit_code) == (1, "corruption", None)
    assert cause.detail["tensors"] == ["w", "v"]
    assert life.archive.scan().quarantined == {}, f"{newest} was compared and equal"


def test_where_nobody_can_tell_no_rank_is_blamed_and_all_nodes_are_named(life: Life) -> None:
    life.find(30, "w", odd=())
    (cause,) = life.rendezvous._causes
    assert cause.rank == -1
    assert life.entries("corruption")[0]["nodes"] == {"0": "node-0", "1": "node-1", "2": "node-2"}


def test_checkpoints_that_may_hold_the_same_are_passed_over(life: Life) -> None:
    good = life.save(20, "w")
    bad = [life.save(30, "v"), life.save(40, "v")]
    life.find(50, "w")
    assert life.archive.scan().quarantined.keys() == set(bad)
    recorded = {entry["checkpoint"]: entry["reason"] for entry in life.entries("quarantine")}
    assert recorded == life.archive.scan().quarantined
    assert recorded[bad[0]] == (
        "at step 50 of its generation w differs on rank 1 from what the other ranks hold, which were not compared when "
        "it was saved"
    )
    assert life.archive.select().choice.name == good  # type: ignore[union-attr]


def test_the_oldest_one_is_spared_if_there_is_nothing_else_to_restore_and_the_ledger_says_so(life: Life) -> None:
    oldest, newest = life.save(20, "v"), life.save(30, "v")
    life.find(40, "w")
    assert life.archive.scan().quarantined.keys() == {newest}
    assert life.entries("corruption")[0]["unproven"] == oldest


def test_a_list_of_differences_is_bounded(life: Life) -> None:
    life.find(30, *(f"t{number}" for number in range(1000)))
    (written,) = life.entries("corruption")
    assert len(written["tensors"]) == 20
    assert written["differences"] == 1000


def test_what_a_generation_that_is_over_has_left_does_not_end_the_one_that_runs(life: Life) -> None:
    life.find(30, "w", generation=GENERATION - 1)
    assert life.rendezvous.phase is Phase.RUNNING
    assert len(life.entries("corruption")) == 1
    assert life.decided == []


def test_the_second_time_at_the_same_step_the_run_stops_and_says_where_to_look(life: Life) -> None:
    life.ledger.append("corruption", generation=GENERATION - 1, step=30)
    life.find(30, "model.w", "model.v")
    ((message, kind),) = life.stopped
    assert kind == "TrainingFailed"
    for part in (
        "at step 30, for the second time in a row, model.w, model.v differ on rank 1 from what the other ranks hold",
        "rank 1 on node node-1",
        "test the memory and the GPU there, or leave that node out",
        "RecoveryConfig(check_replicas=False)",
    ):
        assert part in message
    assert life.decided == []


def test_storage_that_cannot_set_suspects_aside_stops_the_run(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.save(20, "v")
    life.save(30, "v")

    def refuse(name: str, reason: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(life.archive, "quarantine", refuse)
    life.find(40, "w")
    ((message, kind),) = life.stopped
    assert kind == "EnvironmentProblem"
    assert "w differs on rank 1" in message
    assert "Read-only file system" in message
