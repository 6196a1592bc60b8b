"""From a killed rank to training again: lastgood beside stock Ray Train, the same training, in one run.

    python tests/benchmarks/recovery.py [--kills 50] [--stock-kills 5] [--agent-kills 3] [--json]

Two ranks with two loader workers each train a model of a few MB under FSDP2. Each arm runs in a process and a Ray of
its own, one after the other. A rank kills itself with SIGKILL and notes when; recovered is when the last rank has
finished its first new step.

- detect: until lastgood's coordinator knows of the death. - recovery: lastgood's ranks are replaced, Ray's workers
stay. - agent: Ray's worker itself is killed, and Ray replaces the group. - stock: `TorchTrainer` with
`FailureConfig(max_failures=-1)` and its own checkpoints, at Ray's default poll interval, and at 0.1 s.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FEATURES = 256
SAVE_EVERY = 10
KILL_EVERY = 15


class Samples:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((FEATURES,), float(index % 97))


def build(rank: int) -> tuple[Any, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(FEATURES, FEATURES) for _ in range(6)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(1 + rank)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: Any, optimizer: Any, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- lastgood


def lastgood_loop(config: dict[str, Any]) -> None:
    import workers

    session = workers.get_session()
    model, optimizer = build(session.rank)
    data = session.data_loader(Samples(), global_batch_size=32, num_workers=2)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=data)
    session.restore()
    for batch in data:
        train_step(model, optimizer, batch)
        session.end_step()
        if session.step >= config["steps"]:
            break


def lastgood_arm(storage: Path, kills: int) -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig

    from orchestrator import RecoveryConfig, SupervisedTrainer
    from orchestrator.observe.ledger import read_ledger
    from workers.failpoint import Arm

    arms = tuple(
        Arm(id=f"kill-{number:03d}", point="step.end", when={"rank": number % 2, "step": KILL_EVERY * (number + 1)})
        for number in range(kills)
    )
    trainer = SupervisedTrainer(
        lastgood_loop,
        train_loop_config={"steps": KILL_EVERY * (kills + 1)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="recovery", storage_path=str(storage)),
        recovery=RecoveryConfig(cadence=SAVE_EVERY, failpoints=arms),
    )
    result = trainer.fit()
    entries = read_ledger(result.ledger)
    first_steps: dict[int, float] = {}
    for entry in entries:
        if entry["kind"] == "first_step":
            generation = entry["generation"]
            first_steps[generation] = max(entry["at_step"], first_steps.get(generation, 0.0))
    detect, recovery = [], []
    for number, entry in enumerate(one for one in entries if one["kind"] == "failure"):
        killed_at = json.loads((result.run_dir / "faults" / f"kill-{number:03d}.json").read_text())["at"]
        detect.append(entry["noticed_at"] - killed_at)
        recovery.append(first_steps[entry["generation"] + 1] - killed_at)
    return {"detect": detect, "recovery": recovery}


def agent_arm(storage: Path, kills: int) -> dict[str, Any]:
    import threading

    from ray.train import RunConfig, ScalingConfig

    from orchestrator import RecoveryConfig, SupervisedTrainer
    from orchestrator.observe.ledger import read_ledger

    trainer = SupervisedTrainer(
        lastgood_loop,
        train_loop_config={"steps": 10**9},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="agents", storage_path=str(storage)),
        recovery=RecoveryConfig(cadence=100),
    )
    threading.Thread(target=trainer.fit, daemon=True).start()
    recovery = []
    for number in range(kills):
        status = wait_for_training(trainer, number + 1)
        killed_at = time.time()
        os.kill(status["ranks"][1]["agent_pid"], signal.SIGKILL)
        wait_for_training(trainer, number + 2)
        steps = [
            entry["at_step"]
            for entry in read_ledger(trainer.run_dir / "ledger.jsonl")
            if entry["kind"] == "first_step" and entry["generation"] == number + 2
        ]
        recovery.append(max(steps) - killed_at)
    return {"recovery": recovery}


def wait_for_training(trainer: Any, generation: int) -> dict[str, Any]:
    """The status once all ranks of that generation have finished a step and something is saved."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status: dict[str, Any] = trainer.status()
        ranks = status.get("ranks", [])
        training = ranks and status["generation"] >= generation and all(rank["step"] > 0 for rank in ranks)
        if training and status["committed_step"] is not None:
            return status
        time.sleep(0.05)
    raise TimeoutError(f"generation {generation} did not train")


# ---------------------------------------------------------------- stock Ray Train


def stock_loop(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    context = ray.train.get_context()
    rank = context.get_world_rank()
    model, optimizer = build(rank)
    log = Path(config["log"])
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory) / f"rank-{rank}.pt", weights_only=False)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        step = saved["step"]
    loader = torch.utils.data.DataLoader(Samples(), batch_size=16, num_workers=2)
    first = True
    for batch in loader:
        train_step(model, optimizer, batch)
        step += 1
        if first:
            note(log, {"first_step": step, "rank": rank, "at": time.time()})
            first = False
        if step % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                weights, moments = get_state_dict(model, optimizer)
                torch.save({"model": weights, "optimizer": moments, "step": step}, Path(directory) / f"rank-{rank}.pt")
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint(directory))
        number = step // KILL_EVERY
        if step % KILL_EVERY == 0 and number <= config["kills"] and number % 2 == rank:
            try:
                (log.parent / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                note(log, {"killed": number, "at": time.time()})
                os.kill(os.getpid(), signal.SIGKILL)
        if step >= KILL_EVERY * (config["kills"] + 1):
            return


def note(log: Path, entry: dict[str, Any]) -> None:
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def stock_arm(storage: Path, kills: int) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    log = storage / "log.jsonl"
    TorchTrainer(
        stock_loop,
        train_loop_config={"log": str(log), "kills": kills},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="stock", storage_path=str(storage), failure_config=FailureConfig(max_failures=-1)),
    ).fit()
    recovery, killed_at, seen = [], None, {}
    for entry in map(json.loads, log.read_text().splitlines()):
        if "killed" in entry:
            killed_at, seen = entry["at"], {}
        elif killed_at is not None:
            seen[entry["rank"]] = entry["at"]
            if len(seen) == 2:
                recovery.append(max(seen.values()) - killed_at)
                killed_at = None
    return {"recovery": recovery}


# ---------------------------------------------------------------- the table


def run_arm(name: str, kills: int, poll_seconds: float | None = None) -> dict[str, Any]:
    """One arm in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    if poll_seconds is not None:
        environment["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(poll_seconds)
    with tempfile.TemporaryDirectory(prefix="lg-bench-") as storage:
        command = [sys.executable, __file__, "--arm", name, "--storage", storage, "--kills", str(kills)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{name} failed:\n{done.stderr.decode()[-3000:]}")
        return dict(json.loads((Path(storage) / "result.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stock-kills", type=int, default=5)
    parser.add_argument("--agent-kills", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", choices=("lastgood", "agent", "stock"), help=argparse.SUPPRESS)
    parser.add_argument("--storage", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        import ray

        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        arm = {"lastgood": lastgood_arm, "agent": agent_arm, "stock": stock_arm}[options.arm]
        (options.storage / "result.json").write_text(json.dumps(arm(options.storage, options.kills)))
        os._exit(0)  # the agents' run has no end of its own; Ray's processes die with this one
    lastgood = run_arm("lastgood", options.kills)
    agent = run_arm("agent", options.agent_kills)
    stock = run_arm("stock", options.stock_kills)
    fast = run_arm("stock", options.stock_kills, poll_seconds=0.1)
    result = {
        "detect_seconds_p99": statistics.quantiles(lastgood["detect"], n=100)[98],
        "recovery_seconds_median": statistics.median(lastgood["recovery"]),
        "recovery_seconds_max": max(lastgood["recovery"]),
        "agent_recovery_seconds_median": statistics.median(agent["recovery"]),
        "stock_seconds_median": statistics.median(stock["recovery"]),
        "stock_fast_poll_seconds_median": statistics.median(fast["recovery"]),
        "kills": {
            "lastgood": len(lastgood["recovery"]),
            "agent": len(agent["recovery"]),
            "stock": len(stock["recovery"]),
        },
    }
    result["stock_ratio"] = result["stock_seconds_median"] / result["recovery_seconds_median"]
    result["stock_fast_poll_ratio"] = result["stock_fast_poll_seconds_median"] / result["recovery_seconds_median"]
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:34} {value if isinstance(value, dict) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
