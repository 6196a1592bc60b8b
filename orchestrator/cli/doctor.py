"""`lastgood doctor`: what this machine and a storage can do for a run, what is wrong, and what saves will cost.

Measures for real, so it takes from ten seconds to a minute, and writes files of its own below the storage, which it
removes again, also when it is interrupted or told to end.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orchestrator.cli.signals import ended_by_signals
from orchestrator.doctor import report
from orchestrator.doctor.examine import examine
from orchestrator.doctor.expect import Expectation, Scale, Speeds, expect
from orchestrator.doctor.facts import Facts
from orchestrator.doctor.findings import Finding, judge_machine
from orchestrator.doctor.findings_storage import judge_scale, judge_storage
from orchestrator.doctor.sizes import parse_size
from workers.checkpoint.header import PAGE_BYTES
from workers.errors import CallerError, EnvironmentProblem

JSON_VERSION = 1
_RANKS_PER_NODE = 8  # where this machine has no GPUs to count
_SAMPLE_BYTES_MIN = 1 << 20
_SAMPLE_BYTES_MAX = 4 << 30


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    storage: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory on the storage to examine: the storage_path of the run.")
    ] = Path("."),
    state: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the whole training state, e.g. 100GB: say what to expect."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the run; needed with --state.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on each node.  [default: this machine's GPUs, or else 8]")
    ] = None,
    sample: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that are copied, written and read to measure a speed.")
    ] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine and a storage, and say what is wrong and what to expect of saves and restores.

    Exits with 0 if nothing prevents a run, with 5 if something does, and with 2 for wrong usage.
    """
    sample_bytes = _sample(sample)
    size = _size(state, ranks, ranks_per_node)
    if not storage.is_dir():
        raise CallerError(f"--storage is {str(storage)!r}; it has to be a directory that exists")
    with ended_by_signals(), _progress() as tell:
        facts = examine(storage, sample_bytes=sample_bytes, tell=tell)
    findings = [*judge_machine(facts), *judge_storage(facts.storage)]
    scale, expected = None, None
    if size is not None:
        scale = _scale(*size, facts)
        expected = _expect(scale, facts)
        if expected is not None:
            findings += _judge_scale(scale, expected, facts)
    if as_json:
        print(json.dumps(_as_json(facts, findings, scale, expected), indent=2))
    else:
        report.write(facts, findings, scale, expected)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(EnvironmentProblem.exit_code)


def _sample(text: str) -> int:
    sample_bytes = parse_size(text, field="--sample")
    if not _SAMPLE_BYTES_MIN <= sample_bytes <= _SAMPLE_BYTES_MAX:
        raise CallerError(f"--sample is {text!r}; it has to be between 1MiB and 4GiB")
    return sample_bytes // PAGE_BYTES * PAGE_BYTES


def _size(state: str | None, ranks: int | None, ranks_per_node: int | None) -> tuple[int, int, int | None] | None:
    """(bytes of the state, ranks, ranks on a node) if the user gave a size; CallerError if only a part of it."""
    for name, number in (("--ranks", ranks), ("--ranks-per-node", ranks_per_node)):
        if number is not None and number < 1:
            raise CallerError(f"{name} is {number}; it has to be a whole number, at least 1")
        if number is not None and state is None:
            raise CallerError(f"{name} is {number}, but --state is missing; give the state's size too, such as 100GB")
    if state is None:
        return None
    state_bytes = parse_size(state, field="--state")
    if ranks is None:
        raise CallerError(f"--state is {state!r}, but --ranks is missing; give the number of ranks too, such as 64")
    return state_bytes, ranks, ranks_per_node


def _scale(state_bytes: int, ranks: int, ranks_per_node: int | None, facts: Facts) -> Scale:
    from orchestrator.config import RecoveryConfig

    on_node = ranks_per_node or len(facts.machine.gpus) or _RANKS_PER_NODE
    slots = RecoveryConfig().snapshot_slots
    return Scale(state_bytes=state_bytes, ranks=ranks, ranks_per_node=min(on_node, ranks), slots=slots)


def _expect(scale: Scale, facts: Facts) -> Expectation | None:
    """None if a speed that it needs could not be measured."""
    memory, storage = facts.memory, facts.storage.speeds
    if memory is None or storage is None:
        return None
    write, read_back = storage.write_direct or storage.write_buffered, storage.read_direct or storage.read_cold
    cpus = facts.machine.cpus
    return expect(
        scale,
        Speeds(
            cpus=min(cpus, facts.machine.cpu_limit or cpus),
            copy=memory.copy.median,
            copy_all=max(memory.copy_all.median, memory.copy.median),
            copy_fresh=memory.copy_fresh.median,
            hash=memory.hash.median,
            write=write.median,
            read_back=read_back.median,
            read=read_back.median,
            sync_seconds=storage.sync_file.median + storage.sync_dir.median,
        ),
    )


def _judge_scale(scale: Scale, expected: Expectation, facts: Facts) -> list[Finding]:
    from orchestrator.config import RecoveryConfig

    config = RecoveryConfig()
    return judge_scale(
        scale, expected, facts, memory_fraction_max=config.memory_fraction_max, keep_last=config.keep_last
    )


def _as_json(
    facts: Facts, findings: list[Finding], scale: Scale | None, expected: Expectation | None
) -> dict[str, Any]:
    return {
        "v": JSON_VERSION,
        "ok": not any(finding.level == "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "scale": asdict(scale) if scale is not None else None,
        "expected": asdict(expected) if expected is not None else None,
        "facts": asdict(facts),
    }


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On a terminal, say what is being measured; on standard error, so that the output can be piped."""
    console = Console(file=sys.stderr)
    with console.status("") as status:
        yield lambda what: status.update(f"examining {what}")
