"""How a rank ends at a step whose loss or gradient norm is bad.

Invariant: nothing of that step or a later one is saved by this rank, and what not all ranks have saved is never
committed; so the newest checkpoint is from before it.

The process ends right here rather than by an exception: no `except` or `finally` of the loop can swallow it, save in
spite of it, or wait in a collective for peers that are about to be killed.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from workers.data.course import SKIPPED_MAX, BatchId
from workers.data.loader import ShardedLoader
from workers.errors import CallerError, TrainingDiverged
from workers.loss_guard import BadValue, LossGuard
from workers.wire import Channel

_FRAMES_MAX = 10
_NAMED_MAX = 16


def judge(guard: LossGuard, values: Mapping[str, float | None], *, gradients_are_scaled: bool) -> BadValue | None:
    """What is bad about a step, None if nothing is; raises CallerError for a value that is no number."""
    given = {what: _as_number(what, value) for what, value in values.items() if value is not None}
    return guard.judge(given, may_overflow=("grad_norm",) if gradients_are_scaled else ())


def end_rank(bad: BadValue, *, agent: Channel, rank: int, step: int, loader: ShardedLoader | None) -> NoReturn:
    """Tell the agent what is bad and end the process. To be called by `end_step` itself."""
    at = time.time()
    batches = loader.batches_in_use() if loader is not None else []
    message = f"{bad} in step {step} on rank {rank}, which used {_described(batches, loader)}"
    stack = traceback.format_list(_users_frames(traceback.extract_stack()[:-2]))
    name = TrainingDiverged.__name__
    text = "".join(["Traceback (most recent call last):\n", *stack, f"{name}: {message}\n"])
    sys.stderr.write(text)
    with contextlib.suppress(OSError):  # the agent is gone, and this process is killed with it
        agent.send(
            "error",
            type=name,
            message=message,
            traceback=text,
            at=at,
            exit_code=TrainingDiverged.exit_code,
            cause="loss",
            detail={
                "step": step,
                "what": bad.what,
                "value": bad.value,
                "limit": bad.limit,
                # One more than may be skipped says that all of them are too many.
                "batches": batches[: SKIPPED_MAX + 1],
            },
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _as_number(name: str, value: Any) -> float:
    if not all(placement.is_replicate() for placement in getattr(value, "placements", ())):
        raise CallerError(
            f"session.end_step({name}=...) was given a tensor of which this rank holds a part; pass "
            f"{name}.full_tensor().item()"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CallerError(f"session.end_step({name}={value!r}): it has to be a number") from None


def _users_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The last of the frames, from where lastgood called the loop."""
    own = [number for number, frame in enumerate(frames) if Path(frame.filename).parent == Path(__file__).parent]
    return list(frames[own[-1] + 1 if own else 0 :][-_FRAMES_MAX:])


def _described(batches: Sequence[BatchId], loader: ShardedLoader | None) -> str:
    if not batches or loader is None:
        return "no batch of session.data_loader"
    named = [f"batch {batch} of epoch {epoch}" for epoch, batch in batches]
    samples = [sample for epoch, batch in batches[:_NAMED_MAX] for sample in loader.order.batch_ids(epoch, batch)]
    return f"{_shortened(named)} (on this rank: samples {_shortened(samples)})"


def _shortened(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:_NAMED_MAX])) + (", ..." if len(items) > _NAMED_MAX else "")
