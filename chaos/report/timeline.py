"""What the ranks of one run did over time, and its drawing: one strip a rank, with marks for what happened to it.

Positions are shares of the width, sizes are pixels: a phone shows the same drawing narrower, with its text as large.
Colour is never the only sign: kinds differ in pattern and shape too, and everything drawn is listed as text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.observe.html.markup import Html, h, join

SpanKind = Literal["training", "recovering", "lost", "ended"]
MarkKind = Literal["fault", "detection", "restore", "commit"]

SPAN_WORDS: dict[SpanKind, str] = {
    "training": "training",
    "recovering": "recovering",
    "lost": "work that was lost",
    "ended": "over",
}
MARK_WORDS: dict[MarkKind, str] = {"fault": "fault", "detection": "detected", "restore": "restored", "commit": "commit"}

_LANE_PIXELS = 46
_STRIP_PIXELS = 18
_AXIS_PIXELS = 20
_TICKS_MAX = 4
# Above, in and below the strip: what follows within a moment is not drawn over.
_MARK_HEIGHTS: dict[MarkKind, int] = {"fault": 7, "detection": 39, "restore": 23, "commit": 23}
_MARK_SHAPES: dict[MarkKind, Html] = {
    "fault": h("path", d="M-6 -7 L6 5 M6 -7 L-6 5"),
    "detection": h("path", d="M0 -8 L7 5 L-7 5 Z"),
    "restore": h("circle", r=6),
    "commit": h("path", d="M0 -13 V13"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a rank did from one time to another, in seconds since the run began. "lost" is training whose result was
    thrown away by a restore."""

    start_seconds: float
    end_seconds: float
    kind: SpanKind
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one time, in seconds since the run began."""

    at_seconds: float
    kind: MarkKind
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One strip: a rank, a keeper, the coordinator."""

    name: str
    spans: Sequence[Span] = ()
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run. `title` is the name of the verdict that it belongs to, if there is one."""

    title: str
    lanes: Sequence[Lane]


def timeline_html(timeline: Timeline) -> Html:
    """The drawing, a line for each strip, and all marks as a list."""
    end = max(_ends(timeline), default=0.0) or 1.0
    marks = sorted(
        ((mark, lane.name) for lane in timeline.lanes for mark in lane.marks), key=lambda one: one[0].at_seconds
    )
    listed = [
        h(
            "li",
            h("span", _time(mark.at_seconds), class_="when"),
            f" {lane}: ",
            h("b", MARK_WORDS[mark.kind]),
            f": {mark.label}" if mark.label else None,
        )
        for mark, lane in marks
    ]
    events = h("details", h("summary", f"{len(marks)} events, as a list"), h("ol", listed)) if marks else None
    lanes = [_lane(lane, end) for lane in timeline.lanes]
    return join([h("figure", h("figcaption", timeline.title), lanes, _axis(end)), events])


def legend_html() -> Html:
    """What the patterns and shapes mean."""
    spans = [
        h("li", h("svg", _rect(f"span {kind}", 22, 14), aria_hidden="true", width=22, height=14), words)
        for kind, words in SPAN_WORDS.items()
    ]
    marks = [
        h("li", h("svg", _mark(kind, "11", 13), aria_hidden="true", width=22, height=26), words)
        for kind, words in MARK_WORDS.items()
    ]
    return h("ul", spans, marks, class_="legend row")


def _rect(kind: str, width: float, height: int) -> Html:
    return h("rect", class_=kind, width=width, height=height)


def _mark(kind: MarkKind, x: str, y: int, label: Html | None = None) -> Html:
    return h("svg", _MARK_SHAPES[kind], label, x=x, y=y, class_=f"mark {kind}", overflow="visible")


HATCH = h(
    "svg",
    h(
        "defs",
        h(
            "pattern",
            _rect("hatch-back", 6, 6),
            _rect("hatch-line", 2.5, 6),
            id="hatch",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        ),
    ),
    aria_hidden="true",
    class_="unseen",
)
"""The pattern that drawings refer to; once a page."""


def _lane(lane: Lane, end: float) -> Html:
    spans = [
        h(
            "rect",
            h("title", _span_text(span)),
            x=_share(span.start_seconds, end),
            y=(_LANE_PIXELS - _STRIP_PIXELS) // 2,
            width=_share(max(0.0, span.end_seconds - span.start_seconds), end),
            height=_STRIP_PIXELS,
            class_=f"span {span.kind}",
        )
        for span in lane.spans
    ]
    marks = [
        _mark(mark.kind, _share(mark.at_seconds, end), _MARK_HEIGHTS[mark.kind], h("title", _mark_text(mark)))
        for mark in lane.marks
    ]
    told = f"{lane.name}: " + ("; ".join(_span_text(span) for span in lane.spans) or "nothing known")
    strip = h("svg", spans, marks, role="img", aria_label=told, width="100%", height=_LANE_PIXELS)
    return h("div", h("span", lane.name, class_="lane-name"), strip, class_="lane")


def _axis(end: float) -> Html:
    ticks = [
        (
            h("line", x1=_share(at, end), x2=_share(at, end), y1=0, y2=5),
            h("text", _time(at), x=_share(at, end), y=17, text_anchor="start" if at == 0 else "middle"),
        )
        for at in _ticks(end)
    ]
    return h("svg", ticks, class_="scale", aria_hidden="true", width="100%", height=_AXIS_PIXELS)


def _ticks(end: float) -> list[float]:
    """Round times, none so near to the end that its text would be cut off."""
    raw = end / _TICKS_MAX
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * index for index in range(_TICKS_MAX + 1) if step * index <= 0.93 * end]


def _ends(timeline: Timeline) -> list[float]:
    spans = [span.end_seconds for lane in timeline.lanes for span in lane.spans]
    return [*spans, *(mark.at_seconds for lane in timeline.lanes for mark in lane.marks)]


def _share(seconds: float, end: float) -> str:
    return f"{min(100.0, max(0.0, 100 * seconds / end)):.3f}%"


def _span_text(span: Span) -> str:
    words = f"{SPAN_WORDS[span.kind]} from {_time(span.start_seconds)} to {_time(span.end_seconds)}"
    return f"{words}, {span.label}" if span.label else words


def _mark_text(mark: Mark) -> str:
    words = f"{MARK_WORDS[mark.kind]} at {_time(mark.at_seconds)}"
    return f"{words}: {mark.label}" if mark.label else words


def _time(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.0f} ms"
