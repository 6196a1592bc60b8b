"""The status page of a real run, in a real browser: a rank is killed, and the page shows it and what came of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import harness
import loops
import pytest
from harness import Run, entries, kill, wait_for
from typer.testing import CliRunner

from orchestrator.cli.app import build_app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_the_page_shows_a_killed_rank_and_the_run_going_on(tmp_path: Path, browser: "Browser") -> None:
    steps = 120
    supervised = harness.trainer(
        tmp_path, "watched", loops.train_loop, config={"steps": steps, "pace_seconds": 0.1}, total_steps=steps
    )
    run = Run(supervised)
    run.status_when(lambda status: status["step"] >= 12)
    status = CliRunner().invoke(build_app(), ["status", str(supervised.run_dir), "--json"])
    page = browser.new_page()
    page.goto(json.loads(status.stdout)["page_url"])
    page.locator("#protection", has_text="up to step").wait_for()
    assert page.locator("#state").inner_text() == "Training"
    assert f"of {steps}" in page.locator("#progress").inner_text()
    page.locator("#progress", has_text="if nothing fails").wait_for()

    told = run.status_when(lambda status: all(one["pid"] for one in status["ranks"]))
    kill(told["ranks"][1]["pid"])
    page.locator("#happenings", has_text="Rank 1: killed by a signal (SIGKILL)").wait_for()
    page.locator("#happenings", has_text="Training again").wait_for()
    page.locator("#cost", has_text="1 failure cost").wait_for()
    assert "generation 2" in page.locator("header").inner_text()
    wait_for(lambda: page.locator("#ranks-table [data-ago]").count() == 2 or None, 30)
    page.close()

    run.result()
    report = CliRunner().invoke(build_app(), ["status", str(supervised.run_dir), "--json"])
    assert json.loads(report.stdout)["state"] == "finished"
    assert json.loads(report.stdout)["page_url"] is None
    assert len(entries(supervised.run_dir, "failure")) == 1
