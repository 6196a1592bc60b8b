"""One examination: everything that is measured, one after the other, so that nothing disturbs what is timed."""

from collections.abc import Callable
from pathlib import Path

from orchestrator.doctor.facts import Facts, MemorySpeeds
from orchestrator.doctor.machine import ClockWatch, look_at_machine
from orchestrator.doctor.software import look_at_software
from orchestrator.doctor.speed import measure_memory, random_memory
from orchestrator.doctor.storage import look_at_storage
from orchestrator.doctor.tracing import try_tracing
from workers.errors import EnvironmentProblem

ROUNDS = 5


def examine(storage: Path, *, sample_bytes: int, tell: Callable[[str], None]) -> Facts:
    """Takes 10 to 60 s, and `sample_bytes` of storage and three times of memory at once; `tell` hears what is next."""
    clock = ClockWatch()
    tell("the machine")
    machine = look_at_machine()
    memory: MemorySpeeds | None = None
    problem = ""
    with random_memory(sample_bytes) as data:
        tell("how fast memory is")
        try:
            memory = measure_memory(data, available_bytes=machine.memory_available_bytes, rounds=ROUNDS)
        except EnvironmentProblem as error:
            problem = str(error)
        found = look_at_storage(storage, data, rounds=ROUNDS, tell=tell)
    tell("whether stacks can be taken")
    tracing = try_tracing()
    tell("whether torch and Ray import")
    software = look_at_software()
    return Facts(
        machine=machine,
        memory=memory,
        memory_problem=problem,
        storage=found,
        clock=clock.look(),
        tracing=tracing,
        software=software,
    )
