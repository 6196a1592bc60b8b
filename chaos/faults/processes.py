"""Processes that die, stop for a while, or are told to end."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import psutil

from chaos.faults.fault import Fault, Injected, Target

Find = Callable[[Target, random.Random], tuple[int, dict[str, Any]] | None]
"""A victim's pid, and what else its marker says; None if there is none now."""


def find_rank(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    status = target.status()
    ranks = [rank for rank in status.get("ranks", ()) if rank["pid"] is not None]
    if not ranks:
        return None
    victim = rng.choice(ranks)
    context = {key: status[key] for key in ("generation", "step")}
    return victim["pid"], {"rank": victim["rank"], "rank_pid": victim["pid"], **context}


def _agent(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    status = target.status()
    if not status.get("ranks"):
        return None
    victim = rng.choice(status["ranks"])
    return victim["agent_pid"], {"rank": victim["rank"], "generation": status["generation"]}


def _zygote(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    found = _agent(target, rng)
    if found is None:
        return None
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(found[0]).children():
            if "workers.zygote" in child.cmdline():
                return child.pid, found[1]
    return None


def _loader_worker(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    found = find_rank(target, rng)
    if found is None:
        return None
    with contextlib.suppress(psutil.Error):
        if children := psutil.Process(found[0]).children():
            return rng.choice(children).pid, found[1]
    return None


def _keeper(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    status = target.status()
    if not status.get("keepers"):
        return None
    keeper = rng.choice(status["keepers"])
    return keeper["pid"], {"node": keeper["node_id"], "generation": status["generation"]}


def _coordinator(target: Target, rng: random.Random) -> tuple[int, dict[str, Any]] | None:
    entry = target.newest("coordinator")
    return None if entry is None else (entry["pid"], {})


def _sending(find: Find, number: signal.Signals) -> Callable[[Target, random.Random], Injected | None]:
    def inject(target: Target, rng: random.Random) -> Injected | None:
        found = find(target, rng)
        if found is None:
            return None
        pid, context = found
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return Injected(context={**context, "victim_pid": pid, "signal": number.name})

    return inject


def _kill_rank_and_keeper(target: Target, rng: random.Random) -> Injected | None:
    """Both hold that rank's snapshots, and no one else does."""
    status = target.status()
    rank, keepers = find_rank(target, rng), status.get("keepers", ())
    if rank is None or not keepers:
        return None
    pid, context = rank
    node = next(one["node_id"] for one in status["ranks"] if one["rank"] == context["rank"])
    victims = [pid, *(keeper["pid"] for keeper in keepers if keeper["node_id"] == node)]
    struck = False
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            struck = True
    return Injected(context={**context, "victim_pids": victims, "signal": "SIGKILL"}) if struck else None


def _stopping(find: Find) -> Callable[[Target, random.Random], Injected | None]:
    """SIGSTOP, and SIGCONT at the end, unless the process was replaced meanwhile."""

    def inject(target: Target, rng: random.Random) -> Injected | None:
        found = find(target, rng)
        if found is None:
            return None
        pid, context = found
        try:
            process = psutil.Process(pid)
            process.suspend()
        except psutil.NoSuchProcess:
            return None

        def release() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

        return Injected(context={**context, "victim_pid": pid, "signal": "SIGSTOP"}, release=release)

    return inject


PROCESS_FAULTS = (
    Fault(name="kill_rank", description="SIGKILL to a rank", inject=_sending(find_rank, signal.SIGKILL)),
    Fault(
        name="crash_rank",
        description="SIGSEGV to a rank, as native code that crashes",
        inject=_sending(find_rank, signal.SIGSEGV),
    ),
    Fault(
        name="terminate_rank",
        description="SIGTERM to a rank, a notice that it will be taken away",
        inject=_sending(find_rank, signal.SIGTERM),
    ),
    Fault(name="stop_rank", description="SIGSTOP to a rank, SIGCONT after a while", inject=_stopping(find_rank)),
    Fault(name="kill_agent", description="SIGKILL to Ray's worker of a rank", inject=_sending(_agent, signal.SIGKILL)),
    Fault(
        name="stop_agent",
        description="SIGSTOP to Ray's worker of a rank, SIGCONT after a while",
        inject=_stopping(_agent),
    ),
    Fault(
        name="kill_zygote",
        description="SIGKILL to a zygote, and so to its ranks",
        inject=_sending(_zygote, signal.SIGKILL),
    ),
    Fault(
        name="kill_loader_worker",
        description="SIGKILL to a data loader's worker",
        needs="loader workers (job.loader_workers)",
        inject=_sending(_loader_worker, signal.SIGKILL),
    ),
    Fault(
        name="kill_rank_and_keeper",
        description="SIGKILL to a rank and its node's keeper at once: nothing of it is left in memory",
        inject=_kill_rank_and_keeper,
    ),
    Fault(name="kill_keeper", description="SIGKILL to a node's keeper", inject=_sending(_keeper, signal.SIGKILL)),
    Fault(
        name="stop_keeper", description="SIGSTOP to a node's keeper, SIGCONT after a while", inject=_stopping(_keeper)
    ),
    Fault(
        name="kill_coordinator", description="SIGKILL to the coordinator", inject=_sending(_coordinator, signal.SIGKILL)
    ),
    Fault(
        name="stop_coordinator",
        description="SIGSTOP to the coordinator, SIGCONT after a while: all that it hears and says is late",
        inject=_stopping(_coordinator),
    ),
)
