"""The report as one HTML file that asks for nothing elsewhere."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.observe import words
from orchestrator.observe.html import blocks
from orchestrator.observe.html.charts import Axis, Rule, Series, line_chart, thinned, timeline_chart
from orchestrator.observe.html.document import document
from orchestrator.observe.html.kinds import KIND_NAMES, grouped
from orchestrator.observe.html.markup import Html, h, join
from orchestrator.observe.run_report.facts import Facts, Point
from orchestrator.observe.run_report.hindsight import Hindsight

_FAILURES_SHOWN = 200
_DOTS_MAX = 300
_STATES = {
    "starting": ("Starting", "busy"),
    "training": ("Training", "ok"),
    "recovering": ("Recovering", "warn"),
    "finished": ("Finished", "done"),
    "stopped": ("Stopped", "bad"),
    "silent": ("No word from it", "bad"),
}
_TIERS = {"durable": "Checkpoints", "memory": "Snapshots in memory"}


def report_page(facts: Facts) -> str:
    """The whole file."""
    told = facts.document
    run = told["run"]
    body = h(
        "main",
        _head(told),
        h("div", _useful(told), _lost(told), _against_hindsight(told), class_="keys"),
        blocks.section("Timeline", timeline_chart(facts.timeline, facts.until), id_="timeline"),
        h(
            "div",
            blocks.section("Progress", _progress(facts), id_="progress"),
            blocks.section(
                "Where the time went",
                blocks.parts_bar(grouped(told["time"]["seconds"]), KIND_NAMES, "Time")
                if told["time"]["elapsed_seconds"]
                else h("p", "No time has passed.", class_="note"),
                id_="where",
            ),
            class_="columns",
        ),
        _failures(told["failures"]),
        [_cadence(one) for one in facts.hindsights.values()],
        _saves(facts),
        h(
            "footer",
            f"Made by lastgood from the run's ledger, {words.day_time(told['generated_at'])} UTC; all times are UTC. ",
            "Each second is in one part of the time, so the parts add up.",
        ),
    )
    return document(f"Report: {run['name']}", body)


def _head(told: Mapping[str, Any]) -> Html:
    run = told["run"]
    name, tone = _STATES[run["state"]]
    size = f"{words.many(run['ranks'], 'rank')} on {words.many(run['nodes'], 'node')}"
    began = "not begun"
    if run["started_at"]:
        began = f"{words.day_time(run['started_at'])} to {words.day_time(run['until'])}"
    reason = blocks.alert("bad", "The run was stopped", run["stop_reason"]) if run["stop_reason"] else None
    if run["state"] == "silent":
        reason = blocks.alert(
            "warn",
            f"Nothing was heard of this run since {words.day_time(run['until'])}, and it has not ended",
            "It may be dead: what is known ends there.",
        )
    return join(
        [
            h(
                "header",
                h("h1", f"Run report: {run['name']}"),
                h("p", h("span", name, class_=f"state {tone}")),
                h(
                    "p",
                    f"{began}, step {run['step']:,}, {size}, {words.many(run['generations'], 'generation')}, "
                    f"{words.many(run['drivers'], 'driver')}",
                    class_="note",
                ),
                h("p", run["dir"], class_="note path"),
            ),
            reason,
        ]
    )


def _useful(told: Mapping[str, Any]) -> Html:
    time = told["time"]
    value = "-" if time["goodput_ratio"] is None else f"{words.percent(time['goodput_ratio'])} useful"
    more = [h("span", f"of {words.long_duration(time['elapsed_seconds'])}")]
    if time["seconds"]["down"]:
        more.append(h("span", f"{words.percent(time['ettr_ratio'] or 0.0)} of the time in which there was a driver"))
    if time["save_overhead_ratio"] is not None:
        more.append(h("span", f"saving took {words.percent(time['save_overhead_ratio'])} of the training"))
    return blocks.figure_of("Time", value, more, id_="useful")


def _lost(told: Mapping[str, Any]) -> Html:
    failures = told["failures"]
    if not failures:
        return blocks.figure_of("Failures", "none", id_="lost")
    lost = sum(one["lost_seconds"] for one in failures)
    steps = sum(one["lost_steps"] for one in failures)
    longest = max(one["lost_seconds"] for one in failures)
    more = [
        h("span", f"{words.many(len(failures), 'failure')}, {words.steps(steps)} done again"),
        h(
            "span",
            f"{words.long_duration(lost / len(failures))} each on average, {words.long_duration(longest)} at most",
        ),
    ]
    return blocks.figure_of("Failures", f"cost {words.long_duration(lost)}", more, id_="lost")


def _against_hindsight(told: Mapping[str, Any]) -> Html:
    """The tier that more was at stake in."""
    tiers = {tier: one for tier, one in told["cadence"].items() if one["as_run_waste_seconds"] is not None}
    if not tiers:
        return blocks.figure_of("How often it saved", "-", [h("span", "too little is known yet")], id_="hindsight")
    tier, one = max(tiers.items(), key=lambda item: item[1]["as_run_waste_seconds"])
    more = [h("span", f"best in hindsight: {_interval(one['best_seconds'])}")]
    if one["as_run_waste_seconds"] > 0:
        gained = max(0.0, one["as_run_waste_seconds"] - one["best_waste_seconds"])
        more.append(h("span", f"that would have spared {words.long_duration(gained)}"))
    return blocks.figure_of(
        f"How often it saved ({_TIERS.get(tier, tier).lower()})",
        _interval(one["as_run_seconds"]),
        more,
        id_="hindsight",
    )


def _progress(facts: Facts) -> Html:
    if len(facts.progress) < 2:
        return h("p", "No step is known yet.", class_="note")
    first, last = facts.progress[0][0], max(facts.until, facts.progress[-1][0])
    return line_chart(
        "Steps done over time; at each failure back to what was restored",
        _time_axis(first, last),
        Axis(low=0.0, high=max(1.0, max(step for _, step in facts.progress)), show=lambda step: f"{step:,.0f}"),
        [Series(name="step", kind="progress", points=thinned(facts.progress, 1500))],
        rules=[
            Rule(name="failure", kind="failure", at=mark.at) for mark in list(facts.timeline.failures)[:_FAILURES_SHOWN]
        ],
    )


def _failures(failures: list[dict[str, Any]]) -> Html:
    if not failures:
        return blocks.section("Failures", h("p", "There were none.", class_="note"), id_="failures")
    costly = sorted(failures, key=lambda one: -one["lost_seconds"])[:_FAILURES_SHOWN]
    rows = [
        (
            one["number"],
            blocks.at_time(one["failed_at"], day=True),
            h(
                "div",
                one["said"],
                h("p", words.cut(one["error"], 400), class_="note error-text") if one["error"] else None,
                class_="long",
            ),
            f"{max(0, one['step']):,}",
            _restored(one),
            f"{one['lost_steps']:,}",
            _since(one, "noticed_at"),
            _since(one, "stepped_at"),
            _since(one, "regained_at"),
            words.long_duration(one["lost_seconds"]),
        )
        for one in sorted(costly, key=lambda one: int(one["number"]))
    ]
    columns = (
        "",
        "when",
        "what",
        "after step",
        "restored",
        "steps again",
        "noticed after",
        "training after",
        "made up after",
        "cost",
    )
    note = None
    if len(failures) > len(costly):
        note = f"The {len(costly)} of {len(failures)} failures that cost most."
    return blocks.section(
        "Failures and what each cost",
        blocks.table("Failures", columns, rows, numbers=(3, 5, 6, 7, 8, 9), id_="failures-table"),
        _by_cause(failures),
        id_="failures",
        note=note,
    )


def _by_cause(failures: Iterable[Mapping[str, Any]]) -> Html | None:
    causes: dict[str, list[Mapping[str, Any]]] = {}
    for one in failures:
        causes.setdefault(one["cause"], []).append(one)
    if len(causes) < 2:
        return None
    rows = [
        (
            words.cause(cause),
            f"{len(some):,}",
            f"{sum(one['lost_steps'] for one in some):,}",
            words.long_duration(sum(one["lost_seconds"] for one in some)),
        )
        for cause, some in sorted(causes.items(), key=lambda item: -sum(one["lost_seconds"] for one in item[1]))
    ]
    return join(
        [
            h("h3", "By cause"),
            blocks.table(
                "Lost by cause", ("cause", "times", "steps again", "cost"), rows, numbers=(1, 2, 3), id_="causes"
            ),
        ]
    )


def _restored(one: Mapping[str, Any]) -> str:
    if one["restored_step"] is None:
        return "not yet"
    return f"{one['restored_step']:,}, {words.SOURCES.get(one['source'], one['source'])}"


def _since(one: Mapping[str, Any], name: str) -> str:
    return "-" if one[name] is None else words.duration(one[name] - one["failed_at"])


def _cadence(one: Hindsight) -> Html:
    """What each fixed interval would have wasted, with the failures that there were."""
    rows = [
        ("best in hindsight", _interval(one.best_seconds), words.long_duration(one.best_waste_seconds)),
        (
            "formula, at the rate that it had",
            _interval(one.formula_seconds),
            words.long_duration(one.formula_waste_seconds),
        ),
    ]
    rules = []
    if one.as_run_seconds is not None and one.as_run_waste_seconds is not None:
        rows.insert(0, ("as it was", _interval(one.as_run_seconds), words.long_duration(one.as_run_waste_seconds)))
        rules.append(Rule(name="as it was", kind="run", at=one.as_run_seconds))
    if math.isfinite(one.best_seconds):
        rules.append(Rule(name="best in hindsight", kind="best", at=one.best_seconds))
    low, high = one.curve[0][0], one.curve[-1][0]
    if math.isfinite(one.formula_seconds) and low <= one.formula_seconds <= high:
        rules.append(Rule(name="formula", kind="formula", at=one.formula_seconds))
    note = (
        f"{words.many(one.failures, 'failure')} in {words.long_duration(one.trained_seconds)} of training went back to "
        f"these; one costs {words.duration(one.cost.cost_seconds)}. What each fixed interval would have wasted, "
        f"with just these failures:"
    )
    most = max(waste for _, waste in one.curve)
    return blocks.section(
        f"How often: {_TIERS.get(one.tier, one.tier).lower()}",
        h(
            "div",
            line_chart(
                f"Waste by interval; least, {words.duration(one.best_waste_seconds)}, {_interval(one.best_seconds)}",
                Axis(low=low, high=high, show=words.duration, log=True),
                Axis(low=0.0, high=most or 1.0, show=words.duration),
                [Series(name="wasted, by interval between saves", kind="model", points=one.curve)],
                rules=rules,
            ),
            blocks.table(
                f"Intervals, {one.tier}", ("", "every", "wasted"), rows, numbers=(1, 2), id_=f"table-{one.tier}"
            ),
            class_="columns",
        ),
        id_=f"cadence-{one.tier}",
        note=note,
    )


def _saves(facts: Facts) -> Html:
    saves, storage = facts.document["saves"], facts.document["storage"]
    told: list[tuple[str, object]] = [
        ("saves", f"{saves['committed']:,} committed, {saves['skipped']:,} skipped, {saves['failed']:,} failed"),
        ("stall", _spread(saves["stall_seconds"])),
        ("restorable after", _spread(saves["restorable_seconds"])),
        ("slowed steps by", _spread(saves["interference_seconds"])),
        ("size", words.amount(saves["bytes"]) if saves["bytes"] else "-"),
        ("written", _amount(storage["written_bytes"], storage["written_bytes_per_second"])),
        ("read back", words.amount(storage["read_back_bytes"])),
        ("read to restore", words.amount(storage["restored_bytes"])),
    ]
    if storage["copied_bytes_at_least"]:
        told.append(("copied to other nodes", f"at least {words.amount(storage['copied_bytes_at_least'])}"))
    aside = [
        h("p", h("strong", words.cut(name, 200)), ": ", words.cut(reason, 400), class_="note error-text")
        for name, reason in saves["quarantined"].items()
    ]
    return blocks.section(
        "Saves and storage",
        h("div", _save_charts(facts), blocks.facts(told), class_="columns"),
        [h("h3", "Set aside"), aside] if aside else None,
        id_="saves",
    )


def _save_charts(facts: Facts) -> Html:
    if len(facts.durable) < 2:
        return h("p", "Fewer than two saves are committed.", class_="note")
    axis = _time_axis(facts.durable[0][0], facts.durable[-1][0])
    most = max(value for _, value in facts.durable)
    return h(
        "div",
        line_chart(
            "Seconds that each save took to be written, and stalled training",
            axis,
            Axis(low=0.0, high=max(most, *(value for _, value in facts.stalls)) or 1.0, show=words.duration),
            [
                Series(name="written in", kind="durable", points=_some(facts.durable), dots=True),
                Series(name="stall", kind="stall", points=_some(facts.stalls), dots=True),
            ],
            height=120,
        ),
        line_chart(
            "Bytes written by saves, in all",
            axis,
            Axis(low=0.0, high=facts.written[-1][1] or 1.0, show=words.amount),
            [Series(name="written in all", kind="model", points=thinned(facts.written))],
            height=120,
        ),
    )


def _some(points: list[Point]) -> list[Point]:
    return thinned(points, _DOTS_MAX)


def _time_axis(first: float, last: float) -> Axis:
    return Axis(low=first, high=max(last, first + 1e-3), show=words.day_time)


def _interval(seconds: float) -> str:
    return f"every {words.duration(seconds)}" if math.isfinite(seconds) else "never"


def _spread(spread: Mapping[str, float] | None) -> str:
    return (
        "-"
        if spread is None
        else f"{words.duration(spread['median'])} (median), {words.duration(spread['max'])} at most"
    )


def _amount(count: float, per_second: float | None) -> str:
    rate = f", {words.amount(per_second)}/s on average" if per_second else ""
    return f"{words.amount(count)}{rate}"
