"""Faults that strike from within the user's loop: an exception, exit(0), a loss or gradient that is not a number.

The loop is wrapped: its rank then obeys orders, each a file named after its pid, when it gets SIGUSR2. The handler runs
between any two instructions of the main thread, so the order strikes at a random point of the user's own code.
"""

import functools
import inspect
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from chaos.faults.fault import Fault, Injected, Target
from chaos.faults.processes import find_rank
from workers.failpoint import InjectedError

ORDERS_DIR = "faults/orders"
_SIGNAL = signal.SIGUSR2


def obeying(loop: Callable[..., None], run_dir: Path) -> Callable[..., None]:
    """The same loop, in a rank that obeys orders from `run_dir`."""
    orders = str(run_dir / ORDERS_DIR)

    @functools.wraps(loop)
    def obedient(config: dict[str, Any] | None = None) -> None:
        from chaos.faults.inside import obey

        obey(orders)
        if inspect.signature(loop).parameters:
            loop(config)
        else:
            loop()

    return obedient


def obey(orders: str) -> None:
    """From now on this process does what it is told."""
    from workers.session import Session

    bad: list[str] = []
    end_step = Session.end_step

    def handle(number: int, frame: FrameType | None) -> None:
        order = Path(orders, str(os.getpid())).read_text(encoding="utf-8")
        match order:
            case "exception":
                raise InjectedError("injected into the loop")
            case "exit":
                os._exit(0)
            case "loss" | "grad_norm":
                bad.append(order)

    @functools.wraps(end_step)
    def end_step_with_bad_value(session: Session, **values: Any) -> None:
        if bad:
            values[bad.pop()] = math.nan
        end_step(session, **values)

    Session.end_step = end_step_with_bad_value  # type: ignore[method-assign,assignment]
    signal.signal(_SIGNAL, handle)


def _ordering(order: str) -> Callable[[Target, random.Random], Injected | None]:
    def inject(target: Target, rng: random.Random) -> Injected | None:
        found = find_rank(target, rng)
        if found is None:
            return None
        pid, context = found
        if not _obeys(pid):
            return None  # it has not come to its loop yet, and the signal would only kill it
        folder = target.run_dir / ORDERS_DIR
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(pid)).write_text(order, encoding="utf-8")
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:
            return None
        return Injected(context={**context, "order": order})

    return inject


def _obeys(pid: int) -> bool:
    """Whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


INSIDE_FAULTS = (
    Fault(name="raise", description="the loop raises an exception at a random point", inject=_ordering("exception")),
    Fault(name="exit_zero", description="the rank calls exit(0) in the middle of the run", inject=_ordering("exit")),
    Fault(
        name="nan_loss",
        description="a step's loss is not a number",
        needs='recovery.on_bad_loss: "rollback", and exact: false, since batches are passed over',
        inject=_ordering("loss"),
    ),
    Fault(
        name="nan_gradient",
        description="a step's gradient norm is not a number",
        needs='recovery.on_bad_loss: "rollback", and exact: false, since batches are passed over',
        inject=_ordering("grad_norm"),
    ),
)
