"""lastgood as arms of the benchmark of saves: a real supervised run for each, with its switches.

The loop is measured as the peers' is. When a save was durable and verified, the run's ledger says; a restore from
memory is that of a generation which follows a killed rank. Saves alone are measured: snapshots between them are off.
"""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from saves_ranks import Ranks, RanksFailed

from orchestrator import RecoveryConfig, SupervisedTrainer
from orchestrator.observe.ledger import read_ledger

IDLE_SECONDS_MAX = 3600.0
END_SECONDS_MAX = 60.0
LEDGER_SECONDS_MAX = 30.0
SLOTS = 2


@dataclass(frozen=True, slots=True)
class Way:
    """How an arm differs from the defaults. An optimizer whose steps are not announced leaves no time to copy beside
    training."""

    recovery: dict[str, Any] = field(default_factory=dict)
    announced: bool = True


WAYS = {
    "lastgood": Way(),
    "lastgood-unverified": Way({"verify_saves": False}),
    "lastgood-synchronous": Way(announced=False),
}


def loop(config: dict[str, Any]) -> None:
    from saves_training import Arm, Training, serve

    import workers
    from workers.checkpoint.reader import CheckpointReader
    from workers.checkpoint.store import LocalStore

    session = workers.get_session()
    training = Training(config["state_mib"], announced=config["announced"])
    run_dir = Path(config["run_dir"])

    class Lastgood(Arm):
        name = config["name"]
        fsyncs = True

        def begin(self, directory: Path) -> None:
            session.save_now()
            self.step = session.step

        def done(self) -> float | None:
            manifests = (run_dir / "checkpoints").glob(f"step-{self.step:09d}-*/manifest.json")
            return time.monotonic() if any(manifests) else None

        def restore(self, directory: Path) -> None:
            reader = CheckpointReader(LocalStore(run_dir), directory.name, session.rank)
            session._state.apply(reader)
            reader.close()

    session.track(model=training.model, optimizer=training.optimizer, scheduler=None, data=None)
    session.restore()
    training.end_step = session.end_step
    serve(
        config["address"],
        {"group": config["name"], "rank": session.rank, "generation": session.generation},
        training,
        {config["name"]: Lastgood()},
        idle=lambda: session.phase("waiting for the other arms", timeout=IDLE_SECONDS_MAX),
    )


class LastgoodGroup:
    """One supervised run, whose ranks wait for what they are asked."""

    def __init__(self, name: str, scratch: Path, directory: Path, state_mib: int, number: int) -> None:
        self._name = name
        self._number = number
        self._listener = Listener(str(scratch / f"{name}.s"))
        self.run_dir = directory / "runs" / name
        self._trainer = SupervisedTrainer(
            loop,
            train_loop_config={
                "name": name,
                "state_mib": state_mib,
                "announced": WAYS[name].announced,
                "address": self._listener.address,
                "run_dir": str(self.run_dir),
            },
            scaling_config=ScalingConfig(num_workers=number),
            run_config=RunConfig(name=name, storage_path=str(self.run_dir.parent)),
            recovery=RecoveryConfig(
                cadence=None,
                save_at_end=False,
                keep_last=1,
                snapshot_slots=SLOTS,
                snapshot_every_steps=None,
                **WAYS[name].recovery,
            ),
        )
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        try:
            self.ranks = Ranks(self._listener, name, number, self._problem)
        except RanksFailed:
            self._listener.close()
            raise

    @property
    def verifies(self) -> bool:
        return WAYS[self._name].recovery.get("verify_saves", True)

    def pids(self) -> list[int]:
        """Ranks and keepers."""
        return self.ranks.pids + [keeper["pid"] for keeper in self._trainer.status()["keepers"]]

    def committed(self, began_at: float) -> dict[str, Any]:
        """The ledger's entry of the save that began then."""
        return self._entries("commit", lambda entry: entry["snapshot_at"] >= began_at, 1)[-1]

    def restart(self) -> float | None:
        """Kill a rank; seconds that the slowest then took to restore from memory, None if it was not from there."""
        generation = self.ranks.hellos[0]["generation"] + 1
        self.ranks.tell(self._number - 1, do="die")
        ended, self.ranks = self.ranks, Ranks(self._listener, self._name, self._number, self._problem)
        ended.close()
        (begun,) = self._entries("generation", lambda entry: entry["generation"] == generation, 1)
        restored = self._entries("restored", lambda entry: entry["generation"] == generation, self._number)
        return max(entry["seconds"] for entry in restored) if begun["source"] == "memory" else None

    def close(self) -> None:
        for rank in self.ranks.connections:
            with contextlib.suppress(RanksFailed):
                self.ranks.tell(rank, do="end")
        self._thread.join(END_SECONDS_MAX)  # what does not end then ends with Ray
        self._listener.close()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:
            self._error = error

    def _problem(self) -> str | None:
        if self._thread.is_alive():
            return None
        return f"the run has ended: {type(self._error).__name__}: {str(self._error).strip().splitlines()[-1:]}"

    def _entries(self, kind: str, holds: Any, number: int) -> list[dict[str, Any]]:
        """The ledger is written right after what it tells of."""
        deadline = time.monotonic() + LEDGER_SECONDS_MAX
        while time.monotonic() < deadline:
            entries = read_ledger(self.run_dir / "ledger.jsonl")
            found = [entry for entry in entries if entry["kind"] == kind and holds(entry)]
            if len(found) >= number:
                return found
            time.sleep(0.02)
        raise RanksFailed(f"the ledger has no {kind} of that")
