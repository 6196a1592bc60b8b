"""The report as one HTML page that needs nothing beside itself: no network, no other file, also no script to be read.

Everything that comes from a run is escaped, and a content policy names the one script that may run: a hostile name
that got through would still not be executed.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape

from chaos.report.style import SCRIPT, STYLE
from chaos.report.timeline import HATCH, Timeline, legend_html, timeline_html
from chaos.verdict import Outcome, Verdict, counts

_ORDER = (Outcome.BROKEN, Outcome.UNRECOVERED, Outcome.HELD, Outcome.SKIPPED)
_MEANING = {
    Outcome.BROKEN: "a guarantee was violated",
    Outcome.UNRECOVERED: "nothing was violated, but the run never came back",
    Outcome.HELD: "every guarantee held",
    Outcome.SKIPPED: "could not be tried here",
}
_SHOWN_MAX = 40
"""So many verdicts that held are shown at once; more are folded away."""


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
    chips = "".join(
        f'<li class="{outcome.value}"><b>{found[outcome]}</b> {outcome.value}<small>{_MEANING[outcome]}</small></li>'
        for outcome in _ORDER
    )
    drawn = ""
    if timelines:
        drawn = (
            f'<section aria-labelledby="over-time"><h2 id="over-time">What the ranks did</h2>{legend_html()}'
            f"{''.join(map(timeline_html, timelines))}</section>"
        )
    groups = "".join(_group(outcome, [one for one in verdicts if one.outcome is outcome]) for outcome in _ORDER)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(_headline(found))}: {escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{HATCH}
<header>
<p class="verdict {_worst(found)}">{escape(_headline(found))}</p>
<h1>{escape(title)}</h1>
<dl>
<dt>again with</dt><dd><code>{escape(command)}</code></dd>
<dt>seed</dt><dd><code>{seed}</code></dd>
<dt>made</dt><dd>{made}</dd>
</dl>
</header>
<main>
<ul class="counts">{chips}</ul>
{drawn}
<section aria-labelledby="verdicts"><h2 id="verdicts">Verdicts</h2>
<p class="filter" hidden><label for="filter">Show only what contains</label>
<input id="filter" type="search" autocomplete="off"> <span id="shown" role="status"></span></p>
{groups}
</section>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _headline(found: dict[str, int]) -> str:
    if not any(found.values()):
        return "Nothing was tried"
    if found[Outcome.BROKEN]:
        return f"{found[Outcome.BROKEN]} broken"
    if found[Outcome.UNRECOVERED]:
        return f"{found[Outcome.UNRECOVERED]} never recovered"
    return f"{found[Outcome.HELD]} held" if found[Outcome.HELD] else "Nothing could be tried here"


def _worst(found: dict[str, int]) -> str:
    return next((outcome.value for outcome in _ORDER if found[outcome]), Outcome.SKIPPED.value)


def _group(outcome: Outcome, verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    is_open = outcome in (Outcome.BROKEN, Outcome.UNRECOVERED) or len(verdicts) <= _SHOWN_MAX
    # On a narrow screen rows are laid out as cards, and browsers then no longer take the table for one.
    rows = "".join(map(_row, verdicts))
    return f"""<details class="group {outcome.value}"{" open" if is_open else ""}>
<summary><h3>{len(verdicts)} {outcome.value}</h3> <span>{_MEANING[outcome]}</span></summary>
<table role="table"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">what was tried</th>
<th role="columnheader" scope="col">what was seen</th><th role="columnheader" scope="col">seconds</th>
<th role="columnheader" scope="col">again with</th></tr></thead>
<tbody role="rowgroup">{rows}</tbody></table>
</details>
"""


def _row(verdict: Verdict) -> str:
    replay = f"<code>{escape(verdict.replay)}</code>" if verdict.replay else ""
    return (
        f'<tr role="row"><th role="rowheader" scope="row">{escape(verdict.name)}</th>'
        f'<td role="cell" class="detail">{escape(verdict.detail)}</td>'
        f'<td role="cell" class="seconds">{verdict.seconds:.2f}</td><td role="cell">{replay}</td></tr>\n'
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
