"""The examination as text: what was measured, what to expect, what is wrong. Pure but for printing."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from orchestrator.doctor.expect import Expectation, Scale, Span
from orchestrator.doctor.facts import Facts, MemorySpeeds, Speed, StorageSpeeds
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.sizes import show_bytes, show_seconds

_WIDTH_ELSEWHERE = 1000  # other programs read whole lines
_STYLES = {"problem": "bold red", "advice": "yellow", "ok": "green"}


def write(facts: Facts, findings: list[Finding], scale: Scale | None, expected: Expectation | None) -> None:
    """To standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH_ELSEWHERE)
    for line in _machine(facts):
        console.print(line)
    console.print()
    console.print(_speeds(facts))
    if scale is not None:
        console.print()
        _write_expected(console, scale, expected)
    console.print()
    _write_findings(console, findings)


def _machine(facts: Facts) -> Iterator[str]:
    machine, storage = facts.machine, facts.storage
    gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
    limit = f" (limit {show_bytes(machine.memory_limit_bytes)})" if machine.memory_limit_bytes is not None else ""
    memory = (
        f"{show_bytes(machine.memory_bytes)} of memory{limit}, {show_bytes(machine.memory_available_bytes)} available"
    )
    yield f"machine  {machine.host}: {machine.cpus} CPUs, {memory}, {gpus}"
    where = f"{storage.file_system or 'unknown'} on {storage.source or 'unknown'}, {storage.kind}"
    yield f"storage  {storage.path}: {where}, {show_bytes(storage.free_bytes)} free"


def _speeds(facts: Facts) -> Table:
    table = _table("measured", "median", "slowest", "fastest")
    for what, speed in (*_memory_speeds(facts.memory), *_storage_speeds(facts.storage.speeds)):
        if speed is None:
            table.add_row(what, "refused", "", "")
        else:
            table.add_row(what, *(f"{show_bytes(rate)}/s" for rate in (speed.median, speed.slowest, speed.fastest)))
    if facts.storage.speeds is not None:
        speeds = facts.storage.speeds
        for what, latency in (("fsync of a small file", speeds.sync_file), ("fsync of a directory", speeds.sync_dir)):
            table.add_row(what, show_seconds(latency.median), show_seconds(latency.slowest), "")
    return table


def _memory_speeds(memory: MemorySpeeds | None) -> Iterator[tuple[str, Speed]]:
    if memory is not None:
        yield "copy memory, one thread", memory.copy
        yield f"copy memory, {memory.threads} threads together", memory.copy_all
        yield "copy into fresh memory, one thread", memory.copy_fresh
        yield "hash (xxh3_128), one thread", memory.hash


def _storage_speeds(speeds: StorageSpeeds | None) -> Iterator[tuple[str, Speed | None]]:
    if speeds is not None:
        yield "write and fsync, O_DIRECT", speeds.write_direct
        yield "write and fsync, page cache", speeds.write_buffered
        yield "read, O_DIRECT", speeds.read_direct
        yield "read, page cache that forgot it", speeds.read_cold
        yield "read, page cache", speeds.read_cached


def _write_expected(console: Console, scale: Scale, expected: Expectation | None) -> None:
    if expected is None:
        console.print("What to expect cannot be said: a speed that it takes could not be measured, see below.")
        return
    nodes = f"{expected.nodes} nodes like this one" if expected.nodes > 1 else "this node"
    table = _table(
        f"{scale.state_bytes / 1e9:,.4g} GB in {scale.ranks} ranks, {scale.ranks_per_node} a node, on {nodes}",
        "expected",
    )
    rows = (
        ("each rank holds", show_bytes(expected.rank_bytes)),
        ("memory for snapshots, a node", show_bytes(expected.memory_bytes)),
        ("training stands still for a save, at most", show_seconds(expected.stall_seconds)),
        ("saved durably after", _span(expected.durable_seconds)),
        ("read back and verified after", _span(expected.verified_seconds)),
        ("shortest time from save to save", _span(expected.save_seconds)),
        ("recovery, a rank dies, state in memory", show_seconds(expected.recovery_memory_seconds)),
        ("recovery, a rank dies, state from storage", _span(expected.recovery_storage_seconds)),
        ("recovery, Ray's worker or a node dies", _span(expected.recovery_worker_seconds)),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if expected.nodes > 1:
        console.print("From: each node gets the measured speed of the storage. To: all nodes share it.")


def _write_findings(console: Console, findings: list[Finding]) -> None:
    for level in ("ok", "advice", "problem"):
        for finding in findings:
            if finding.level == level:
                console.print(f"{level:<8}", style=_STYLES[level], end="")
                console.print(f" {finding.what}: {finding.seen}")
                if level != "ok":
                    console.print(f"         why: {finding.why}")
                    console.print(f"         do:  {finding.do}")
    problems = sum(finding.level == "problem" for finding in findings)
    advice = sum(finding.level == "advice" for finding in findings)
    verdict = f"{_count(problems, 'problem')} to solve before a run" if problems else "nothing prevents a run"
    console.print(f"\n{verdict[0].upper()}{verdict[1:]}; {_count(advice, 'piece')} of advice.")


def _span(span: Span) -> str:
    least, most = show_seconds(span.least), show_seconds(span.most)
    return least if least == most else f"{least} to {most}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
