"""How fast each kind of failure is noticed and repaired: the numbers in the README's table.

    python tests/benchmarks/failures.py [--runs 3] [--only hang-sleep,killed] [--json]

Two ranks with one loader worker each train a small model under DDP. Rank 1 notes the time, and then does to itself what
the kind says, once. Noticed is when the coordinator knew, repaired when both ranks have finished their first new step.
Medians over the runs.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FEATURES = 64
AT = 40
STEPS = 80


def sleep(_: Any) -> None:
    time.sleep(3600)


def spin(_: Any) -> None:
    while True:
        pass


def fail(_: Any) -> None:
    raise ValueError("for the benchmark")


def flip_a_bit(model: Any) -> None:
    import torch

    next(model.parameters()).data.view(torch.int32)[0, 0] ^= 1 << 20


def signal_agent(number: int) -> None:
    """This rank's parent is the zygote, and that one's is Ray's worker."""
    import psutil

    os.kill(psutil.Process().parent().parent().pid, number)


KINDS: dict[str, Callable[[Any], Any]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exception": fail,
    "crash": lambda _: ctypes.string_at(0),
    "hang-sleep": sleep,
    "hang-spin": spin,
    "hang-stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang-loader": lambda _: None,
    "loss-nan": lambda _: None,
    "corruption": flip_a_bit,
    "sigterm-rank": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm-worker": lambda _: signal_agent(signal.SIGTERM),
    "worker-killed": lambda _: signal_agent(signal.SIGKILL),
}


class Samples:
    """`stuck_at`: a batch whose first sample never comes."""

    def __init__(self, stuck: Path | None) -> None:
        self.stuck = stuck
        self.served = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        import torch

        self.served += 1
        if self.stuck is not None and self.served > 8 * AT:
            note(self.stuck)
            threading.Event().wait()
        return torch.full((FEATURES,), float(index % 97) / 97)


def note(path: Path) -> None:
    path.write_text(str(time.time()), encoding="ascii")


def loop(config: dict[str, Any]) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import workers

    session = workers.get_session()
    kind, marker = config["kind"], Path(config["marker"])
    mine = session.rank == 1 and session.generation == 1
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(FEATURES, FEATURES) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Samples(marker if mine and kind == "hang-loader" else None)
    data = session.data_loader(samples, global_batch_size=16, seed=0, num_workers=1)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=data)
    session.restore()
    for batch in data:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        strikes = mine and session.step == AT and kind != "hang-loader"
        if strikes:
            note(marker)
            KINDS[kind](model)
        session.end_step(loss=float("nan") if strikes and kind == "loss-nan" else loss.item())
        time.sleep(0.02)
        if session.step >= STEPS:
            break


def measure(kind: str, storage: Path) -> tuple[float, float]:
    """(seconds until noticed, seconds until both ranks have finished a new step)"""
    from ray.train import RunConfig, ScalingConfig

    from orchestrator import RecoveryConfig, SupervisedTrainer
    from orchestrator.observe.ledger import read_ledger

    name = f"{kind}-{len(list(storage.iterdir()))}"
    marker = storage / f"{name}.at"
    SupervisedTrainer(
        loop,
        train_loop_config={"kind": kind, "marker": str(marker)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(storage)),
        recovery=RecoveryConfig(cadence=10, on_bad_loss="rollback"),
    ).fit()
    struck = float(marker.read_text(encoding="ascii"))
    entries = read_ledger(storage / name / "ledger.jsonl")
    first = next(entry for entry in entries if entry["kind"] in ("failure", "notice"))
    noticed = first["noticed_at"] if first["kind"] == "failure" else first["at"]
    steps = [entry["at_step"] for entry in entries if entry["kind"] == "first_step" and entry["generation"] == 2]
    assert len(steps) == 2, f"{kind}: the second generation did not train"
    return noticed - struck, max(steps) - struck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="kinds, separated by commas")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to standard output too
    import ray

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="lg-bench-", ignore_cleanup_errors=True) as directory:
        ray.init(num_cpus=2, _temp_dir=f"{directory}/ray", include_dashboard=False, log_to_driver=False)
        storage = Path(directory) / "runs"
        storage.mkdir()
        try:
            for kind in kinds:
                noticed, repaired = zip(*(measure(kind, storage) for _ in range(args.runs)), strict=True)
                found[kind] = {
                    "noticed_seconds_median": statistics.median(noticed),
                    "repaired_seconds_median": statistics.median(repaired),
                }
                print(f"{kind}: noticed {sorted(noticed)}, repaired {sorted(repaired)}", file=sys.stderr)
        finally:
            ray.shutdown()
    if args.json:
        print(json.dumps({"runs": args.runs, "kinds": found}), file=out)
    else:
        print(f"{'kind':<16} {'noticed s':>10} {'repaired s':>11}   medians of {args.runs}", file=out)
        for kind, values in found.items():
            noticed_s, repaired_s = values["noticed_seconds_median"], values["repaired_seconds_median"]
            print(f"{kind:<16} {noticed_s:>10.2f} {repaired_s:>11.2f}", file=out)


if __name__ == "__main__":
    main()
