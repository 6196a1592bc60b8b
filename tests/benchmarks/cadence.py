"""How good the tuner's intervals are, on series of failures that it does not know.

    python tests/benchmarks/cadence.py                                    what `make bench-cadence` prints
    python -m tests.benchmarks.cadence --traces DIR [--json]              any folder of traces, also without the table
                                                                          of made-up series that the former begins with

A trace is a CSV file with one column, seconds_since_previous_failure; its name is the file's.

The metric. A policy says when to save; the failures are given. Training goes on RESTART_OVER_MTBF times the MTBF after
each failure; each save then stops it for the stall and can be restored DURABLE_OVER_STALL stalls after its boundary; at
the next failure all is lost but the training up to the newest save that can be restored. Goodput is what is kept of all
gaps over their sum. The MTBF is the mean of the trace, and the stall `stall_over_mtbf` times that, so that traces
compare.

- ratio_to_hindsight: goodput over that of the best fixed interval, chosen in hindsight for this very series among 241
  between 0.15 and 8 times Young's, 1.7 % apart. It is overfitted: it knows where the gaps end. On 400 gaps of Weibull
  shape 0.7 at a stall of a hundredth of the MTBF, the best policy for that known law reaches 0.998 of it on average.
- ratio_to_one_for_all_seeds: of made-up series, the same with one interval chosen in hindsight for all seeds together,
  which is hardly overfitted.
- excess_waste: waste (1 - goodput) over the waste of Young's interval for the true mean, minus 1; below 0: less.

The tuner is the production class, asked after each save as the coordinator asks it, for the durable tier alone. It is
scored with a prior rate 10 times too low and 10 times too high, and the worse of the two counts. Its ceiling on
overhead is off, for at a stall of a hundredth of the MTBF the best overhead is 7 %; "1 %\nceiling" is what the
default then costs, and each decision says so. It is told what a save and a restart cost, once.

Rivals: every 500 steps of 5 s; every 30 min; CheckFreq's rule (as often as 3.5 % overhead let, whatever the failure
rate; J. Mohan et al., FAST 2021); Young's interval for the mean of all gaps so far, the wrong prior's included; and for
comparison Young's for the true mean, which none can know.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from cadence_score import (
    PRIORS,
    Gaps,
    Goodputs,
    Setting,
    exponential,
    goodputs,
    modulated,
    step,
    weibull,
)

COLUMN = "seconds_since_previous_failure"
STALLS = (1e-4, 1e-3, 1e-2)
HOURS_10 = 36_000.0
LONG_ENOUGH = 250
WIDTH_MIN = 160
CEILING_SEEDS = 3
TRACE_GOALS = {1e-4: 0.999, 1e-3: 0.999, 1e-2: 0.996}
RIVALS = {
    "with_ceiling": "1 %\nceiling",
    "every_steps": "500\nsteps",
    "every_minutes": "30\nmin",
    "checkfreq": "Check-\nFreq",
    "young_mean_so_far": "Young,\nmean so far",
    "young_clairvoyant": "Young,\ntrue mean",
}
"""By name in the JSON: the column's head."""

Row = dict[str, Any]


class BadTrace(Exception):
    """Names file, line and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Made-up series, one a seed. `mtbf`: None for the mean of each series. `goal`: for the mean over all seeds, of the
    goodput over that of `against`, at `goal_stalls`."""

    name: str
    draw: Callable[[np.random.Generator, int], Gaps]
    n: int
    seeds: int
    mtbf: float | None = HOURS_10
    stalls: tuple[float, ...] = STALLS
    against: str = "hindsight"
    goal: float | None = None


def _stepping(factor: float) -> Callable[[np.random.Generator, int], Gaps]:
    return lambda rng, n: step(rng, n, HOURS_10, factor)


FAMILIES = (
    *(
        Family(
            name="exponential",
            draw=lambda rng, n: exponential(rng, n, HOURS_10),
            n=100,
            seeds=seeds,
            stalls=stalls,
            against="young_clairvoyant",
            goal=0.998,
        )
        # The larger the stall, the more is at stake and the noisier it is.
        for stalls, seeds in (((1e-4, 1e-3), 60), ((1e-2,), 200))
    ),
    Family(
        name="Weibull 0.7",
        draw=lambda rng, n: weibull(rng, n, HOURS_10, 0.7),
        n=400,
        seeds=40,
        stalls=(1e-2,),
        goal=0.998,
    ),
    *(
        Family(name=f"rate x {name}", draw=_stepping(factor), n=200, seeds=8, mtbf=None, goal=1.0)
        for name, factor in (("8", 8.0), ("16", 16.0), ("1/8", 1 / 8), ("1/16", 1 / 16))
    ),
    Family(name="calm and bad", draw=lambda rng, n: modulated(rng, n, HOURS_10), n=300, seeds=8, mtbf=None),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="score the *.csv of this folder, and nothing else")
    parser.add_argument("--seeds", type=int, help="so many of each made-up series")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of tables")
    arguments = parser.parse_args()
    try:
        rows = trace_rows(arguments.traces) if arguments.traces else family_rows(arguments.seeds)
    except BadTrace as problem:
        print(problem, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        Console(width=max(WIDTH_MIN, Console().width)).print(table(rows))
    return 0


# ---------------------------------------------------------------- what is scored


def read_trace(path: Path) -> Gaps:
    """Raises BadTrace."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise BadTrace(f"{path}: {problem}") from None
    if not lines or lines[0].strip() != COLUMN:
        raise BadTrace(f"{path}, line 1: {(lines or [''])[0]!r}; it has to be the one column's name, {COLUMN}")
    gaps = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            value = float(line)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise BadTrace(f"{path}, line {number}: {line!r}; it has to be a number of seconds above 0")
        gaps.append(value)
    if not gaps:
        raise BadTrace(f"{path}, line {len(lines)}: no failures")
    return np.array(gaps)


def trace_rows(folder: Path) -> list[Row]:
    if not folder.is_dir():
        raise BadTrace(f"{folder}: no such folder")
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise BadTrace(f"{folder}: no *.csv in it")
    rows = []
    for path in paths:
        gaps = read_trace(path)
        for stall in STALLS:
            found = [goodputs(gaps, Setting.of(float(gaps.mean()), stall))]
            goal = TRACE_GOALS[stall] if len(gaps) >= LONG_ENOUGH else None
            rows.append(row(path.stem, len(gaps), stall, found, "hindsight", goal))
    return rows


def family_rows(seeds: int | None) -> list[Row]:
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("made-up series", total=sum(len(family.stalls) for family in FAMILIES))
        for family in FAMILIES:
            for stall in family.stalls:
                found = []
                for seed in range(seeds or family.seeds):
                    gaps = family.draw(np.random.default_rng(seed), family.n)
                    setting = Setting.of(family.mtbf or float(gaps.mean()), stall)
                    found.append(goodputs(gaps, setting, ceiling=seed < CEILING_SEEDS))
                rows.append(row(family.name, family.n, stall, found, family.against, family.goal))
                progress.advance(task)
    return rows


def row(name: str, n: int, stall: float, found: list[Goodputs], against: str, goal: float | None) -> Row:
    """Of several seeds all values are means; of several priors the worst one counts."""

    def mean(policy: str, value: Callable[[Goodputs, float], float]) -> list[float]:
        scored = [one for one in found if policy in one]
        return [
            float(np.mean([value(one, one[policy][prior]) for one in scored]))
            for prior in range(len(scored[0][policy]))
        ]

    def ratios(policy: str, to: str) -> list[float]:
        return mean(policy, lambda one, goodput: goodput / one[to][0])

    def judged(policy: str) -> Row:
        excess = mean(policy, lambda one, goodput: (1.0 - goodput) / (1.0 - one["young_clairvoyant"][0]) - 1.0)
        return {"ratio_to_hindsight": min(ratios(policy, "hindsight")), "excess_waste": max(excess)}

    reached = min(ratios("tuner", against))
    one_for_all = max(mean("fixed", lambda _, goodput: goodput))
    return {
        "trace": name,
        "n": n,
        "seeds": len(found),
        "stall_over_mtbf": stall,
        **judged("tuner"),
        "ratio_to_hindsight_by_prior": dict(zip(map(str, PRIORS), ratios("tuner", "hindsight"), strict=True)),
        "ratio_to_one_for_all_seeds": min(mean("tuner", lambda _, goodput: goodput)) / one_for_all,
        "against": against,
        "ratio_to_goal": reached,
        "goal": goal,
        "met": None if goal is None else reached >= goal,
        "rivals": {name: judged(name) for name in RIVALS},
    }


# ---------------------------------------------------------------- the table


def table(rows: list[Row]) -> Table:
    shown = Table(title="Goodput over that of the best fixed interval in hindsight")
    for head in ("failures", "n", "stall/\nMTBF", "tuner", "one for\nall seeds", "excess\nwaste", "goal"):
        shown.add_column(head, justify="left" if head == "failures" else "right", no_wrap=True)
    for head in RIVALS.values():
        shown.add_column(head, justify="right", no_wrap=True)
    for one in rows:
        goal = ""
        if one["goal"] is not None:
            reached = "" if one["against"] == "hindsight" else f" ({one['ratio_to_goal']:.4f} of Young)"
            goal = (
                f"[{'green' if one['met'] else 'red'}]{one['goal']:.3f} {'met' if one['met'] else 'missed'}{reached}[/]"
            )
        shown.add_row(
            one["trace"],
            str(one["n"]),
            f"{one['stall_over_mtbf']:g}",
            f"{one['ratio_to_hindsight']:.4f}",
            f"{one['ratio_to_one_for_all_seeds']:.4f}" if one["seeds"] > 1 else "",
            f"{one['excess_waste']:+.1%}",
            goal,
            *(f"{one['rivals'][name]['ratio_to_hindsight']:.4f}" for name in RIVALS),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
