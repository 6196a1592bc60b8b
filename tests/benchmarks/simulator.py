"""How fast the simulator is, and how near to a real run.

    python tests/benchmarks/simulator.py [--seeds 1000] [--json]        a year of 16,384 GPUs, and so many seeds of it
    python tests/benchmarks/simulator.py --real [--kills 20] [--json]   a real supervised run beside the simulator

- year: the CPU seconds of one run of docs/scenarios/llama3-16384.toml over a year, for the tuner and for a fixed
  interval. - seeds: the wall seconds of a month of it under the fixed interval, in as many processes as there are CPUs.
- real: two ranks train on a local Ray, in steps that sleep, and one of them is killed at moments that a seed draws.
  The simulator gets the same failure times, and the costs that the run's ledger shows; goodput of both is the training
  of all steps over the time from the first step until the last one. Takes two minutes.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from chaos.simulator.compare import run_all
from chaos.simulator.draws import Cost
from chaos.simulator.engine import simulate
from chaos.simulator.failures import Failures, Trace, failures
from chaos.simulator.job import Job, SaveCosts
from chaos.simulator.policies import Every, build
from chaos.simulator.scenario import Scenario, read_scenario
from chaos.simulator.seen import with_costs_seen
from orchestrator.observe.costs import run_costs
from orchestrator.observe.ledger import LEDGER_FILE, read_ledger

SCENARIO = Path(__file__).parents[2] / "docs" / "scenarios" / "llama3-16384.toml"
YEAR_SECONDS = 365 * 86400.0
MONTH_SECONDS = 30 * 86400.0
FIXED = "15min"
STEP_SECONDS = 0.1
SAVE_EVERY = 10
STEPS_BETWEEN_KILLS = 40
POLL_SECONDS = 0.05
DEADLINE_SECONDS = 60.0


def speed(seeds: int, told: Callable[[int], None]) -> dict[str, Any]:
    scenario = read_scenario(SCENARIO)
    year = _over(scenario, YEAR_SECONDS)
    found: dict[str, Any] = {}
    for policy in ("auto", FIXED):
        began = time.process_time()
        outcome = simulate(year.job, year.failures(0), build(policy, year), 0)
        found[f"year_cpu_seconds_{policy}"] = time.process_time() - began
        found["year_failures"] = outcome.failures.total()
    jobs = len(os.sched_getaffinity(0))
    began = time.perf_counter()
    run_all(_over(scenario, MONTH_SECONDS), [FIXED], range(seeds), jobs=jobs, told=told)
    return {**found, "seeds": seeds, "processes": jobs, "seeds_wall_seconds": time.perf_counter() - began}


def _over(scenario: Scenario, seconds: float) -> Scenario:
    return replace(scenario, job=replace(scenario.job, horizon_seconds=seconds))


# ---------------------------------------------------------------- beside a real run


def loop(config: dict[str, Any]) -> None:
    import torch

    import workers

    session = workers.get_session()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    session.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    session.restore()
    while session.step < config["steps"]:
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_SECONDS)
        session.end_step()


def real_run(storage: Path, kills: int, seed: int) -> None:
    """Leaves the run's ledger and its steps in `storage`."""
    import ray
    from ray.train import RunConfig, ScalingConfig

    from orchestrator import RecoveryConfig, SupervisedTrainer

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=str(storage / "ray"))
    trainer = SupervisedTrainer(
        loop,
        train_loop_config={"steps": STEPS_BETWEEN_KILLS * (kills + 1)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        recovery=RecoveryConfig(cadence=SAVE_EVERY, snapshot_every_steps=None),
    )
    killer = threading.Thread(target=kill_ranks, args=(trainer, kills, random.Random(seed)), daemon=True)
    killer.start()
    trainer.fit()
    ray.shutdown()


def kill_ranks(trainer: Any, kills: int, rng: random.Random) -> None:
    """Each one a while after training has gone on from the one before."""
    for generation in range(1, kills + 1):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not in_training(trainer, generation):
            if time.monotonic() > deadline:
                raise TimeoutError(f"generation {generation} did not train")
            time.sleep(POLL_SECONDS)
        time.sleep(rng.uniform(0, 2 * STEPS_BETWEEN_KILLS * STEP_SECONDS))
        os.kill(trainer.status()["ranks"][rng.randrange(2)]["pid"], signal.SIGKILL)


def in_training(trainer: Any, generation: int) -> bool:
    path = trainer.run_dir / LEDGER_FILE
    entries = read_ledger(path) if path.exists() else []
    first = {one["rank"] for one in entries if one["kind"] == "first_step" and one["generation"] == generation}
    return len(first) == 2


def beside_real(kills: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lgs-") as storage:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        command = [sys.executable, __file__, "--in", storage, "--kills", str(kills), "--seed", str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"the run failed:\n{done.stderr.decode()[-3000:]}")
        ledger = Path(storage) / "run" / "ledger.jsonl"
        entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    return compare_with(entries, STEPS_BETWEEN_KILLS * (kills + 1), seed)


def compare_with(entries: list[dict[str, Any]], steps: int, seed: int) -> dict[str, Any]:
    costs = run_costs(entries)
    step_seconds = costs.step_seconds or STEP_SECONDS
    began = max(one["at_step"] for one in entries if one["kind"] == "first_step" and one["generation"] == 1)
    began -= step_seconds
    struck = [one["failed_at"] - began for one in entries if one["kind"] == "failure"]
    ended = next(one["at"] for one in entries if one["kind"] == "finished")
    gaps = tuple(at - before for before, at in zip([0.0, *struck], struck, strict=False))
    nothing = Cost()
    job = with_costs_seen(
        Job(durable=SaveCosts(stall=nothing), step_seconds=step_seconds, work_seconds=steps * step_seconds), costs
    )
    source = Failures(source=Trace(seconds_since_previous_failure=gaps))
    outcome = simulate(job, failures([source], seed), Every(SAVE_EVERY * step_seconds), seed)
    lost = [one for one in entries if one["kind"] in ("failure", "generation")]
    replayed = sum(
        max(0, fail["step"] - then["restored_step"])
        for fail, then in itertools.pairwise(lost)
        if fail["kind"] == "failure" and then["kind"] == "generation"
    )
    real = steps * step_seconds / (ended - began)
    return {
        "failures": len(struck),
        "step_seconds": step_seconds,
        "restart_seconds": statistics.median([one for some in costs.restart_seconds.values() for one in some]),
        "wall_seconds_real": ended - began,
        "wall_seconds_simulated": outcome.wall_seconds,
        "replayed_steps_real": replayed,
        "replayed_steps_simulated": outcome.badput_seconds["lost"] / step_seconds,
        "saves_real": len(costs.stall_seconds),
        "saves_simulated": outcome.saves["durable"],
        "goodput_real": real,
        "goodput_simulated": outcome.goodput_ratio,
        "goodput_difference": outcome.goodput_ratio / real - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in", dest="storage", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.storage:
        real_run(options.storage, options.kills, options.seed)
        return
    if options.real:
        found = beside_real(options.kills, options.seed)
    else:
        with Progress(console=Console(file=sys.stderr), transient=True) as progress:
            task = progress.add_task("seeds", total=options.seeds)
            found = speed(options.seeds, lambda done: progress.advance(task, done))
    if options.json:
        print(json.dumps(found))
        return
    table = Table("what", "found")
    for name, value in found.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
