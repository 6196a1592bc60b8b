"""A run's report in the terminal: the figures that matter, and the failures that cost most."""

import math
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from orchestrator.cli.plots import bar, legend, text_console
from orchestrator.observe import words
from orchestrator.observe.html.kinds import KIND_NAMES, grouped
from orchestrator.observe.run_report.facts import Facts

_BAR_WIDTH = 60
_FAILURES_SHOWN = 10
_TIERS = {"durable": "checkpoints", "memory": "snapshots in memory"}


def write(facts: Facts) -> None:
    """To standard output."""
    console = text_console()
    told = facts.document
    for line in _lines(told):
        console.print(words.visible(line))
    seconds = grouped(told["time"]["seconds"])
    if told["time"]["elapsed_seconds"]:
        shown = {kind: part for kind, part in seconds.items() if part > 0}
        console.print()
        console.print(bar(list(shown.values()), sum(shown.values()), _BAR_WIDTH))
        console.print(legend([f"{KIND_NAMES[kind]} {words.long_duration(part)}" for kind, part in shown.items()]))
    if told["failures"]:
        console.print()
        console.print(_table(told["failures"]))
        if len(told["failures"]) > _FAILURES_SHOWN:
            console.print(f"the {_FAILURES_SHOWN} of {len(told['failures'])} failures that cost most; all: --json")


def _lines(told: dict[str, Any]) -> Iterator[str]:
    run, time = told["run"], told["time"]
    generations = words.many(run["generations"], "generation")
    yield f"run       {run['name']}: {run['state']}, step {run['step']:,}, {generations}"
    useful = "" if time["goodput_ratio"] is None else f", {words.percent(time['goodput_ratio'])} of it useful training"
    yield f"time      {words.long_duration(time['elapsed_seconds'])}{useful}"
    failures = told["failures"]
    lost = sum(one["lost_seconds"] for one in failures)
    steps = sum(one["lost_steps"] for one in failures)
    cost = f", cost {words.long_duration(lost)} and {words.steps(steps)} done again" if failures else ""
    yield f"failures  {len(failures)}{cost}"
    for tier, one in told["cadence"].items():
        best = "never" if math.isinf(one["best_seconds"]) else f"every {words.duration(one['best_seconds'])}"
        as_run = (
            ""
            if one["as_run_seconds"] is None
            else (
                f"every {words.duration(one['as_run_seconds'])}, "
                f"wasted {words.long_duration(one['as_run_waste_seconds'])}; "
            )
        )
        yield (
            f"cadence   {_TIERS.get(tier, tier)}: {as_run}best in hindsight {best}, wasted "
            f"{words.long_duration(one['best_waste_seconds'])}"
        )
    saves, storage = told["saves"], told["storage"]
    yield (
        f"storage   {words.many(saves['committed'], 'save')}, {words.amount(storage['written_bytes'])} written, "
        f"{words.amount(storage['read_back_bytes'])} read back, "
        f"{words.amount(storage['restored_bytes'])} read to restore"
    )
    if run["stop_reason"]:
        yield f"stopped   {run['stop_reason'].strip().splitlines()[-1]}"


def _table(failures: list[dict[str, Any]]) -> Table:
    table = Table("", "when", "what", "steps again", "training after", "cost", box=None, padding=(0, 2, 0, 0))
    costly = sorted(failures, key=lambda one: -one["lost_seconds"])[:_FAILURES_SHOWN]
    for one in sorted(costly, key=lambda one: int(one["number"])):
        after = "-" if one["stepped_at"] is None else words.duration(one["stepped_at"] - one["failed_at"])
        table.add_row(
            str(one["number"]),
            words.day_time(one["failed_at"]),
            words.visible(one["said"]),
            f"{one['lost_steps']:,}",
            after,
            words.long_duration(one["lost_seconds"]),
        )
    return table
