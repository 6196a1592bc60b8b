"""Advice as text and as a figure."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from orchestrator.cli.advice import FLAT_RATIO, MEMORY_STALL_FACTOR, Advice, Score
from orchestrator.cli.durations import show_duration
from orchestrator.cli.plots import bar, figure, legend, text_console
from orchestrator.decide.tuner import Limits

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
_BAR_WIDTH = 30
_WASTE_SHOWN_MIN = 1e-9


def write(advice: Advice) -> None:
    """To standard output."""
    console = text_console()
    for line in _lines(advice):
        console.print(line)
    console.print()
    console.print(_table(advice))
    console.print(legend(("saving", "repeated", "restarting")))
    levers = [lever for lever in advice.levers if lever.gain_ratio > 0]
    if levers:
        console.print("\nWhat would help, best first, each with the intervals that suit it then:")
        for lever in levers:
            console.print(f"  {_percent(lever.gain_ratio, sign=True)} goodput  {lever.what}")
        if advice.situation.memory is None:
            stall = MEMORY_STALL_FACTOR * advice.situation.durable.cost.stall_seconds
            misses = _percent(advice.memory_misses)
            assumed = f"a stall of {show_duration(stall)}, and that {misses} of the failures leave nothing in memory"
            console.print(f"  (of snapshots in memory is assumed {assumed}; see --memory-stall, --memory-misses)")


def _lines(advice: Advice) -> Iterator[str]:
    situation, score = advice.situation, advice.score
    cost, step = situation.durable.cost, situation.step_seconds
    verb = "scored" if advice.every_seconds is not None else "save"
    yield f"{verb:<9}every {_interval(score.interval_seconds, step)}: {_effect(score)}"
    if score.memory_interval_seconds is not None:
        yield f"snapshot every {_interval(score.memory_interval_seconds, step)}, in memory"
    if advice.every_seconds is not None and situation.failures_per_second:
        best = situation.score()
        yield f"best     every {_interval(best.interval_seconds, step)}: {_effect(best)}"
    yield (
        f"a save   stalls {show_duration(cost.stall_seconds)}, can be restored after "
        f"{show_duration(max(cost.stall_seconds, cost.durable_seconds))}; "
        f"a restart takes {show_duration(situation.restart_seconds)}"
    )
    yield f"failures {_failures(advice)}"
    if not situation.failures_per_second:
        return
    low, high = situation.flat_seconds()
    if low < high:
        within = f"{_percent(1 - FLAT_RATIO)} of the best goodput"
        yield f"flat     from {show_duration(low)} to {show_duration(high)} is within {within}"
    ceiling = Limits().durable_overhead_max
    if ceiling is not None and score.overhead_ratio > ceiling and advice.every_seconds is None:
        least = cost.cost_seconds * (1 / ceiling - 1)
        lost = score.goodput_ratio - situation.score(least).goodput_ratio
        yield (
            f"ceiling  a run keeps saves to {_percent(ceiling)} of its time unless told otherwise: "
            f"every {show_duration(least)}, which costs {_percent(lost)} goodput"
        )


def _interval(seconds: float, step_seconds: float) -> str:
    steps = f", {round(seconds / step_seconds):,} steps" if step_seconds and seconds < math.inf else ""
    return f"{show_duration(seconds)}{steps}"


def _effect(score: Score) -> str:
    return (
        f"goodput {_percent(score.goodput_ratio)}, saving costs {_percent(score.overhead_ratio)}, "
        f"a failure replays {show_duration(score.lost_seconds_per_failure)} on average"
    )


def _failures(advice: Advice) -> str:
    rate, believed = advice.situation.failures_per_second, advice.believed
    if not rate:
        return "not counted, their rate is unknown: give --mtbf, --gpus or --run"
    text = f"one every {show_duration(1 / rate)}"
    if believed is None:
        return text
    span = f"{show_duration(1 / believed.high_per_second)} and {show_duration(1 / believed.low_per_second)}"
    return f"{text}, with 90 % certainty between {span}"


def _table(advice: Advice) -> Table:
    """The scored interval, and what shorter and longer ones would come to."""
    table = Table("every", "goodput", "against it", "saving", "replays", "wasted", box=None, padding=(0, 2, 0, 0))
    score = advice.score
    varied = 0 < score.interval_seconds < math.inf
    scores = [advice.times(factor) for factor in _FACTORS] if varied else [score]
    most = max(1 - one.goodput_ratio for one in scores)
    for one in scores:
        against = one.goodput_ratio - score.goodput_ratio
        waste = advice.situation.waste(one).values()
        table.add_row(
            show_duration(one.interval_seconds),
            _percent(one.goodput_ratio),
            _percent(against, sign=True) if one.interval_seconds != score.interval_seconds else "",
            _percent(one.overhead_ratio),
            show_duration(one.lost_seconds_per_failure),
            bar(list(waste), max(most, _WASTE_SHOWN_MIN), _BAR_WIDTH),
        )
    return table


def draw(advice: Advice, path: Path) -> None:
    """What is wasted at each interval, as stacked areas."""
    situation, score = advice.situation, advice.score
    middle = score.interval_seconds if 0 < score.interval_seconds < math.inf else 3600.0
    intervals = [middle * 2 ** (exponent / 16) for exponent in range(-64, 65)]
    wastes = [situation.waste(situation.score(seconds)) for seconds in intervals]
    with figure(path) as axes:
        axes.stackplot(
            [seconds / 60 for seconds in intervals],
            [[100 * waste[kind] for waste in wastes] for kind in wastes[0]],
            labels=list(wastes[0]),
        )
        axes.axvline(middle / 60, color="black", linewidth=1, label=f"every {show_duration(middle)}")
        axes.set_xscale("log")
        axes.set_xlabel("interval, minutes")
        axes.set_ylabel("wasted, % of the time")
        axes.legend()


def _percent(ratio: float, *, sign: bool = False) -> str:
    text = f"{100 * ratio:.3g}" if abs(ratio) < 0.1 else f"{100 * ratio:.2f}"
    return f"{'+' if sign and ratio >= 0 else ''}{text} %"
