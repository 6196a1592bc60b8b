"""What policies came to, as a table with a small plot, as JSON, and as a figure."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.simulator.outcome import BADPUT, Outcome
from orchestrator.cli.durations import show_duration
from orchestrator.cli.plots import bar, figure, legend, stacked, text_console
from orchestrator.doctor.sizes import show_bytes

_BAR_WIDTH = 30

Outcomes = Sequence[Outcome]


def write(found: Mapping[str, Outcomes]) -> None:
    """To standard output; the best first."""
    console = text_console()
    console.print(_table(found))
    console.print(legend(BADPUT))
    for policy, outcomes in found.items():
        stopped = [one.stop_reason for one in outcomes if one.stop_reason]
        if stopped:
            console.print(f"{policy}: {len(stopped)} of {len(outcomes)} runs were stopped, e.g. because {stopped[0]}")


def _table(found: Mapping[str, Outcomes]) -> Table:
    headers = "policy", "goodput", "90 % of seeds", "to best", "replays", "saves", "in memory", "written", "wasted"
    table = Table(*headers, box=None, padding=(0, 2, 0, 0))
    ranked = sorted(found, key=lambda policy: -goodput_ratio(found[policy]))
    best = goodput_ratio(found[ranked[0]])
    wastes = {policy: badput_ratio(found[policy]) for policy in ranked}
    most = max(sum(waste.values()) for waste in wastes.values())
    for policy in ranked:
        outcomes = found[policy]
        low, high = goodput_range(outcomes)
        saves = _counts(outcomes, lambda one: one.saves)
        goodput = goodput_ratio(outcomes)
        table.add_row(
            _name(policy),
            f"{100 * goodput:.3f} %",
            f"{100 * low:.2f} to {100 * high:.2f} %",
            f"{100 * (goodput - best):+.3f} %" if goodput < best else "",
            show_duration(_mean(outcomes, lambda one: one.lost_seconds_per_failure)),
            f"{saves.get('durable', 0):,.0f}",
            f"{saves.get('memory', 0):,.0f}",
            show_bytes(_mean(outcomes, lambda one: one.bytes_written)),
            bar([wastes[policy][kind] for kind in BADPUT], most, _BAR_WIDTH),
        )
    return table


def as_json(found: Mapping[str, Outcomes]) -> list[dict[str, Any]]:
    """One object a policy, in the order in which they were asked for."""
    objects = []
    for policy, outcomes in found.items():
        low, high = goodput_range(outcomes)
        name, _, interval = policy.partition(": ")
        objects.append(
            {
                "policy": name,
                "interval_seconds": float(interval.rstrip("s")) if interval else None,
                "seeds": len(outcomes),
                "goodput_ratio": goodput_ratio(outcomes),
                "goodput_ratio_p05": low,
                "goodput_ratio_p95": high,
                "badput_ratio": badput_ratio(outcomes),
                "lost_seconds_per_failure": _mean(outcomes, lambda one: one.lost_seconds_per_failure),
                "wall_seconds": _mean(outcomes, lambda one: one.wall_seconds),
                "failures": _counts(outcomes, lambda one: one.failures),
                "saves": _counts(outcomes, lambda one: one.saves),
                "restores": _counts(outcomes, lambda one: one.restores),
                "decisions": _mean(outcomes, lambda one: one.decisions),
                "bytes_written": _mean(outcomes, lambda one: one.bytes_written),
                "bytes_read": _mean(outcomes, lambda one: one.bytes_read),
                "runs_stopped": sum(one.stop_reason is not None for one in outcomes),
            }
        )
    return objects


def draw(found: Mapping[str, Outcomes], path: Path) -> None:
    """What each policy wastes, side by side."""
    with figure(path) as axes:
        stacked(axes, [_name(policy) for policy in found], [badput_ratio(outcomes) for outcomes in found.values()])
        axes.set_xlabel("wasted, % of the time")


def goodput_ratio(outcomes: Outcomes) -> float:
    """The mean over the seeds."""
    return _mean(outcomes, lambda one: one.goodput_ratio)


def goodput_range(outcomes: Outcomes) -> tuple[float, float]:
    """Of the middle 90 % of seeds."""
    ranked = sorted(one.goodput_ratio for one in outcomes)
    cut = len(ranked) // 20
    return ranked[cut], ranked[-1 - cut]


def badput_ratio(outcomes: Outcomes) -> dict[str, float]:
    """Parts of the time by kind, 0 to 1."""

    def part(kind: str) -> float:
        return _mean(outcomes, lambda one: one.badput_seconds[kind] / one.wall_seconds)

    return {kind: part(kind) for kind in BADPUT}


def _counts(outcomes: Outcomes, of: Callable[[Outcome], Counter[str]]) -> dict[str, float]:
    """Means over the seeds."""
    total: Counter[str] = Counter()
    for one in outcomes:
        total.update(of(one))
    return {name: count / len(outcomes) for name, count in sorted(total.items())}


def _mean(outcomes: Outcomes, of: Callable[[Outcome], float]) -> float:
    return statistics.fmean(map(of, outcomes))


def _name(policy: str) -> str:
    """Of a policy with its interval, for people."""
    name, _, interval = policy.partition(": ")
    return f"{name}: {show_duration(float(interval.rstrip('s')))}" if interval else name
