"""The status page in a real browser, served by the exporter's server: it follows the run, and nothing can harm it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_samples import HOSTILE, STORIES, Story, healthy, live, stopped

from orchestrator.observe.page.status_page import StatusPage
from orchestrator.observe.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 900}


class Site:
    """A page at an address. `now`: its clock. `asked`: the paths that browsers asked for."""

    def __init__(self, story: Story, name: str = "gpt-7b") -> None:
        self.story = story
        self.now = story.now
        self.live: dict[str, Any] | None = live(story)
        self.page = StatusPage(Path("/mnt/ckpt") / name, live=lambda: self.live, clock=lambda: self.now)
        self.page.take_all(story.entries)
        self.server = Server(self.page.routes(), host="127.0.0.1", port=0)
        self.server.start()
        self.address = f"http://{self.server.target}/"
        self._told = len(story.entries)

    def tell(self) -> None:
        """What has happened in the story since."""
        self.page.take_all(self.story.entries[self._told :])
        self._told, self.now = len(self.story.entries), self.story.now


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.server.close()


def opened(browser: "Browser", address: str, **options: Any) -> "Page":
    """In a context of its own; whatever the page asks for elsewhere, or complains about, is collected in `troubles`."""
    page = browser.new_context(viewport=options.pop("viewport", DESKTOP), **options).new_page()
    page.set_default_timeout(15_000)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(address) else troubles.append(request.url))
    page.troubles = troubles  # type: ignore[attr-defined]
    page.goto(address)
    return page


def troubles(page: "Page") -> list[str]:
    return [text for text in page.troubles if "favicon" not in text]  # type: ignore[attr-defined]


def test_the_page_follows_a_failure_and_its_recovery(browser: "Browser", sites: list[Site]) -> None:
    site = Site(healthy())
    sites.append(site)
    page = opened(browser, site.address)
    assert page.locator("#state").inner_text() == "Training"
    assert "up to step 350" in page.locator("#protection").inner_text()
    page.locator("#ranks-table").focus()
    page.evaluate("window.kept = document.querySelector('#timeline svg')")

    story = site.story
    story.fail(3, "exception", error="RuntimeError: device-side assert")
    site.tell()
    page.get_by_text("Recovering: Rank 3: an exception in the training loop").wait_for()
    assert page.locator("#state").inner_text() == "Recovering"
    assert page.locator("#ranks-table .condition.bad").count() == 2  # and the one that went down with it
    assert page.title().startswith("Recovering")

    story.begin("failure", source="memory", restored=375)
    story.train(10)
    site.live = live(story)
    site.tell()
    page.locator("#state", has_text="Training").wait_for()
    assert "8.5 s after the failure" in page.locator("#happenings li").first.inner_text()
    assert page.locator("#alerts").inner_text() == ""
    # Nodes stay the same ones, so neither the keyboard's place nor a reader's is lost.
    assert page.evaluate("document.activeElement.id") == "ranks-table"
    assert page.evaluate("window.kept === document.querySelector('#timeline svg')")
    assert troubles(page) == []


def test_ages_go_on_between_answers_and_a_server_that_is_gone_is_told(browser: "Browser", sites: list[Site]) -> None:
    site = Site(healthy())
    sites.append(site)
    page = opened(browser, site.address)
    before = page.locator("#ranks-table [data-ago]").first.inner_text()
    site.server.close()
    page.locator("#connection", has_text="No answer since").wait_for()
    page.wait_for_function("was => document.querySelector('#ranks-table [data-ago]').innerText !== was", arg=before)


def test_text_from_a_run_is_shown_and_never_run(browser: "Browser", sites: list[Site]) -> None:
    name = HOSTILE.replace("/", "").encode(errors="replace").decode()
    site = Site(stopped(), name=name)
    sites.append(site)
    page = opened(browser, site.address)
    page.wait_for_function("document.title.startsWith('Stopped')")  # the script has run
    assert "<script>window.owned = 1</script><img src=x" in page.locator("#alerts").inner_text()
    assert "<script>window.owned" in page.locator("h1").inner_text()
    with page.expect_response("**/main"):  # and what comes later goes the same way
        pass
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert troubles(page) == []


def test_even_markup_that_got_through_would_not_run(browser: "Browser", sites: list[Site]) -> None:
    """What the policy of the page is for: as if the escaping had failed."""
    site = Site(healthy())
    sites.append(site)
    page = opened(browser, site.address)
    page.evaluate(
        "document.querySelector('#alerts').innerHTML = `<img src='x.png' onerror='window.owned = 1'>"
        "<iframe srcdoc='<script>top.owned = 2</script>'></iframe>`;"
        "const s = document.createElement('script'); s.textContent = 'window.owned = 3'; document.body.append(s)"
    )
    page.wait_for_timeout(100)
    assert page.evaluate("window.owned") is None
    assert any("Content Security Policy" in text for text in troubles(page))


def test_without_script_the_page_shows_the_run_as_of_loading(browser: "Browser", sites: list[Site]) -> None:
    site = Site(healthy())
    sites.append(site)
    page = opened(browser, site.address, java_script_enabled=False)
    assert page.locator("#state").inner_text() == "Training"
    assert "381 of 1,000" in page.locator("#progress").inner_text()
    assert page.locator("noscript > p").count() == 1  # parsed as elements only where scripts do not run
    assert page.locator("#connection").is_hidden()


@pytest.mark.parametrize("name", sorted(STORIES))
def test_every_state_fits_a_phone_and_can_be_read(name: str, browser: "Browser", sites: list[Site]) -> None:
    site = Site(STORIES[name]())
    sites.append(site)
    page = opened(browser, site.address, viewport=PHONE, color_scheme="light")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(CONTRASTS) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(CONTRASTS) == []
    assert troubles(page) == []


def test_keyboard_and_screen_reader_find_their_way(browser: "Browser", sites: list[Site]) -> None:
    site = Site(healthy())
    sites.append(site)
    page = opened(browser, site.address)
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("heading", level=1).inner_text() == "gpt-7b"
    assert page.get_by_role("status").first.inner_text() == "Training"
    for name in ("Timeline", "What happened", "Ranks", "Where the time went", "Lost to failures", "Saves"):
        assert page.get_by_role("region", name=name, exact=True).first.is_visible()
    assert page.get_by_role("img", name="Timeline: 15 min").is_visible()
    assert page.get_by_role("columnheader", name="last heartbeat").is_visible()
    assert page.get_by_role("rowheader", name="3", exact=True).is_visible()
    reached = set()
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"happenings", "ranks-table", "lost-table"} <= reached


CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const back = rgb(getComputedStyle(node).backgroundColor);
      if (back.length < 4 || back[3] > 0) return back;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll('main *')) {
    if (![...node.childNodes].some((c) => c.nodeType === 3 && c.nodeValue.trim()) || node.closest('svg')) continue;
    const a = light(rgb(getComputedStyle(node).color)), b = light(behind(node));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${node.nodeName} ${node.className}: ${contrast.toFixed(2)}`);
  }
  return faint;
}"""
"""Texts whose contrast is below what WCAG 2 asks for, 4.5 to 1."""
