"""The status page, drawn on the server from the state document. The page's script only asks for it again and takes over
what has changed, so a browser without script shows the same, as of loading."""

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.observe import words
from orchestrator.observe.html import blocks
from orchestrator.observe.html.charts import timeline_chart
from orchestrator.observe.html.document import document, resource_of
from orchestrator.observe.html.kinds import KIND_NAMES, grouped
from orchestrator.observe.html.markup import Html, h, join
from orchestrator.observe.timeline import Timeline

_RANKS_SHOWN = 32
_STATES: Mapping[str, tuple[str, str]] = {
    "starting": ("Starting", "busy"),
    "training": ("Training", "ok"),
    "recovering": ("Recovering", "warn"),
    "finished": ("Finished", "done"),
    "stopped": ("Stopped", "bad"),
}
_CONDITIONS: Mapping[str, tuple[str, str]] = {
    "ok": ("", "plain"),
    "ended": ("ended", "plain"),
    "dead": ("died", "bad"),
    "suspected": ("may hang", "bad"),
    "silent": ("silent", "bad"),
    "slow": ("slow", "warn"),
}
_TIERS = {"durable": "checkpoint", "memory": "snapshot in memory"}


def page(state: Mapping[str, Any], timeline: Timeline) -> str:
    """The whole page."""
    name = state["run"]["name"]
    body = join(
        [
            main(state, timeline),
            h("noscript", h("p", "Without script this page shows the run as of loading.", class_="note")),
        ]
    )
    return document(f"{name} - lastgood", body, script=resource_of(__package__, "page.js"), connects=True)


def main(state: Mapping[str, Any], timeline: Timeline) -> Html:
    """All that changes, as one element."""
    return h(
        "main",
        _head(state),
        h("p", "", id="connection", role="status", class_="alert warn", hidden=True),
        h("div", _alerts(state), id="alerts"),
        h("div", _progress(state), _protection(state), _cost(state), class_="keys"),
        blocks.section("Timeline", timeline_chart(timeline, state["now"]), id_="timeline"),
        h(
            "div",
            h(
                "div",
                blocks.section("What happened", _happenings(state), id_="happenings"),
                _ranks(state),
                class_="column",
            ),
            h("div", _where(state), _lost(state), _cadence(state), _saves(state), class_="column"),
            class_="columns",
        ),
        h("footer", "All times UTC. As one document: ", h("a", "state.json", href="state.json"), "."),
        data_now=f"{state['now']:.3f}",
        data_title=f"{_STATES[state['state']['name']][0]}: {state['run']['name']}",
    )


# ------------------------------------------------------------ the top


def _head(state: Mapping[str, Any]) -> Html:
    told = state["state"]
    name, tone = _STATES[told["name"]]
    if state["protection"]["level"] == "unprotected" and told["name"] == "training":
        name, tone = "Training, unprotected", "bad"
    elif state["problems"] and tone == "ok":
        tone = "warn"
    since = [", since ", blocks.at_time(told["since"])] if told["since"] else []
    where = (
        f"generation {told['generation']}, {words.many(told['ranks'], 'rank')}"
        if told["generation"]
        else "no generation yet"
    )
    return h(
        "header",
        h("h1", state["run"]["name"]),
        h("p", h("span", name, class_=f"state {tone}"), role="status", id="state"),
        h("p", where, since, class_="note"),
        h("p", state["run"]["dir"], class_="note path"),
    )


def _alerts(state: Mapping[str, Any]) -> Iterable[Html]:
    told, protection = state["state"], state["protection"]
    last = state["failures"]["last"]
    if told["name"] == "stopped":
        report = f"\nThe report: {told['report']}" if told["report"] else ""
        yield blocks.alert("bad", "The run was stopped", f"{told['reason'] or ''}{report}")
    if protection["level"] == "unprotected":
        age = words.long_duration(state["now"] - protection["unprotected_since"])
        yield blocks.alert(
            "bad",
            f"UNPROTECTED: saves fail, and nothing was saved for {age}",
            next((one["detail"] for one in state["happenings"] if one["kind"] == "unprotected"), ""),
        )
    # What is stopped or unprotected is told above, and in more words.
    if told["name"] != "stopped" and len(state["problems"]) > (protection["level"] == "unprotected"):
        yield blocks.alert("bad", "The run is not well", "\n".join(state["problems"]))
    if told["name"] == "recovering" and last is not None:
        yield blocks.alert(
            "warn",
            f"Recovering: {last['said']}",
            f"after step {last['step']:,}" + (f": {last['error']}" if last["error"] else ""),
        )
    if told["suspected"]:
        ranks = ", ".join(map(str, told["suspected"]))
        yield blocks.alert("warn", f"Rank {ranks} may hang", "nothing moves; it is being found out")


def _progress(state: Mapping[str, Any]) -> Html:
    progress = state["progress"]
    total, step = progress["total_steps"], progress["step"]
    ended = state["state"]["name"] in ("finished", "stopped")
    more: list[object] = []
    if total:
        more.append(h("progress", f"{100 * step // total} %", value=step, max=total, aria_label="steps done"))
    if progress["regaining_step"] is not None and not ended:
        more.append(h("span", f"done before, up to step {progress['regaining_step']:,}"))
    if progress["eta_seconds"] is not None:
        more.append(h("span", f"ends in {words.long_duration(progress['eta_seconds'])} if nothing fails"))
    elif not ended and not total:
        more.append(h("span", "how many steps there will be is not known"))
    if progress["step_seconds"]:
        more.append(h("span", f"{words.duration(progress['step_seconds'])} a step, saves included"))
    if state["loss"] is not None:
        more.append(h("span", f"loss {state['loss']:.6g}"))
    about = "" if state["live"] or ended else " or later"
    value = f"{step:,}{f' of {total:,}' if total else ''}{about}"
    return blocks.figure_of("Step", value, more, id_="progress")


def _protection(state: Mapping[str, Any]) -> Html:
    protection, now = state["protection"], state["now"]
    level = protection["level"]
    more: list[object] = []
    if protection["committed_at"] is not None:
        more.append(h("span", "committed ", blocks.ago(protection["committed_at"], now)))
    if state["state"]["name"] != "finished" and level != "nothing":
        more.append(h("span", f"{words.steps(protection['steps_at_risk'])} since then are not on disk"))
    if protection["memory_step"] is not None:
        more.append(h("span", f"up to step {protection['memory_step']:,} also in other nodes' memory"))
    if level == "nothing":
        return blocks.figure_of(
            "Protected", "nothing yet", [h("span", "no save is committed")], tone="warn", id_="protection"
        )
    tone = "bad" if level == "unprotected" else "ok"
    committed = protection["committed_step"]
    value = f"up to step {committed:,}" if committed is not None else "by an earlier driver's checkpoint"
    return blocks.figure_of("Protected", value, more, tone=tone, id_="protection")


def _cost(state: Mapping[str, Any]) -> Html:
    account, failures = state["account"], state["failures"]
    goodput = account["goodput_ratio"]
    value = "-" if goodput is None else f"{words.percent(goodput)} useful"
    lost = sum(one["seconds"] for one in account["lost"].values())
    steps = sum(one["steps"] for one in account["lost"].values())
    more: list[object] = [h("span", f"of {words.long_duration(account['elapsed_seconds'])}")]
    if failures["count"]:
        more.append(
            h(
                "span",
                f"{words.many(failures['count'], 'failure')} cost {words.long_duration(lost)} "
                f"and {words.steps(steps)} done again",
            )
        )
    else:
        more.append(h("span", "no failures"))
    return blocks.figure_of("Time", value, more, id_="cost")


# ------------------------------------------------------------ below


def _happenings(state: Mapping[str, Any]) -> Html:
    if not state["happenings"]:
        return h("p", "Nothing yet.", class_="note")
    return h(
        "ol",
        [
            h(
                "li",
                blocks.at_time(one["at"]),
                h(
                    "div",
                    h("span", one["title"], class_="title"),
                    h("p", one["detail"], class_="error-text") if one["detail"] else None,
                ),
                class_=one["tone"],
            )
            for one in state["happenings"]
        ],
        class_="happenings",
        reversed=True,
        tabindex="0",
        aria_label="What happened, the newest first",
    )


def _where(state: Mapping[str, Any]) -> Html:
    seconds = grouped(state["account"]["seconds"])
    if not any(seconds.values()):
        return blocks.section("Where the time went", h("p", "No time has passed.", class_="note"), id_="where")
    return blocks.section("Where the time went", blocks.parts_bar(seconds, KIND_NAMES, "Time"), id_="where")


def _lost(state: Mapping[str, Any]) -> Html:
    lost = state["account"]["lost"]
    if not lost:
        return blocks.section("Lost to failures", h("p", "Nothing.", class_="note"), id_="lost")
    rows = [
        (words.cause(cause), one["failures"], f"{one['steps']:,}", words.long_duration(one["seconds"]))
        for cause, one in lost.items()
    ]
    median = state["failures"]["recovery_seconds_median"]
    note = f"From a failure to training again: {words.duration(median)} (median)." if median is not None else None
    return blocks.section(
        "Lost to failures",
        blocks.table(
            "Lost to failures, by cause",
            ("cause", "times", "steps again", "time"),
            rows,
            numbers=(1, 2, 3),
            id_="lost-table",
        ),
        id_="lost",
        note=note,
    )


def _cadence(state: Mapping[str, Any]) -> Html:
    if not state["cadence"]:
        return blocks.section(
            "How often it saves",
            h("p", "Not decided yet, or fixed by the configuration.", class_="note"),
            id_="cadence",
        )
    told = []
    for tier, one in state["cadence"].items():
        steps = f", {words.steps(one['interval_steps'])}" if one["interval_steps"] else ""
        every = f"every {words.duration(one['interval_seconds'])}{steps}"
        told.append((_TIERS.get(tier, tier), join([h("strong", every), h("p", one["why"], class_="note")])))
    return blocks.section("How often it saves", blocks.facts(told), id_="cadence")


def _saves(state: Mapping[str, Any]) -> Html:
    saves = state["saves"]
    told: list[tuple[str, object]] = [
        ("committed", f"{saves['commits']:,}"),
        ("skipped", f"{saves['skipped']:,}"),
        ("failed", f"{saves['failed']:,}"),
    ]
    if saves["bytes"]:
        told.append(("size", words.amount(saves["bytes"])))
    if saves["durable_seconds_median"] is not None:
        told.append(("written in", f"{words.duration(saves['durable_seconds_median'])} (median)"))
    aside = [
        h("p", h("strong", words.cut(name, 200)), ": ", words.cut(reason), class_="note error-text")
        for name, reason in state["quarantined"].items()
    ]
    return blocks.section("Saves", blocks.facts(told), [h("h3", "Set aside"), aside] if aside else None, id_="saves")


def _ranks(state: Mapping[str, Any]) -> Html:
    """Those with which something is the matter first, then in order; of many the rest is only counted."""
    ranks = sorted(state["ranks"], key=lambda one: (_CONDITIONS[one["condition"]][0] in ("", "ended"), one["rank"]))
    shown, rest = ranks[:_RANKS_SHOWN], ranks[_RANKS_SHOWN:]
    rows = []
    for one in shown:
        word, tone = _CONDITIONS[one["condition"]]
        heard = blocks.ago(one["heard_at"], state["now"]) if one["heard_at"] else "-"
        rows.append(
            (
                one["rank"],
                h(
                    "span",
                    word or "training" if state["state"]["name"] == "training" else word or "-",
                    class_=f"condition {tone}",
                ),
                f"{one['step']:,}" if one["step"] is not None else "-",
                heard,
                h("span", (one["node"] or "-")[:8], title=one["node"]),
                one["pid"] or "-",
            )
        )
    note = None
    if rest:
        note = f"{words.many(len(rest), 'more rank')} not shown: nothing is the matter with them."
    if not rows:
        return blocks.section("Ranks", h("p", "None has joined yet.", class_="note"), id_="ranks")
    return blocks.section(
        "Ranks",
        blocks.table(
            "Ranks",
            ("rank", "condition", "step", "last heartbeat", "node", "pid"),
            rows,
            numbers=(2, 3, 5),
            id_="ranks-table",
        ),
        id_="ranks",
        note=note,
    )
