"""The report of a chaos run: three files that say the same, and a page that reads well in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from chaos.report import Lane, Mark, Span, Timeline, write_report
from chaos.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</title></style><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>\"'&\x00\x1b\udcff]]>"
LONG = "step-000000120-g0007-a01/" * 20
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 800}

VERDICTS = (
    Verdict(
        name="rank 1, persist.fsync, SIGKILL",
        outcome=Outcome.BROKEN,
        detail=f"never lost: {LONG} is gone\nlook into cell-17",
        seconds=0.3,
        replay=f"lastgood chaos matrix --only {LONG}",
        facts={"ratio": float("nan"), "path": Path("x")},
    ),
    Verdict(name="coordinator, commit.rename, EIO", outcome=Outcome.UNRECOVERED, detail="it never came back"),
    *(Verdict(name=f"held {number}", outcome=Outcome.HELD, detail="restored step 20") for number in range(50)),
    Verdict(name="rank 0, restore.read, torn write", outcome=Outcome.SKIPPED, detail="nothing is written there"),
)
TIMELINE = Timeline(
    title="rank 1, persist.fsync, SIGKILL",
    lanes=[
        Lane(
            name=f"rank {rank}",
            spans=[
                Span(start_seconds=0, end_seconds=8, kind="training", label="steps 0 to 47"),
                Span(start_seconds=6, end_seconds=8, kind="lost", label="steps 40 to 47"),
                Span(start_seconds=8, end_seconds=9, kind="recovering"),
                Span(start_seconds=9, end_seconds=20, kind="training"),
            ],
            marks=[
                Mark(at_seconds=6, kind="commit", label="step 40"),
                Mark(at_seconds=8, kind="fault", label="SIGKILL"),
                Mark(at_seconds=8.1, kind="detection"),
                Mark(at_seconds=9, kind="restore", label="step 40"),
            ],
        )
        for rank in range(3)
    ],
)


def write(directory: Path, *, verdicts: tuple[Verdict, ...] = VERDICTS, title: str = "Kill matrix") -> Path:
    return write_report(
        directory,
        title=title,
        command=f"lastgood chaos matrix --seed 7 --out {LONG}",
        seed=7,
        verdicts=verdicts,
        timelines=[TIMELINE],
        created_at=0.0,
    )


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: "Browser") -> "Iterator[Page]":
    """A phone's page; any request and any complaint fails the test."""
    context = browser.new_context(viewport=PHONE, color_scheme=request.param)
    page = context.new_page()
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else trouble.append(request.url))
    yield page
    context.close()
    assert not trouble


def test_json_and_junit_say_what_the_verdicts_say(tmp_path: Path) -> None:
    write(tmp_path / "new" / "report")
    report = json.loads((tmp_path / "new/report/report.json").read_bytes())
    assert report["counts"] == {"held": 50, "broken": 1, "unrecovered": 1, "skipped": 1}
    assert (report["seed"], report["title"]) == (7, "Kill matrix")
    assert [one["name"] for one in report["verdicts"]] == [verdict.name for verdict in VERDICTS]
    assert report["verdicts"][0]["facts"] == {"ratio": "nan", "path": "x"}
    assert report["timelines"][0]["lanes"][2]["marks"][1]["kind"] == "fault"
    [suite] = ElementTree.parse(tmp_path / "new/report/junit.xml").getroot()
    assert {key: suite.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "53",
        "failures": "2",
        "skipped": "1",
    }
    broken = suite.find("testcase[@name='rank 1, persist.fsync, SIGKILL']")
    assert broken is not None
    assert VERDICTS[0].detail == broken.findtext("failure")
    assert VERDICTS[0].replay in (broken.findtext("system-out") or "")
    assert suite.find("properties/property[@name='seed']").get("value") == "7"  # type: ignore[union-attr]


def test_a_report_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, verdicts=VERDICTS[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.html", "report.json"]
    assert len(json.loads((tmp_path / "report.json").read_bytes())["verdicts"]) == 1


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    path = write_report(tmp_path, title="t", command="c", seed=0, verdicts=())
    assert "Nothing was tried" in path.read_text()


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page: "Page", tmp_path: Path) -> None:
    page.goto(write(tmp_path).as_uri())
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        assert page.get_by_text("1 broken", exact=True).first.is_visible()
        assert page.get_by_text("cell-17").is_visible()
        for rectangle in page.locator(".lane rect").all():
            box = rectangle.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size["width"]
            assert box["width"] > 5


def test_every_text_can_be_told_from_its_ground(page: "Page", tmp_path: Path) -> None:
    """Contrast of at least 4.5 (WCAG AA)."""
    page.goto(write(tmp_path).as_uri())
    found = page.evaluate(
        """() => {
          const light = colour => { const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(Number).map(
            v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const ground = element => { for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.startsWith("rgba(0, 0, 0, 0")) return colour; } return "rgb(255, 255, 255)"; };
          return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() &&
            [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
            const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 30)]; });
        }"""
    )
    assert len(found) > 20
    assert min(found)[0] >= 4.5, min(found)


def test_the_keyboard_reaches_the_folded_verdicts_and_the_filter_finds_one(page: "Page", tmp_path: Path) -> None:
    page.goto(write(tmp_path).as_uri())
    wanted = page.get_by_role("rowheader", name="held 37")
    assert not wanted.is_visible()
    page.get_by_label("Show only what contains").focus()
    page.keyboard.type("held 37")
    assert wanted.is_visible()
    assert not page.get_by_role("rowheader", name="held 38").is_visible()
    assert page.get_by_role("status").inner_text() == "1 of 53"
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    assert not wanted.is_visible()
    page.locator("details.held summary").focus()
    page.keyboard.press("Enter")
    assert wanted.is_visible()


def test_what_is_drawn_is_also_told(page: "Page", tmp_path: Path) -> None:
    page.goto(write(tmp_path).as_uri())
    strip = page.get_by_role("img", name="rank 1: training from 0 s to 8 s, steps 0 to 47; work that was lost from 6 s")
    assert strip.is_visible()
    page.get_by_text("12 events, as a list").click()
    assert page.get_by_role("listitem").filter(has_text="rank 1: restored: step 40").is_visible()
    assert page.get_by_role("row").filter(has_text="SIGKILL").is_visible()  # a table also where rows are cards


def test_hostile_names_are_text_and_nothing_else(page: "Page", tmp_path: Path) -> None:
    verdicts = tuple(
        Verdict(name=f"{outcome} {HOSTILE}", outcome=outcome, detail=HOSTILE, replay=HOSTILE) for outcome in Outcome
    )
    lane = Lane(
        name=HOSTILE,
        spans=[Span(start_seconds=0, end_seconds=1, kind="lost", label=HOSTILE)],
        marks=[Mark(at_seconds=0.5, kind="fault", label=HOSTILE)],
    )
    path = write_report(
        tmp_path,
        title=HOSTILE,
        command=HOSTILE,
        seed=1,
        verdicts=verdicts,
        timelines=[Timeline(title=HOSTILE, lanes=[lane])],
    )
    page.goto(path.as_uri())
    assert page.evaluate("window.hurt") is None
    assert page.locator("script").count() == 1
    assert page.locator("img:not([role])").count() == 0
    assert "<script>window.hurt = 1</script>" in page.get_by_role("heading", level=1).inner_text()
    [suite] = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert "<script>window.hurt" in suite.get("name", "")
    assert json.loads((tmp_path / "report.json").read_bytes())["title"] == HOSTILE
