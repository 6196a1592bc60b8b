"""What a dashboard is made of, in a few words each; `build.py` turns it into Grafana's.

Every query is limited to `$run`. `$__rate_interval` is Grafana's: at least four scrapes.
"""

from dataclasses import dataclass
from typing import Literal

RUN = 'run=~"$run"'

Kind = Literal["stat", "timeseries", "bars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    expr: str
    legend: str = "{{run}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`unit`: Grafana's id. `width`: of 24 columns. `stacked`: parts of a whole. `named`: the
    legend is what to show. `steps`: colours from a value on, the
    first from the lowest; `words`: what to show instead of a value. `may_be_empty`: why a query may find nothing in a
    run that is well."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    named: bool = False
    minimum: float | None = None
    maximum: float | None = None
    steps: tuple[tuple[float | None, str], ...] = ()
    words: tuple[tuple[str, str], ...] = ()
    may_be_empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def metric(name: str, labels: str = "") -> str:
    """A selector of one metric."""
    return f"lastgood_{name}{{{RUN}{', ' if labels else ''}{labels}}}"


def top(name: str, *, by: str = "run", labels: str = "") -> str:
    """The highest value by these labels: there may be two exporters for a moment."""
    return f"max by ({by}) ({metric(name, labels)})"


def total(name: str, by: str) -> str:
    """Over all runs that are shown."""
    return f"sum by ({by}) ({top(name, by=f'run, {by}')})"


def stat(title: str, description: str, expr: str, *, unit: str = "short", **more: object) -> Panel:
    fields = {"width": 4, "height": 4, "queries": (Query(expr=expr),)} | more
    return Panel(title=title, description=description, kind="stat", unit=unit, **fields)  # type: ignore[arg-type]


def lines(title: str, description: str, *queries: Query, unit: str = "short", **more: object) -> Panel:
    return Panel(title=title, description=description, queries=queries, unit=unit, **more)  # type: ignore[arg-type]


def quantiles(name: str, *, by: str = "run", legend: str = "") -> tuple[Query, ...]:
    """Median and 95th percentile of a histogram, over the range that is shown."""
    return tuple(
        Query(
            expr=f"histogram_quantile({q}, sum by (le, {by}) (increase({metric(f'{name}_bucket')}[$__range])))",
            legend=f"{legend}{word}",
        )
        for q, word in ((0.5, "median"), (0.95, "95th percentile"))
    )
