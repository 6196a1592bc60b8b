"""What comes from a run stays text in a page, whatever it holds."""

import json
from pathlib import Path

import pytest
from page_samples import HOSTILE, STORIES, stopped

from orchestrator.observe import words
from orchestrator.observe.accounting import KINDS
from orchestrator.observe.html.charts import thinned
from orchestrator.observe.html.document import document
from orchestrator.observe.html.kinds import grouped
from orchestrator.observe.html.markup import Html, h, join
from orchestrator.observe.page.status_page import StatusPage


def test_children_and_attributes_are_escaped_and_markup_is_not() -> None:
    element = h("p", "a < b & c", h("b", '"'), [None, False, 3], class_="x", data_name='"><script>', hidden=False)
    assert element == ('<p class="x" data-name="&quot;&gt;&lt;script&gt;">a &lt; b &amp; c<b>&quot;</b>3</p>')
    assert h("rect", x=1, hidden=True) == '<rect x="1" hidden=""/>'


def test_signs_that_cannot_be_seen_or_turn_text_around_are_replaced() -> None:
    shown = join([HOSTILE])
    assert "\u202e" not in shown and "\x07" not in shown and "\u2066" not in shown
    assert shown.encode()  # half of a surrogate pair could not be sent
    assert join(["two\nlines\tand a tab, Übung, 日本"]) == "two\nlines\tand a tab, Übung, 日本"


def test_a_page_names_what_may_run_and_asks_for_nothing_elsewhere() -> None:
    page = document("t", h("main", "x"), script="1;", connects=True)
    assert "default-src &#x27;none&#x27;" in page
    assert "script-src &#x27;sha256-" in page
    assert "unsafe" not in page
    assert not [line for line in page.splitlines() if "http://" in line or "https://" in line]
    assert "script-src" not in document("t", Html(""))


@pytest.mark.parametrize("name", sorted(STORIES))
def test_every_page_is_well_formed_down_to_hostile_names(name: str, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    story = STORIES[name]()
    page = StatusPage(
        tmp_path / HOSTILE.replace("/", "").encode(errors="replace").decode(), clock=lambda: story.now + 4
    )
    page.take_all(story.entries)
    root = ElementTree.fromstring(page.main())  # all that is opened is closed, so no text has become an element
    assert not list(root.iter("script")) and not list(root.iter("img"))
    json.loads(page.state_json())


def test_long_errors_are_cut() -> None:
    assert len(words.cut("x" * 100_000)) < 3000
    story = stopped("x" * 1_000_000)
    page = StatusPage(Path("/run"), clock=lambda: story.now)
    page.take_all(story.entries)
    assert len(page.page()) < 120_000


def test_every_kind_of_time_is_shown_in_one_group() -> None:
    assert sum(grouped(dict.fromkeys(KINDS, 1.0)).values()) == len(KINDS)


def test_thinning_keeps_the_ends() -> None:
    points = [(float(n), 0.0) for n in range(10_000)]
    few = thinned(points, 100)
    assert len(few) == 100 and few[0] == points[0] and few[-1] == points[-1]
