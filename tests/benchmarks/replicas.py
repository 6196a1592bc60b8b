"""What comparing replicas costs: the stall of a snapshot with the check and without, in one run.

    python tests/benchmarks/replicas.py [--replicated-mib 64 256 1024] [--saves 30] [--json]

Two ranks hold the same parameters and optimizer state under DDP, in tensors of 2 MiB, as much as is said each. At the
same moment both capture their state and copy their half of it into a snapshot slot, all at once, as for a save that the
loop waits for. Saves with and without the check alternate. A save digests up to 256 MiB, however much there is.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.checkpoint import image
from workers.checkpoint.slots import Slot
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState

ROW = 512  # a tensor is 1024 rows of 512 float32: 2 MiB
ADAM_COPIES = 3  # the parameter and two moments


def build(replicated_mib: int) -> TrainingState:
    layers = [nn.Linear(ROW, 2 * ROW, bias=False) for _ in range(max(1, replicated_mib // (2 * ADAM_COPIES)))]
    model = DistributedDataParallel(nn.ModuleList(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = TrainingState(dist.get_rank(), 2)
    state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    return state


def stalls(state: TrainingState, saves: int) -> dict[str, list[float]]:
    progress = Progress(step=1, epoch=0, samples=0, tokens=0, training_seconds=0.0)
    identity = Identity({})
    first = state.capture(progress, identity, turn=0)
    layout = image.plan(first.tensors, first.whole_document())
    slot = Slot.create(layout.image_bytes)
    measured: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * saves + 2):
        arm = "with" if number % 2 else "without"
        dist.barrier()
        began = time.perf_counter()
        captured = state.capture(progress, identity, turn=number // 2 if arm == "with" else None)
        slot.begin(rank=dist.get_rank(), generation=1, step=number)
        if captured.digests is not None:
            captured.digests.take(lambda name: True)
        slot.complete(layout.write(slot.image, captured.tensors, captured.whole_document()))
        if number >= 2:  # the first of each arm touches memory for the first time
            measured[arm].append(time.perf_counter() - began)
        slot.release()
    slot.close()
    return measured


def run_rank(rank: int, directory: str, sizes_mib: list[int], saves: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    found = []
    for size in sizes_mib:
        measured = stalls(build(size), saves)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, measured)
        # The loop goes on when the slower rank does.
        slower = {arm: [max(pair) for pair in zip(both[0][arm], both[1][arm], strict=True)] for arm in measured}
        without, checked = (statistics.median(slower[arm]) for arm in ("without", "with"))
        found.append(
            {
                "replicated_mib": size,
                "stall_seconds_median_without": without,
                "stall_seconds_median_with": checked,
                "stall_seconds_max_with": max(slower["with"]),
                "ratio": checked / without,
            }
        )
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps(found))
    os._exit(0)  # torch, with DDP on gloo, now and then aborts while the interpreter shuts down


def main() -> None:
    parser = argparse.ArgumentParser(description="What comparing replicas costs.")
    parser.add_argument("--replicated-mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, args=(directory, options.replicated_mib, options.saves), nprocs=2)
        found = json.loads(Path(directory, "found.json").read_text())
    if options.json:
        print(json.dumps({"saves": options.saves, "results": found}))
        return
    table = Table("replicated MiB", "stall without, ms", "stall with, ms", "ratio", "slowest with, ms")
    for one in found:
        milliseconds = [1000 * one[f"stall_seconds_{name}"] for name in ("median_without", "median_with", "max_with")]
        without, checked, slowest = (f"{value:.1f}" for value in milliseconds)
        table.add_row(str(one["replicated_mib"]), without, checked, f"{one['ratio']:.2f}", slowest)
    Console().print(table)


if __name__ == "__main__":
    main()
