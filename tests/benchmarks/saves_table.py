"""What the benchmark of saves makes of its measurements: medians and spreads, the table, and the goals as ratios.

Knows no clock, process or file. Times are in seconds, memory in bytes over all ranks.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
MEMORY_MIB_MAX = 64.0  # beyond the slots, a rank
GROWTH_MIB_MAX = 16.0  # a rank, over the whole run of saves


@dataclass(slots=True)
class Results:
    """What was measured of one arm. `problem`: why it was not, or not to the end."""

    name: str
    fsyncs: bool
    values: dict[str, list[float]] = field(default_factory=dict)
    problem: str | None = None

    def add(self, column: str, value: float) -> None:
        self.values.setdefault(column, []).append(value)

    def median(self, column: str) -> float | None:
        values = self.values.get(column)
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    unit: float = 1.0


COLUMNS = (
    Column("stall", "stall s"),
    Column("durable", "durable s"),
    Column("verified", "verified s"),
    Column("slowdown", "slow-down s"),
    Column("total", "overhead s"),
    Column("memory", "memory MiB", MIB),
    Column("restore_cold", "cold s"),
    Column("restore_warm", "warm s"),
    Column("restore_memory", "from memory s"),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` is None where it could not be measured, and `why` says so."""

    text: str
    limit: float
    value: float | None
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return f"not measured: {self.why}"
        if self.value <= self.limit:
            return "met"
        return f"missed, by {self.value - self.limit:.2f}"


def slowest(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what ranks say of the same save: the loop goes on when the slowest does."""
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def goals(results: Mapping[str, Results], *, slots_bytes: int, ranks: int) -> list[Goal]:
    """The goals of a save and a restore. `slots_bytes`: what all ranks' slots hold together."""

    def ratio(text: str, limit: float, column: str, arm: str, floor: str, below: str | None = None) -> Goal:
        value, why = _ratio(results, (arm, column), (floor, below or column))
        return Goal(f"{text}: {arm} / {floor}", limit, value, why)

    found = [
        ratio("stall when overlapped", 0.1, "stall", "lastgood", "floor-copy"),
        ratio("stall when not overlapped", 1.2, "stall", "lastgood-synchronous", "floor-copy-again"),
        ratio("overhead with verification", 2.0, "total", "lastgood", "floor-helper"),
        ratio("overhead without verification", 1.3, "total", "lastgood-unverified", "floor-helper-again"),
    ]
    for name, result in results.items():
        if result.fsyncs and not name.startswith(("lastgood", "floor")) and result.median("total") is not None:
            found.append(ratio("overhead beside a durable peer", 0.5, "total", "lastgood", name))
    found.append(ratio("time until durable", 1.25, "durable", "lastgood", "floor-helper"))
    found.append(ratio("cold restore", 1.3, "restore_cold", "lastgood", "floor-direct"))
    in_memory = "lastgood" in results and results["lastgood"].median("restore_memory") is not None
    warm = "restore_memory" if in_memory else "restore_warm"
    where = "from memory" if in_memory else "from the page cache"
    found.append(ratio(f"warm restore {where}", 1.5, warm, "lastgood", "floor-copy", "restore_warm"))
    memory = results["lastgood"].median("memory") if "lastgood" in results else None
    beyond = None if memory is None else (memory - slots_bytes) / ranks / MIB
    text = "memory a rank beyond its slots, in MiB: lastgood"
    found.append(Goal(text, MEMORY_MIB_MAX, beyond, "" if memory is not None else "lastgood was not measured"))
    return found


def flat_goal(memory_bytes: Sequence[float], *, ranks: int) -> Goal:
    """`memory_bytes`: after each save, of all ranks and keepers together."""
    saves = len(memory_bytes)
    growth = slope(memory_bytes) * (saves - 1) / ranks / MIB
    held = f"{memory_bytes[0] / MIB:.0f} after the first, {memory_bytes[-1] / MIB:.0f} after the last, of all ranks"
    return Goal(f"growth over {saves} saves a rank, fitted, in MiB: lastgood ({held})", GROWTH_MIB_MAX, growth)


def slope(values: Sequence[float]) -> float:
    """Of the straight line through values at 0, 1, 2, ..., by least squares."""
    return statistics.linear_regression(range(len(values)), values).slope


def _ratio(results: Mapping[str, Results], above: tuple[str, str], below: tuple[str, str]) -> tuple[float | None, str]:
    medians = []
    for name, column in (above, below):
        result = results.get(name)
        median = result.median(column) if result is not None else None
        if median is None:
            return None, f"{name} has no {column}"
        medians.append(median)
    if medians[1] <= 0:
        return None, f"{below[0]} cost nothing that could be told from noise"
    return medians[0] / medians[1], ""


def cell(values: Sequence[float] | None, unit: float = 1.0) -> str:
    """Median and spread; `-` without values."""
    if not values:
        return "-"
    median, low, high = (value / unit for value in (statistics.median(values), min(values), max(values)))
    digits = 0 if unit != 1.0 else 3 if abs(median) < 0.1 else 2
    spread = f" ({low:.{digits}f}..{high:.{digits}f})" if len(values) > 1 else ""
    return f"{median:.{digits}f}{spread}"


def table(results: Mapping[str, Results]) -> str:
    rows = [["", *(column.title for column in COLUMNS[:2]), "fsync", *(column.title for column in COLUMNS[2:])]]
    for result in results.values():
        cells = [cell(result.values.get(column.key), column.unit) for column in COLUMNS]
        if any(result.values.values()):
            rows.append([result.name, *cells[:2], "yes" if result.fsyncs else "no", *cells[2:]])
    lines = aligned(rows)
    lines += [f"{one.name}: not measured to the end: {one.problem}" for one in results.values() if one.problem]
    return "\n".join(lines)


def goals_table(found: Sequence[Goal]) -> str:
    rows = [["goal", "at most", "found", ""]]
    for goal in found:
        rows.append([goal.text, f"{goal.limit:g}", "-" if goal.value is None else f"{goal.value:.2f}", goal.verdict])
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(results: Mapping[str, Results], found: Sequence[Goal], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "arms": {
            result.name: {
                "fsyncs": result.fsyncs,
                "problem": result.problem,
                "columns": {
                    key: {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}
                    for key, values in result.values.items()
                },
            }
            for result in results.values()
        },
        "goals": [
            {"goal": goal.text, "at_most": goal.limit, "found": goal.value, "verdict": goal.verdict} for goal in found
        ],
    }
