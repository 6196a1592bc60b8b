"""What a snapshot costs for each tensor, beside its bytes: looking the state up, its document, and the copy.

    python tests/benchmarks/planning.py [--tensors 800 80000] [--rounds 9] [--json]

A model of small linear layers with AdamW, so many tensors with the optimizer's state. Each phase is the fastest of so
many rounds in which nothing but values has changed; "first" is the round before, in which all is planned. `boundary` is
for how long the loop stands still; `copy` is the part that runs beside its next step.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from workers.checkpoint import image
from workers.checkpoint.document import to_bytes
from workers.checkpoint.slots import Slot
from workers.checkpoint.tensors import CapturedState
from workers.overlap import Copier
from workers.state.identity import Identity
from workers.state.training import Progress, TrainingState
from workers.streams import HostStream

TENSORS_EACH = 4  # a parameter, its two moments and its step count
STEP_SECONDS = 0.3
PROGRESS = Progress(step=1, epoch=0, samples=0, tokens=0, training_seconds=0.0)


def build(tensors: int) -> TrainingState:
    layers = [nn.Linear(4, 4) for _ in range(tensors // TENSORS_EACH // 2)]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = TrainingState(0, 1)
    state.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    return state


def measure(tensors: int, rounds: int) -> dict[str, Any]:
    state, identity = build(tensors), Identity({})
    copier = Copier(HostStream(), lambda: None)
    layout: image.ImageLayout | None = None
    slot: Slot | None = None
    found: dict[str, list[float]] = {name: [] for name in ("capture", "document", "check", "begin", "copy", "boundary")}

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = work(*arguments)
        found[name].append(time.perf_counter() - began)
        return result

    def begin(captured: CapturedState, document: bytes) -> None:
        assert layout is not None and slot is not None
        nothing = {"before_group": lambda *_: None, "done": lambda _: None}
        copier.begin(layout, captured, document, slot, began_at=time.monotonic(), beside=True, **nothing)

    for number in range(rounds + 1):
        began = time.perf_counter()
        captured = timed("capture", partial(state.capture, turn=0), PROGRESS, identity)
        document = timed("document", to_bytes, captured.whole_document())
        if layout is None or slot is None:
            layout = image.plan(captured.tensors, captured.whole_document())
            slot = Slot.create(layout.image_bytes)
        assert timed("check", layout.fits, captured.tensors, document)
        slot.begin(rank=0, generation=1, step=number)
        timed("begin", begin, captured, document)
        found["boundary"].append(time.perf_counter() - began)
        timed("copy", copier.settle)
        slot.release()
    copier.close()
    count = len(captured.tensors)
    assert slot is not None
    copier.forget(slot)
    slot.close()
    per_tensor = {f"{name}_microseconds": 1e6 * min(times[-rounds:]) / count for name, times in found.items()}
    first = {"first_microseconds": 1e6 * found["boundary"][0] / count}
    return {"tensors": count, **per_tensor, **first, "part_of_step": min(found["boundary"][1:]) / STEP_SECONDS}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a snapshot costs for each tensor.")
    parser.add_argument("--tensors", type=int, nargs="+", default=[800, 80_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(tensors, options.rounds) for tensors in options.tensors]
    if options.json:
        print(json.dumps({"rounds": options.rounds, "results": found}))
        return
    phases = [name for name in found[0] if name.endswith("_microseconds")]
    table = Table("tensors", *(name.removesuffix("_microseconds") for name in phases), f"of a {STEP_SECONDS} s step")
    for one in found:
        table.add_row(str(one["tensors"]), *(f"{one[name]:.2f}" for name in phases), f"{one['part_of_step']:.1%}")
    Console().print("Microseconds for each tensor.", table)


if __name__ == "__main__":
    main()
