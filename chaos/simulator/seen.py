"""What saves and restarts took in a real run, or what the user says of them, in place of what a scenario says."""

from collections.abc import Sequence
from dataclasses import replace

from chaos.simulator.draws import Cost
from chaos.simulator.job import Job, SaveCosts
from orchestrator.observe.costs import RunCosts


def with_costs_seen(job: Job, costs: RunCosts) -> Job:
    """With the times that a run's ledger has; where it has none, as before. Snapshots in memory are simulated if the
    run was restored from them."""
    durable = replace(
        job.durable,
        stall=_seen(costs.stall_seconds, job.durable.stall),
        interference=_seen(costs.interference_seconds, job.durable.interference),
        durable=_seen(costs.durable_seconds, job.durable.durable),
        restart=_seen(costs.restarts_from("checkpoint"), job.durable.restart),
    )
    memory = job.memory
    if "memory" in costs.restart_seconds:
        before = memory if memory is not None else SaveCosts(stall=durable.stall)
        memory = replace(
            before,
            stall=_seen(costs.stall_seconds, before.stall),
            durable=_seen(costs.copied_seconds, before.durable),
            restart=_seen(costs.restart_seconds["memory"], before.restart),
        )
    return replace(
        job,
        durable=durable,
        memory=memory,
        step_seconds=costs.step_seconds or job.step_seconds,
        state_bytes=costs.bytes or job.state_bytes,
    )


def with_costs_given(
    job: Job, *, stall: float | None, durable: float | None, restart: float | None, step: float | None
) -> Job:
    """With what the user gave, in seconds; restarts also of those from memory."""
    given = {"stall": stall, "durable": durable, "restart": restart}
    changed = {name: Cost(mean_seconds=seconds) for name, seconds in given.items() if seconds is not None}
    memory = job.memory
    if memory is not None and restart is not None:
        memory = replace(memory, restart=changed["restart"])
    return replace(
        job,
        durable=replace(job.durable, **changed),
        memory=memory,
        step_seconds=step if step is not None else job.step_seconds,
    )


def _seen(samples: Sequence[float], otherwise: Cost) -> Cost:
    return Cost(seen=tuple(samples)) if samples else otherwise
