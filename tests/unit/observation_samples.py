"""A run in which everything happens that a metric tells of, and an observation of it."""

from pathlib import Path

from made_up_run import MadeUpRun

from orchestrator.config import RecoveryConfig
from orchestrator.decide.failure_rate import FailureRate, RatePosterior, prior_from_cluster
from orchestrator.observation import Observation
from orchestrator.observe.ledger import Ledger
from orchestrator.outcome import CoordinatorConfig
from workers.messages import RankPulse


def eventful_run(ranks: int = 2) -> MadeUpRun:
    run = MadeUpRun(ranks=ranks)
    run.drive()
    run.begin()
    run.now += 6
    run.first_step()
    run.train(9)
    run.snapshot(stall=0.1)
    run.commit(interference=0.2, samples=320)
    inputs = {"step_seconds": 1.0}
    for tier in ("memory", "durable"):
        ratios = {"goodput_ratio": 0.99, "goodput_ratio_half": 0.98, "goodput_ratio_double": 0.985}
        bounds = [{"name": "overhead", "interval_seconds": 20.0, "goodput_cost_ratio": 0.001}]
        seconds = {"interval_seconds": 20.0, "interval_steps": 20, "best_seconds": 12.0}
        run.add("cadence", generation=1, tier=tier, bounds=bounds, inputs=inputs, failures={}, **seconds, **ratios)
    run.train(8)
    run.add("suspected", generation=1, ranks=[0], quiet_seconds=3, limit_seconds=2)
    run.add("notice", node="n", ranks=[0], reason="drain", noticed_at=run.now, deadline_at=None)
    run.add("save_skipped", generation=1, step=12, reason="newer")
    run.add("save_failed", generation=1, step=14, attempt=1, reason="disk", final=True)
    run.add("save_stalled", generation=1, step=14, attempt=1, seconds=9.0, waiting_for=[])
    run.add("corruption", generation=1, step=14, attempt=1)
    run.fail("signal", noticed_after=0.5)
    run.add("node_lost", node="n", ranks=[1])
    run.add("quarantine", checkpoint="step-000000009-g0001-a01", reason="torn")
    run.add("node_excluded", node="n", left_out=True)
    run.add("skip", generation=1, rank=0, bad_step=19, batches=[[0, 1], [0, 2]])
    run.now += 1
    run.begin(10, "checkpoint")
    run.restore(0.5)
    run.first_step()
    run.add("straggler", generation=2, rank=1, node="n", cost_fraction=0.3, cost_seconds_per_step=0.3)
    run.train(20)
    run.progress(stall_seconds=0.05)
    run.coordinator_again()
    return run


def observe(
    run: MadeUpRun, run_dir: Path, *, copied_step: int | None = 28, recovery: RecoveryConfig | None = None
) -> Observation:
    """By the run's clock, from a ledger that is written first."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(run_dir / "ledger.jsonl", clock=lambda: run.now)
    for entry in run.entries[ledger._seq :]:
        fields = {key: value for key, value in entry.items() if key not in ("v", "seq", "kind")}
        ledger.append(entry["kind"], **fields)

    def rate() -> RatePosterior:
        return FailureRate(prior_from_cluster(1)).posterior(100.0)

    config = CoordinatorConfig(
        run="0123456789abcdef",
        driver=f"d{run.driver}",
        run_dir=run_dir,
        recovery=recovery or RecoveryConfig(),
        needed={},
        can_exclude=True,
    )
    return Observation(config, ledger, failure_rate=rate, copied_step=lambda: copied_step, clock=lambda: run.now)


def pulse(run: MadeUpRun, rank: int = 0, **changes: object) -> RankPulse:
    fields: dict[str, object] = {
        "agent": f"agent-{rank}",
        "generation": run.generation,
        "at": run.now,
        "step": run.step,
        "loss": 0.5,
        "phase": "training",
        "label": "",
        "allowance_seconds": 0.0,
        "moves": 1,
        "still_seconds": 0.0,
        "step_seconds": (1.0, 1.0),
        "stepped": True,
        "sequence": 1,
        "tick": 1,
        "cpu_seconds": 1.0,
        "state": "R",
    }
    return RankPulse(**(fields | changes))  # type: ignore[arg-type]
