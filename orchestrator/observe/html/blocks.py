"""Tables, figures and parts of a whole. Geometry is in SVG attributes, since the page's policy allows no styles beside
its own sheet; colours are classes of that sheet, `fill-<kind>`."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from orchestrator.observe import words
from orchestrator.observe.html.markup import Html, h, join


def section(title: str, *children: object, id_: str, note: object = None) -> Html:
    """With a heading that it is named by."""
    heading = h("h2", title, id=f"{id_}-title")
    return h(
        "section",
        heading,
        h("p", note, class_="note") if note else None,
        *children,
        id=id_,
        aria_labelledby=f"{id_}-title",
    )


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = (), id_: str
) -> Html:
    """`numbers`: columns that are set to the right. The first column heads its row. On a narrow screen the table
    scrolls in its own frame, which the keyboard reaches."""
    right = set(numbers)
    style = ["num" if index in right else None for index in range(len(columns))]
    head = h("tr", [h("th", name, scope="col", class_=style[index]) for index, name in enumerate(columns)])
    body = [
        h(
            "tr",
            [
                h("th", cell, scope="row", class_=style[0]) if index == 0 else h("td", cell, class_=style[index])
                for index, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    inner = h("table", h("caption", caption, class_="unseen"), h("thead", head), h("tbody", body))
    return h("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption, id=id_)


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values."""
    return h("dl", [h("div", h("dt", name), h("dd", value)) for name, value in pairs], class_="facts")


def figure_of(name: str, value: object, more: object = None, *, tone: str = "", id_: str) -> Html:
    """One of the numbers that matter most."""
    return h(
        "div",
        h("h2", name),
        h("p", value, class_="value"),
        h("p", more, class_="more") if more else None,
        class_=f"key {tone}".strip(),
        id=id_,
    )


def alert(tone: str, title: str, detail: str = "") -> Html:
    return h(
        "div",
        h("strong", title),
        h("p", words.cut(detail), class_="error-text") if detail else None,
        class_=f"alert {tone}",
    )


def parts_bar(parts: Mapping[str, float], names: Mapping[str, str], label: str) -> Html:
    """Parts of a whole side by side, with what they are below. Parts of nothing are left out."""
    whole = sum(parts.values())
    shown = {kind: part for kind, part in parts.items() if part > 0}
    rects, left = [], 0.0
    for kind, part in shown.items():
        width = 1000 * part / whole
        rects.append(
            h(
                "rect",
                h("title", names[kind]),
                x=f"{left:.2f}",
                y=0,
                width=f"{width:.2f}",
                height=10,
                class_=f"fill-{kind}",
            )
        )
        left += width
    told = "; ".join(f"{names[kind]} {words.percent(part / whole)}" for kind, part in shown.items())
    legend = [
        h(
            "li",
            swatch(kind),
            h("span", names[kind], class_="name"),
            h("span", words.long_duration(part), class_="num"),
            h("span", words.percent(part / whole), class_="num part"),
        )
        for kind, part in shown.items()
    ]
    return join(
        [
            h(
                "svg",
                rects,
                viewBox="0 0 1000 10",
                preserveAspectRatio="none",
                class_="parts",
                role="img",
                aria_label=f"{label}: {told}",
            ),
            h("ul", legend, class_="legend"),
        ]
    )


def swatch(kind: str) -> Html:
    return h(
        "svg",
        h("rect", width=10, height=10, rx=2, class_=f"fill-{kind}"),
        viewBox="0 0 10 10",
        class_="swatch",
        aria_hidden="true",
    )


def at_time(at: float, *, day: bool = False) -> Html:
    """A point in time, UTC."""
    shown = words.day_time(at) if day else words.clock_time(at)
    return h("time", shown, datetime=datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"))


def ago(at: float, now: float) -> Html:
    """How long ago, which the page's script goes on counting."""
    return h("span", f"{words.long_duration(float(round(max(0.0, now - at))))} ago", data_ago=f"{at:.1f}")
