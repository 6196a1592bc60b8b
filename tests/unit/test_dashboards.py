"""The dashboards that are shipped are those that the code makes, complete, and can be exported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_alert_rules import metrics_in, scraped_names
from typer.testing import CliRunner

import dashboards
from orchestrator.cli.app import build_app
from orchestrator.observe import metric_docs
from orchestrator.observe.metric_table import METRICS

ROOT = Path(__file__).parents[2]
BOARDS = [name for name in dashboards.FILES if name.endswith(".json")]


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(dashboards.read(name))["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_up_to_date(name: str) -> None:
    build = pytest.importorskip("dashboards.build")
    assert dashboards.read(name) == build.to_json(build.BOARDS[name]), "run: python -m dashboards.build"


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metric_docs.text(), "run: python -m orchestrator.observe.metric_docs"


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_lets_people_choose_source_and_run(name: str) -> None:
    board = json.loads(dashboards.read(name))
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["run"]["datasource"]["uid"] == "${datasource}"
    assert board["uid"] and board["title"] and board["description"] and board["schemaVersion"] >= 39


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_they_show_in_which_unit_and_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(name):
        assert panel["title"] and panel["description"], panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"]
            assert metrics_in(target["expr"]) and metrics_in(target["expr"]) <= scraped_names()
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    text = "".join(dashboards.read(name) for name in dashboards.FILES)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics_in(text)} | metrics_in(text)
    kept_for_questions = {
        "lastgood_nodes",
        "lastgood_nodes_excluded",
        "lastgood_ledger_entries_total",
        "lastgood_storage_size_bytes",
        "lastgood_snapshot_step",
        "lastgood_exporter_scrapes_total",
        "lastgood_steps_total",
        "lastgood_step_age_seconds",
    }
    assert METRICS.keys() - shown == kept_for_questions


def test_all_files_are_exported_and_changed_ones_are_not_written_over(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(build_app(), ["dashboards", "export", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    exported = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert exported == set(dashboards.FILES)
    packaged = {str(path.relative_to(ROOT / "dashboards")) for path in (ROOT / "dashboards").rglob("*.*")}
    assert {name for name in packaged if name.endswith((".json", ".yml"))} == exported
    assert run(build_app(), ["dashboards", "export", str(tmp_path / "out")]).exit_code == 0
    (tmp_path / "out" / "prometheus.yml").write_text("mine\n")
    refused = run(build_app(), ["dashboards", "export", str(tmp_path / "out")])
    assert "prometheus.yml is there already" in str(refused.exception)
    assert (tmp_path / "out" / "prometheus.yml").read_text() == "mine\n"
    assert run(build_app(), ["dashboards", "export", str(tmp_path / "out"), "--replace"]).exit_code == 0
    assert (tmp_path / "out" / "prometheus.yml").read_text() != "mine\n"
