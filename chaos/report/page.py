"""The report as one HTML page that needs nothing beside itself: no network, no other file, no script to be read."""

import time
from collections.abc import Sequence

from chaos.report.timeline import HATCH, Timeline, legend_html, timeline_html
from chaos.verdict import Outcome, Verdict, counts
from orchestrator.observe.html.blocks import facts, figure_of, section
from orchestrator.observe.html.document import document, resource_of
from orchestrator.observe.html.markup import Html, h, join

_ORDER = (Outcome.BROKEN, Outcome.UNRECOVERED, Outcome.HELD, Outcome.SKIPPED)
_MEANING = {
    Outcome.BROKEN: "a guarantee was violated",
    Outcome.UNRECOVERED: "nothing was violated, but the run never came back",
    Outcome.HELD: "every guarantee held",
    Outcome.SKIPPED: "could not be tried here",
}
_TONES = {Outcome.BROKEN: "bad", Outcome.UNRECOVERED: "warn", Outcome.HELD: "ok", Outcome.SKIPPED: "done"}
_SHOWN_MAX = 40
"""So many verdicts that held are shown at once; more are folded away."""
_COLUMNS = ("what was tried", "what was seen", "seconds", "again with")


def page_html(
    *,
    title: str,
    command: str,
    seed: int,
    verdicts: Sequence[Verdict],
    timelines: Sequence[Timeline],
    created_at: float,
) -> str:
    """The whole page."""
    found = counts(verdicts)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(created_at))
    worst = next((outcome for outcome in _ORDER if found[outcome]), Outcome.SKIPPED)
    replay = facts([("again with", h("code", command)), ("seed", h("code", seed)), ("made", made)])
    header = h("header", h("h1", title), h("p", _headline(found), class_=f"state {_TONES[worst]}"), replay)
    keys = [
        figure_of(
            outcome.value,
            found[outcome],
            _MEANING[outcome],
            tone=_TONES[outcome] if found[outcome] else "",
            id_=f"count-{outcome.value}",
        )
        for outcome in _ORDER
    ]
    drawn = section("What the ranks did", legend_html(), map(timeline_html, timelines), id_="over-time")
    filtering = h(
        "p",
        h("label", "Show only what contains", for_="filter"),
        h("input", id="filter", type="search", autocomplete="off"),
        h("span", id="shown", role="status"),
        class_="filter",
        hidden=True,
    )
    groups = [_group(outcome, [one for one in verdicts if one.outcome is outcome]) for outcome in _ORDER]
    main = h(
        "main",
        header,
        h("div", keys, class_="keys"),
        drawn if timelines else None,
        section("Verdicts", filtering, groups, id_="verdicts"),
    )
    return document(
        f"{_headline(found)}: {title}",
        join([HATCH, main]),
        script=resource_of(__package__, "page.js"),
        style=resource_of(__package__, "page.css"),
    )


def _headline(found: dict[str, int]) -> str:
    if not any(found.values()):
        return "Nothing was tried"
    if found[Outcome.BROKEN]:
        return f"{found[Outcome.BROKEN]} broken"
    if found[Outcome.UNRECOVERED]:
        return f"{found[Outcome.UNRECOVERED]} never recovered"
    return f"{found[Outcome.HELD]} held" if found[Outcome.HELD] else "Nothing could be tried here"


def _group(outcome: Outcome, verdicts: Sequence[Verdict]) -> Html | None:
    if not verdicts:
        return None
    heads = [h("th", name, role="columnheader", scope="col") for name in _COLUMNS]
    # On a narrow screen rows are laid out as cards, and browsers then no longer take the table for one.
    table = h(
        "table",
        h("thead", h("tr", heads, role="row"), role="rowgroup"),
        h("tbody", map(_row, verdicts), role="rowgroup"),
        role="table",
    )
    return h(
        "details",
        h("summary", h("h3", f"{len(verdicts)} {outcome.value}"), h("span", _MEANING[outcome], class_="note")),
        table,
        class_=f"group {outcome.value}",
        open=outcome in (Outcome.BROKEN, Outcome.UNRECOVERED) or len(verdicts) <= _SHOWN_MAX,
    )


def _row(verdict: Verdict) -> Html:
    return h(
        "tr",
        h("th", verdict.name, role="rowheader", scope="row"),
        h("td", verdict.detail, role="cell", class_="detail"),
        h("td", f"{verdict.seconds:.2f}", role="cell", class_="seconds"),
        h("td", h("code", verdict.replay) if verdict.replay else None, role="cell"),
        role="row",
    )
