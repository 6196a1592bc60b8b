"""Charts as inline SVG without text in it: they stretch to any width, and their labels are ordinary text around them
that stays as large as the rest."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.observe import words
from orchestrator.observe.html.blocks import swatch
from orchestrator.observe.html.markup import Html, h
from orchestrator.observe.timeline import Mark, Span, Timeline

WIDTH = 1000
_TICKS_MAX = 400
SPAN_NAMES = {
    "starting": "starting",
    "training": "training",
    "recovering": "recovering",
    "down": "no driver",
}


def timeline_chart(timeline: Timeline, now: float) -> Html:
    """Three lanes over the run's time: what it did; its failures; its saves and where it was restored."""
    since = timeline.started_at
    if since is None or not timeline.spans:
        return h("p", "Nothing has happened yet.", class_="note")
    until = timeline.ended_at or max(now, since)
    whole = max(until - since, 1e-3)

    def x(at: float) -> float:
        return min(1.0, max(0.0, (at - since) / whole)) * WIDTH

    rects = [
        h(
            "rect",
            x=f"{x(span.since):.2f}",
            y=14,
            width=f"{_width(x(span.since), x(span.until or until), span):.2f}",
            height=16,
            class_=f"fill-{span.kind}",
        )
        for span in timeline.spans
    ]
    lines = [
        *_ticks(timeline.failures, x, 0, 34, "mark-failure"),
        *_ticks(timeline.commits, x, 34, 42, "mark-commit"),
        *_ticks(timeline.restores, x, 34, 48, "mark-restore"),
    ]
    kinds = list(dict.fromkeys(span.kind for span in timeline.spans))
    told = ", ".join(
        [
            f"{words.long_duration(whole)} in all",
            words.many(len(timeline.failures), "failure"),
            words.many(len(timeline.commits), "save"),
            words.many(len(timeline.restores), "restore"),
        ]
    )
    legend = h(
        "ul",
        [h("li", swatch(kind), SPAN_NAMES[kind]) for kind in kinds],
        [
            h("li", _line_swatch(name), label)
            for name, label in (("failure", "failure"), ("commit", "save"), ("restore", "restore"))
        ],
        class_="legend row",
    )
    return h(
        "figure",
        h(
            "svg",
            rects,
            lines,
            viewBox=f"0 0 {WIDTH} 48",
            preserveAspectRatio="none",
            class_="timeline",
            role="img",
            aria_label=f"Timeline: {told}",
        ),
        h(
            "div",
            h("span", words.day_time(since)),
            h("span", words.long_duration(whole)),
            h("span", words.day_time(until)),
            class_="axis",
        ),
        legend,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`kind`: its colour. Points are drawn as a line, or as dots if `dots`."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A vertical line with a name."""

    name: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`show(value)`: an end of the axis in words."""

    low: float
    high: float
    show: Callable[[float], str]
    log: bool = False

    def place(self, value: float) -> float:
        """0 to 1 between the ends."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, 1e-12))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2


def line_chart(
    label: str, x: Axis, y: Axis, series: Sequence[Series], *, rules: Sequence[Rule] = (), height: int = 160
) -> Html:
    """Lines and dots. `label` says to those who cannot see it what the chart shows."""
    drawn: list[Html] = []
    for rule in rules:
        at = f"{x.place(rule.at) * WIDTH:.2f}"
        drawn.append(h("line", x1=at, x2=at, y1=0, y2=height, class_=f"rule line-{rule.kind}"))
    for one in series:
        places = [(x.place(a) * WIDTH, (1 - y.place(b)) * height) for a, b in one.points]
        if one.dots:
            # A line of no length with round ends is a dot that the stretching does not distort.
            drawn += [
                h("line", x1=f"{a:.1f}", x2=f"{a:.1f}", y1=f"{b:.1f}", y2=f"{b:.1f}", class_=f"dot line-{one.kind}")
                for a, b in places
            ]
        else:
            drawn.append(
                h("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places), class_=f"line-{one.kind}")
            )
    names = dict.fromkeys([*((one.name, one.kind) for one in series), *((rule.name, rule.kind) for rule in rules)])
    ends = [h("span", x.show(value)) for value in (x.low, x.middle, x.high)]
    return h(
        "figure",
        h(
            "div",
            h("div", h("span", y.show(y.high)), h("span", y.show(y.low)), class_="y-axis"),
            h(
                "svg",
                drawn,
                viewBox=f"0 0 {WIDTH} {height}",
                preserveAspectRatio="none",
                class_="chart",
                role="img",
                aria_label=label,
            ),
            h("div", ends, class_="axis"),
            class_="plot",
        ),
        h("ul", [h("li", _line_swatch(kind), name) for name, kind in names], class_="legend row"),
    )


def thinned(points: Sequence[tuple[float, float]], most: int = _TICKS_MAX) -> list[tuple[float, float]]:
    """At most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _width(left: float, right: float, span: Span) -> float:
    """A recovery of a second in a week would not be seen otherwise."""
    return max(right - left, 1.5 if span.kind == "recovering" else 0.0)


def _ticks(marks: Iterable[Mark], x: Callable[[float], float], top: int, bottom: int, name: str) -> Iterable[Html]:
    """One line for all marks that would fall on the same place."""
    places = dict.fromkeys(round(x(mark.at) * _TICKS_MAX / WIDTH) for mark in marks)
    for place in places:
        at = f"{place * WIDTH / _TICKS_MAX:.2f}"
        yield h("line", x1=at, x2=at, y1=top, y2=bottom, class_=name)


def _line_swatch(kind: str) -> Html:
    return h(
        "svg",
        h("line", x1=5, x2=5, y1=0, y2=10, class_=f"line-{kind} mark-{kind}"),
        viewBox="0 0 10 10",
        class_="swatch",
        aria_hidden="true",
    )
