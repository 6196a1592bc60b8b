"""What the ranks of one run did over time, and its drawing: one strip a rank, with marks for what happened to it.

Positions are shares of the width, sizes are pixels: a phone shows the same drawing narrower, with its text as large.
Colour is never the only sign: kinds differ in pattern and shape too, and everything drawn is listed as text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

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
_MARK_SHAPES: dict[MarkKind, str] = {
    "fault": '<path d="M-6 -7 L6 5 M6 -7 L-6 5"/>',
    "detection": '<path d="M0 -8 L7 5 L-7 5 Z"/>',
    "restore": '<circle r="6"/>',
    "commit": '<path d="M0 -13 V13"/>',
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


def timeline_html(timeline: Timeline) -> str:
    """The drawing, a line for each strip, and all marks as a list."""
    end = max(_ends(timeline), default=0.0) or 1.0
    drawn = "".join(_lane(lane, end) for lane in timeline.lanes)
    marks = sorted(
        ((mark, lane.name) for lane in timeline.lanes for mark in lane.marks), key=lambda one: one[0].at_seconds
    )
    listed = "".join(
        f'<li><span class="when">{_time(mark.at_seconds)}</span> {escape(lane)}: <b>{MARK_WORDS[mark.kind]}</b>'
        f"{': ' + escape(mark.label) if mark.label else ''}</li>"
        for mark, lane in marks
    )
    events = f"<details><summary>{len(marks)} events, as a list</summary><ol>{listed}</ol></details>" if marks else ""
    caption = f"<figcaption>{escape(timeline.title)}</figcaption>"
    return f'<figure class="timeline">{caption}{drawn}{_axis(end)}</figure>{events}'


def legend_html() -> str:
    """What the patterns and shapes mean."""
    spans = "".join(
        f'<li><svg aria-hidden="true" width="22" height="14"><rect class="span {kind}" width="22" height="14"/></svg> '
        f"{words}</li>"
        for kind, words in SPAN_WORDS.items()
    )
    marks = "".join(
        f'<li><svg aria-hidden="true" width="22" height="26"><svg x="11" y="13" overflow="visible" '
        f'class="mark {kind}">{_MARK_SHAPES[kind]}</svg></svg> {words}</li>'
        for kind, words in MARK_WORDS.items()
    )
    return f'<ul class="legend">{spans}{marks}</ul>'


HATCH = (
    '<svg aria-hidden="true" width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-back" width="6" '
    'height="6"/><rect class="hatch-line" width="2.5" height="6"/></pattern></defs></svg>'
)
"""The pattern that drawings refer to; once a page."""


def _lane(lane: Lane, end: float) -> str:
    spans = "".join(
        f'<rect class="span {span.kind}" x="{_share(span.start_seconds, end)}" '
        f'width="{_share(max(0.0, span.end_seconds - span.start_seconds), end)}" '
        f'y="{(_LANE_PIXELS - _STRIP_PIXELS) // 2}" height="{_STRIP_PIXELS}">'
        f"<title>{escape(_span_text(span))}</title></rect>"
        for span in lane.spans
    )
    marks = "".join(
        f'<svg x="{_share(mark.at_seconds, end)}" y="{_MARK_HEIGHTS[mark.kind]}" overflow="visible" '
        f'class="mark {mark.kind}">'
        f"{_MARK_SHAPES[mark.kind]}<title>{escape(_mark_text(mark))}</title></svg>"
        for mark in lane.marks
    )
    told = f"{lane.name}: " + ("; ".join(_span_text(span) for span in lane.spans) or "nothing known")
    return (
        f'<div class="lane"><span class="lane-name">{escape(lane.name)}</span>'
        f'<svg role="img" aria-label="{escape(told)}" width="100%" height="{_LANE_PIXELS}">{spans}{marks}</svg></div>'
    )


def _axis(end: float) -> str:
    ticks = "".join(
        f'<line x1="{_share(at, end)}" x2="{_share(at, end)}" y1="0" y2="5"/>'
        f'<text x="{_share(at, end)}" y="17" text-anchor="{"start" if at == 0 else "middle"}">{_time(at)}</text>'
        for at in _ticks(end)
    )
    return f'<svg class="axis" aria-hidden="true" width="100%" height="{_AXIS_PIXELS}">{ticks}</svg>'


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
