"""`lastgood report`: on runs that are alive, finished or dead; as a page, as JSON and in the terminal."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import typer
from page_samples import HOSTILE, STORIES, Story, finished, healthy, stopped
from typer.testing import CliRunner, Result

from orchestrator.cli import report as command
from orchestrator.observe.accounting import SILENT_SECONDS
from orchestrator.observe.ledger import Ledger
from orchestrator.observe.run_report.facts import Facts, facts_of
from orchestrator.observe.run_report.render import report_page
from workers.errors import CallerError, EnvironmentProblem

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def facts(story: Story, *, later: float = 4.0) -> Facts:
    return facts_of(Path("/mnt/ckpt/gpt"), story.entries, story.now + later)


def written(story: Story, run_dir: Path) -> Path:
    run_dir.mkdir()
    ledger = Ledger(run_dir / "ledger.jsonl")
    for one in story.entries:
        ledger.append(**{name: value for name, value in one.items() if name not in ("v", "seq")})
    return run_dir


def run(*arguments: str) -> Result:
    app = typer.Typer()
    command.register(app)
    app.command()(lambda: None)  # with one command alone there would be no name to call it by
    return CliRunner().invoke(app, ["report", *arguments])


def test_each_failure_has_what_it_cost_and_they_add_up() -> None:
    told = facts(healthy()).document
    first, second = told["failures"]
    assert (first["cause"], first["lost_steps"], first["source"]) == ("signal", 11, "memory")
    assert (second["cause"], second["lost_steps"], second["source"]) == ("hang", 41, "checkpoint")
    assert first["said"] == "Rank 1: killed by a signal (SIGKILL)"
    assert sum(told["time"]["seconds"].values()) == pytest.approx(told["time"]["elapsed_seconds"])


def test_a_run_that_has_said_nothing_for_long_is_counted_up_to_its_last_word() -> None:
    story = healthy()
    alive, dead = facts(story).document, facts(story, later=SILENT_SECONDS + 100).document
    assert (alive["run"]["state"], dead["run"]["state"]) == ("training", "silent")
    assert dead["run"]["until"] == max(one["at"] for one in story.entries)
    assert dead["time"]["elapsed_seconds"] < alive["time"]["elapsed_seconds"]
    assert "it has not ended" in report_page(facts(story, later=9e5))
    assert facts(finished(), later=9e5).document["run"]["state"] == "finished"


def test_the_tiers_are_judged_by_the_failures_that_each_answered() -> None:
    cadence = facts(healthy()).document["cadence"]
    assert (cadence["durable"]["failures"], cadence["memory"]["failures"]) == (1, 1)
    as_run = cadence["durable"]["trained_seconds"] / 7  # saves
    assert 100 < as_run < 120  # every 100 s, and some training after the last one
    assert cadence["durable"]["as_run_seconds"] == pytest.approx(as_run)
    assert cadence["memory"]["as_run_seconds"] == pytest.approx(1 / (1 / 20 + 1 / as_run), rel=0.02)
    for one in cadence.values():
        assert one["best_waste_seconds"] <= one["as_run_waste_seconds"]


def test_saves_in_a_burst_are_not_taken_for_how_often_the_run_saved() -> None:
    story = Story()
    story.train(300, save_every=100)
    for _ in range(5):
        story.train(5, save_every=1)
    found = facts(story).document["cadence"]["durable"]
    commits = [one for one in story.entries if one["kind"] == "commit"]
    assert found["as_run_seconds"] == pytest.approx(found["trained_seconds"] / len(commits))


def test_an_entry_of_another_version_is_passed_over() -> None:
    story = healthy()
    whole = facts(story).document
    story.entries.insert(3, {"seq": 3, "at": 5.0, "kind": "commit", "step": 1})
    assert facts(story).document["time"] == whole["time"]


def test_storage_traffic_is_what_the_saves_wrote_and_restores_read() -> None:
    story = healthy()
    storage = facts(story).document["storage"]
    assert storage["written_bytes"] == storage["read_back_bytes"] == 7 * 48_000_000_000
    restored = next(one for one in story.entries if one["kind"] == "restored" and one["checkpoint"])
    commit = next(one for one in story.entries if one["kind"] == "commit" and one["step"] == restored["step"])
    commit["checkpoint"] = restored["checkpoint"]
    assert facts(story).document["storage"]["restored_bytes"] == pytest.approx(48_000_000_000)


@pytest.mark.parametrize("name", sorted(STORIES))
def test_every_run_can_be_reported_from_its_first_entry_on(name: str) -> None:
    story = STORIES[name]()
    for count in (0, 1, 5, 6, 20, len(story.entries) // 2, len(story.entries)):
        page = report_page(facts_of(Path("/mnt/gpt"), story.entries[:count], story.now))
        body = page[page.index("<main") : page.index("</main>") + len("</main>")]
        root = ElementTree.fromstring(body)
        assert not list(root.iter("script"))


def test_the_command_writes_one_file_and_prints_one_object(tmp_path: Path) -> None:
    run_dir = written(finished(), tmp_path / "run")
    page = tmp_path / "report.html"
    result = run(str(run_dir), "-o", str(page), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["run"]["state"] == "finished" and len(told["failures"]) == 2
    assert "Failures and what each cost" in page.read_text()
    text = run(str(run_dir)).stdout
    assert "failures  2, cost" in text and "best in hindsight" in text


def test_wrong_usage_names_what_is_wrong(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert isinstance(result.exception, CallerError) and str(tmp_path) in str(result.exception)
    run_dir = written(healthy(), tmp_path / "run")
    result = run(str(run_dir), "-o", str(tmp_path / "nowhere" / "report.html"))
    assert isinstance(result.exception, EnvironmentProblem) and "--output" in str(result.exception)


def test_hostile_text_stays_text_in_terminal_and_page(tmp_path: Path, browser: "Browser") -> None:
    run_dir = written(stopped(HOSTILE + "\x1b[2J\x1b]0;owned\x07"), tmp_path / "run")
    path = tmp_path / "report.html"
    result = run(str(run_dir), "-o", str(path))
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    page = browser.new_context(viewport={"width": 360, "height": 740}).new_page()
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert "<script>window.owned = 1</script>" in page.locator("#failures-table").inner_text()
    assert page.evaluate("window.owned") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert asked == [path.as_uri()]
