"""The demo's story: train under attack, train again undisturbed, judge what both left behind.

What the report says comes from the two run directories (ledger, markers of fired faults, journals, checkpoints), never
from what this module meant to happen.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig

from chaos.demo.job import train_loop
from chaos.demo.judge import judge
from chaos.demo.narrator import Narrator
from chaos.demo.plan import RANDOM_MOMENT, AttackPlan, RandomKill, plan_attack
from orchestrator import RecoveryConfig, SupervisedResult, SupervisedTrainer
from orchestrator.observe.ledger import read_ledger
from workers.failpoint import Arm

_POLL_SECONDS = 0.05
_SAMPLES_PER_RANK = 8
_SAVES_PER_RUN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the demo trains, and where: `storage` exists and is writable."""

    storage: Path
    seed: int
    steps: int
    workers: int
    kill_at: str | None


def tell(settings: Settings, narrator: Narrator) -> dict[str, Any]:
    """Run the demo; returns the report, with a truth value for each claim under "claims"."""
    began = time.monotonic()
    plan = plan_attack(seed=settings.seed, steps=settings.steps, workers=settings.workers, kill_at=settings.kill_at)
    narrator.say(f"seed {settings.seed}: {settings.workers} ranks, {settings.steps} steps, in {settings.storage}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    narrator.say("starting Ray, then the run that will be attacked")
    with _local_ray(settings.workers):
        attacked = _train(settings, f"attacked-{stamp}", narrator, plan)
        narrator.say("the same training again, undisturbed, to compare with")
        reference = _train(settings, f"reference-{stamp}", narrator, None)
    report, rows = judge(attacked.run_dir, reference.run_dir, planned_kills=plan.kills, steps=settings.steps)
    narrator.table(f"seed {settings.seed}", rows)
    narrator.say(f"look around with: {sys.argv[0]} checkpoints list {attacked.run_dir}")
    return report | {
        "seed": settings.seed,
        "steps": settings.steps,
        "workers": settings.workers,
        "seconds": round(time.monotonic() - began, 1),
    }


@contextmanager
def _local_ray(workers: int) -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=max(workers, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _train(settings: Settings, name: str, narrator: Narrator, plan: AttackPlan | None) -> SupervisedResult:
    arms: tuple[Arm, ...] = plan.inside_saves if plan else ()
    trainer = SupervisedTrainer(
        train_loop,
        train_loop_config={
            "seed": settings.seed,
            "steps": settings.steps,
            "global_batch_size": _SAMPLES_PER_RANK * settings.workers,
        },
        scaling_config=ScalingConfig(num_workers=settings.workers),
        run_config=RunConfig(name=name, storage_path=str(settings.storage)),
        recovery=RecoveryConfig(
            cadence=max(2, settings.steps // _SAVES_PER_RUN),
            max_failures=2 * (plan.kills if plan else 1),
            # All of the attacked run's, so that the judge can read what was restored.
            keep_last=settings.steps if plan else 1,
            failpoints=arms,
        ),
    )
    observer = _Observer(trainer, settings.storage / name, narrator, plan.random_kill if plan else None)
    with narrator.run("under attack" if plan else "undisturbed", settings.steps), observer:
        return trainer.fit()


class _Observer(threading.Thread):
    """Watches a run from beside it, tells what its ledger says, and carries out the kill at a random moment."""

    def __init__(
        self, trainer: SupervisedTrainer, run_dir: Path, narrator: Narrator, random_kill: RandomKill | None
    ) -> None:
        super().__init__(name="demo-observer", daemon=True)
        self._trainer = trainer
        self._run_dir = run_dir
        self._narrator = narrator
        self._random_kill = random_kill
        self._over = threading.Event()
        self._told = 0
        self._markers_told: set[str] = set()
        self._step = (0, 0.0)
        self._step_seconds = 0.0

    def __enter__(self) -> "_Observer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()
        self._tell_news()

    def run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            status = self._trainer.status()
            self._tell_news()
            if status.get("ranks"):
                self._follow(status)
                self._maybe_kill(status)

    def _follow(self, status: dict[str, Any]) -> None:
        step, now = status["step"], time.monotonic()
        before, at = self._step
        if step == before:
            return
        if step == before + 1:
            self._step_seconds = now - at
        self._step = (step, now)
        self._narrator.at_step(step, status["loss"])

    def _maybe_kill(self, status: dict[str, Any]) -> None:
        kill = self._random_kill
        if kill is None or status["state"] != "running" or status["step"] < kill.step:
            return
        self._over.wait(kill.step_fraction * self._step_seconds)
        victim = next(rank for rank in status["ranks"] if rank["rank"] == kill.rank)
        if victim["pid"] is None:
            return
        marker = self._run_dir / "faults" / "kill-2-random.json"
        record = {
            "id": marker.stem,
            "point": RANDOM_MOMENT,
            "action": "kill_rank",
            "when": asdict(kill),
            "at": time.time(),
            "pid": os.getpid(),
            "context": {
                "rank": kill.rank,
                "rank_pid": victim["pid"],
                "generation": status["generation"],
                "step": status["step"],
            },
        }
        marker.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.kill(victim["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return  # it has just died of something else; its successor will do
        marker.write_text(json.dumps(record), encoding="utf-8")
        self._random_kill = None

    def _tell_news(self) -> None:
        for path in sorted((self._run_dir / "faults").glob("*.json")):
            with contextlib.suppress(ValueError):  # still being written; the next look finds it whole
                if path.name not in self._markers_told:
                    self._narrator.say(_fault_line(json.loads(path.read_text(encoding="utf-8"))), style="bold red")
                    self._markers_told.add(path.name)
        try:
            entries = read_ledger(self._run_dir / "ledger.jsonl")
        except FileNotFoundError:
            return
        for entry in entries[self._told :]:
            line = _line(entry)
            if line:
                self._narrator.say(line)
        self._told = len(entries)


def _fault_line(marker: dict[str, Any]) -> str:
    context = marker["context"]
    where = marker["point"]
    if "total" in context:
        where += f", {context['index']} of {context['total']} done"
    return f"SIGKILL to rank {context['rank']} (pid {context['rank_pid']}) at {where}"


def _line(entry: dict[str, Any]) -> str:
    match entry["kind"]:
        case "generation":
            start = {
                "memory": f"from the snapshots of step {entry['restored_step']} in memory",
                "checkpoint": f"from {entry['checkpoint']}",
                "fresh": "afresh",
            }[entry["source"]]
            return f"generation {entry['generation']} starts {entry['ranks']} ranks {start}"
        case "failure":
            ends = ", ".join(
                f"rank {end['rank']} by {end['cause']} {end['exit_code']}" for end in (entry, *entry["echoes"])
            )
            return f"generation {entry['generation']} ended after step {entry['step']}: {ends}"
        case "first_step" if entry["rank"] == 0:
            return f"training again: step {entry['step']} done" if entry["generation"] > 1 else ""
        case "commit":
            return f"step {entry['step']} committed, read back from {' and '.join(entry['verified_from'])}"
        case "quarantine" | "memory_dropped" | "save_failed" | "save_skipped" | "stopped" as kind:
            details = ", ".join(
                f"{key} {value}" for key, value in entry.items() if key not in ("v", "seq", "at", "kind")
            )
            return f"{kind.replace('_', ' ')}: {details}"
    return ""
