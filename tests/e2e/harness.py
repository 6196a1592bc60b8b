"""Runs supervised training in tests, attacks it from outside, and compares what it leaves."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray.train import RunConfig, ScalingConfig

from orchestrator import RecoveryConfig, SupervisedResult, SupervisedTrainer
from orchestrator.archive import RunArchive
from orchestrator.decide import lineage
from orchestrator.observe.ledger import read_ledger
from orchestrator.run_store import store_of
from workers.checkpoint.manifest import read_manifest
from workers.data.journal import audit_samples, effective_samples, read_journal
from workers.failpoint import Arm

STEPS = 60
SAVE_EVERY = 10
T = TypeVar("T")


def trainer(
    storage: Path,
    name: str,
    loop: Callable[..., None],
    *,
    config: dict[str, Any] | None = None,
    failpoints: Sequence[Arm] = (),
    ranks: int = 2,
    **recovery: Any,
) -> SupervisedTrainer:
    return SupervisedTrainer(
        loop,
        train_loop_config={"steps": STEPS, "seed": 0} | (config or {}),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(name=name, storage_path=str(storage)),
        recovery=RecoveryConfig(failpoints=tuple(failpoints), **{"cadence": SAVE_EVERY, "keep_last": 50} | recovery),
    )


class Run:
    """A `fit()` in a thread of its own, so that the test can watch and attack it."""

    def __init__(self, supervised: SupervisedTrainer) -> None:
        self.trainer = supervised
        self._result: SupervisedResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._result = self.trainer.fit()
        except BaseException as error:
            self._error = error

    def result(self, timeout_seconds: float = 300) -> SupervisedResult:
        self._thread.join(timeout_seconds)
        assert not self._thread.is_alive(), "fit() did not end in time"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def status_when(self, holds: Callable[[dict[str, Any]], bool], timeout_seconds: float = 180) -> dict[str, Any]:
        """The first status for which `holds` is true."""

        def look() -> dict[str, Any] | None:
            assert self._thread.is_alive(), f"fit() ended early: {self._error!r}"
            status = self.trainer.status()
            return status if status.get("ranks") and holds(status) else None

        return wait_for(look, timeout_seconds)


def wait_for(look: Callable[[], T | None], timeout_seconds: float) -> T:
    """Poll until `look` returns something; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(f"did not happen within {timeout_seconds} s")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def entries(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry["kind"] == kind]


def final_digests(run_dir: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    """Digest of every saved tensor part of the newest committed checkpoint: weights, optimizer, random generators."""
    store = store_of(run_dir)
    scan = RunArchive(store).scan()
    newest = lineage.newest(scan.generations, scan.checkpoints)
    assert newest is not None, f"nothing is committed in {run_dir}"
    assert newest.step == STEPS
    manifest = read_manifest(store, newest.name)
    return {(tensor.name, tensor.offsets): tensor.digest for shard in manifest.shards for tensor in shard.tensors}


def consumed(run_dir: Path) -> dict[int, Any]:
    """Step -> rank -> samples, as they count on the lineage."""
    generations = RunArchive(store_of(run_dir)).scan().generations
    limits = lineage.chain(generations)
    records = {record.number: record for record in generations}
    chain = [
        (link.generation, records[link.generation].restored_step, STEPS if link.step_max is None else link.step_max)
        for link in reversed(limits)
    ]
    journals = {}
    for path in (run_dir / "samples").glob("*.jsonl"):
        generation, rank = path.stem.removeprefix("g").split("-rank-")
        journals[int(generation), int(rank)] = read_journal(path)
    effective = effective_samples(journals, chain)
    assert not effective.holes
    audit = audit_samples(effective.samples(), set(effective.samples()))
    assert not audit.duplicated
    return {step: dict(by_rank) for step, by_rank in effective.steps.items()}


def assert_equal_runs(attacked: Path, reference: Path) -> None:
    """The same bits in every saved tensor, and the same samples in every step."""
    assert final_digests(attacked) == final_digests(reference)
    assert consumed(attacked) == consumed(reference)
