"""Run directories as supervised runs leave them, written through the real parts; no Ray, tiny shards."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_samples import make_manifest, save_shards, whole

from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.observe.ledger import Ledger
from workers.checkpoint.manifest import checkpoint_dir, checkpoint_name
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState
from workers.data.journal import SampleJournal

STEPS = 12
RANKS = 2
QUIET_SECONDS = 60.0


class FakeRun:
    """Time moves by one second with each event, and by QUIET_SECONDS while training."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.now = 1000.0
        self.store = LocalStore(directory)
        self.archive = RunArchive(self.store)
        self.ledger = Ledger(directory / "ledger.jsonl", clock=lambda: self.now)
        for rank in range(RANKS):
            self.record("agent", agent=f"a{rank}", rank=rank, pid=100 + rank, node="n")

    def record(self, kind: str, **fields: Any) -> None:
        self.now += 1
        self.ledger.append(kind, **fields)

    def generation(
        self, number: int, restored_step: int, parent_generation: int | None, *, reason: str = "failure"
    ) -> None:
        """Begins from the checkpoint of that step and generation; all ranks restore and finish a step."""
        parent = checkpoint_name(restored_step, parent_generation, 1) if parent_generation else None
        self.now += 1
        self.archive.create_generation(
            GenerationRecord(
                number=number,
                driver="test",
                parent=parent,
                parent_generation=parent_generation,
                restored_step=restored_step,
                source="checkpoint" if parent else "fresh",
                reason=reason,
                created_at=self.now,
                world_size=RANKS,
            ),
            seen=self.archive.scan(),
        )
        self.record(
            "generation",
            generation=number,
            restored_step=restored_step,
            source="checkpoint" if parent else "fresh",
            checkpoint=parent,
            ranks=RANKS,
        )
        for rank in range(RANKS):
            self.record("restored", generation=number, rank=rank, checkpoint=parent, step=restored_step, seconds=0.1)
        for rank in range(RANKS):
            self.record("first_step", generation=number, rank=rank, step=restored_step + 1, at_step=self.now + rank)

    def train(self, generation: int, first: int, last: int) -> None:
        self.now += QUIET_SECONDS
        for rank in range(RANKS):
            journal = SampleJournal(self.journal(generation, rank))
            for step in range(first, last + 1):
                journal.record(step, [(0, 10 * step + rank)])
            journal.close()

    def journal(self, generation: int, rank: int) -> Path:
        return self.directory / f"samples/g{generation:04d}-rank-{rank:05d}.jsonl"

    def commit(self, generation: int, step: int, value: float | None = None, tensor: str = "w") -> None:
        """`value`: of the weights, which are equal in all runs otherwise."""
        name = checkpoint_name(step, generation, 1)
        weights = torch.full((3,), float(step) if value is None else value)
        states = [
            CapturedState(tensors=[whole(f"rank.{rank:05d}.{tensor}", weights)], document={}) for rank in range(RANKS)
        ]
        manifest = make_manifest(save_shards(self.store, states, name), step)
        self.archive.commit(replace(manifest, generation=generation, created_at=self.now))
        self.record("commit", generation=generation, step=step, attempt=1, checkpoint=name)

    def mark(self, name: str, action: str, point: str, **context: Any) -> None:
        """The marker of a fault that strikes now."""
        self.now += 1
        marker = self.directory / "faults" / f"{name}.json"
        marker.parent.mkdir(exist_ok=True)
        record = {"id": name, "point": point, "action": action, "at": self.now, "context": context}
        marker.write_text(json.dumps(record))

    def fail(self, generation: int, step: int, *, rank: int = 0, **fields: Any) -> None:
        entry = {
            "cause": "signal",
            "exit_code": -signal.SIGKILL,
            "failed_at": self.now,
            "noticed_at": self.now,
            "error": None,
            "echoes": [],
            "detail": {},
            "restore_failed": None,
        }
        self.record("failure", generation=generation, rank=rank, step=step, **{**entry, **fields})

    def kill(self, number: int, point: str, *, rank: int, generation: int, step: int) -> None:
        self.mark(f"kill-{number}", "kill_rank", point, rank=rank, rank_pid=1, generation=generation, step=step)
        self.fail(generation, step, rank=rank)

    def finish(self, generation: int) -> None:
        self.record("finished", generation=generation, step=STEPS, protected=True)


def undisturbed(directory: Path) -> FakeRun:
    run = FakeRun(directory)
    run.generation(1, 0, None)
    run.train(1, 1, STEPS)
    for step in (4, 8, 12):
        run.commit(1, step)
    run.finish(1)
    return run


def killed_twice(directory: Path) -> FakeRun:
    """Killed while step 8 was saved, and once more after step 9."""
    run = FakeRun(directory)
    run.generation(1, 0, None)
    run.train(1, 1, 8)
    run.commit(1, 4)
    run.kill(1, "snapshot.copy", rank=1, generation=1, step=8)
    run.generation(2, 4, 1)
    run.train(2, 5, 9)
    run.commit(2, 8)
    run.kill(2, "random moment", rank=0, generation=2, step=9)
    run.generation(3, 8, 2)
    run.train(3, 9, STEPS)
    run.commit(3, 12)
    run.finish(3)
    return run


def read(run: FakeRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "ledger.jsonl").read_text().splitlines()]


def edit_ledger(run: FakeRun, change: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the entries for which `change` returns true, as it left them."""
    entries = [entry for entry in read(run) if change(entry)]
    (run.directory / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def flip_last_bit(run: FakeRun, checkpoint: str) -> None:
    path = run.directory / checkpoint_dir(checkpoint) / "rank-00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
