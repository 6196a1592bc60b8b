"""The rules that are shipped: each alert fires when it should and is quiet when it should be, is in the runbook, and
asks for metrics that there are."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import dashboards
from orchestrator.observe.metric_table import METRICS

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and os.environ.get("CI") != "true", reason="no promtool"
)
RUN = 'run="gpt"'

Series = dict[str, str]


def series(**values: str) -> Series:
    """Of one run: metric name without `lastgood_`, and values in promtool's notation. `__` begins a label's value."""
    found = {}
    for name, text in values.items():
        metric, *labels = name.split("__")
        found[f"lastgood_{metric}{{{','.join([RUN, *labels])}}}"] = text
    return found


def labelled(metric: str, label: str, text: str) -> Series:
    return {f"lastgood_{metric}{{{RUN},{label}}}": text}


TRAINING = labelled("state", 'state="training"', "1x300")
RECOVERING = labelled("state", 'state="recovering"', "1x300")
FINISHED = labelled("state", 'state="finished"', "1x300")
PRODUCTIVE, REPEATED, STALL = 'kind="productive"', 'kind="repeated"', 'kind="save_stall"'


def times(productive: float, repeated: float, stall: float, minutes: int = 300) -> Series:
    """Seconds of each in each minute."""
    total = productive + repeated + stall
    return {
        **labelled("time_seconds_total", PRODUCTIVE, f"0+{productive}x{minutes}"),
        **labelled("time_seconds_total", REPEATED, f"0+{repeated}x{minutes}"),
        **labelled("time_seconds_total", STALL, f"0+{stall}x{minutes}"),
        **series(elapsed_seconds_total=f"0+{total}x{minutes}"),
    }


GIB = 1 << 30
INTERVAL = labelled("interval_seconds", 'tier="durable"', "600x300")

# By alert: at which minute, what makes it fire then, and things that must not.
CASES: dict[str, tuple[int, list[Series], list[Series]]] = {
    "LastgoodUnprotected": (5, [series(unprotected="0 0 1x10")], [series(unprotected="0x10")]),
    "LastgoodNoProgress": (
        40,
        [series(step="0+1x10 10x40") | TRAINING, series(step="7x60") | RECOVERING],
        [series(step="0+1x60") | TRAINING, series(step="7x60") | FINISHED, series(step="0+1x25 25x15") | TRAINING],
    ),
    "LastgoodCrashLoop": (
        20,
        [labelled("failures_total", 'cause="signal"', "0x10 1 2 3 4 5 5x10")],
        [
            labelled("failures_total", 'cause="signal"', "0x10 1 1 2 2x10"),
            labelled("failures_total", 'cause="drain"', "0x10 1 2 3 4 5 5x10"),
            labelled("failures_total", 'cause="signal"', "0 1 2 3 4 5 5x60"),
        ],
    ),
    "LastgoodRecoverySlow": (15, [RECOVERING], [TRAINING, labelled("state", 'state="recovering"', "1x5 0 1x20")]),
    "LastgoodSaveFailing": (
        30,
        [series(saves_failed_total="0x20 1x20"), series(save_attempts_failed_total="0+1x40")],
        [series(saves_failed_total="1x40"), series(save_attempts_failed_total="0x20 1x20")],
    ),
    "LastgoodCheckpointOld": (
        90,
        [series(checkpoint_age_seconds="0+60x120", generation="1x120") | TRAINING | INTERVAL],
        [
            series(checkpoint_age_seconds="0+30x120", generation="1x120") | TRAINING | INTERVAL,
            series(checkpoint_age_seconds="0+60x120", generation="1x120") | FINISHED | INTERVAL,
            series(checkpoint_age_seconds="0+60x120", generation="1x120")
            | TRAINING
            | labelled("interval_seconds", 'tier="durable"', "7200x300"),
        ],
    ),
    "LastgoodSaveOverheadHigh": (120, [times(50, 4, 6)], [times(58, 0, 2)]),
    "LastgoodGoodputLow": (200, [times(40, 20, 0)], [times(58, 1, 1), times(40, 20, 0, minutes=100)]),
    "LastgoodDiskFilling": (
        100,
        [
            series(storage_free_bytes=f"{GIB}x120", checkpoint_bytes=f"{GIB}x120"),
            series(storage_free_bytes=f"{400 * GIB}-{2 * GIB}x120", checkpoint_bytes=f"{GIB}x120"),
        ],
        [
            series(storage_free_bytes=f"{3 * GIB}x120", checkpoint_bytes=f"{GIB}x120"),
            series(storage_free_bytes=f"{4000 * GIB}-{2 * GIB}x120", checkpoint_bytes=f"{GIB}x120"),
        ],
    ),
    "LastgoodStraggler": (10, [series(stragglers="1x20")], [series(stragglers="0x20"), series(stragglers="1x7 0x9")]),
    "LastgoodQuarantine": (30, [series(quarantined_total="0x20 1x20")], [series(quarantined_total="1x40")]),
    "LastgoodExporterDown": (
        10,
        [{'up{job="lastgood",instance="h:1"}': "1 1 0x20"}],
        [{'up{job="lastgood",instance="h:1"}': "1x20"}, {'up{job="other",instance="h:1"}': "0x20"}],
    ),
}


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load(dashboards.read(f"rules/{name}.yml"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_names() -> list[str]:
    return [rule["alert"] for rule in rules("alerts")]


def run_promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    dashboards.export(tmp_path, replace=True)
    files = ["rules/recording.yml", "rules/alerts.yml"]
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": files, "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=120)


def case(alert: str, minute: int, given: Series, *, fires: bool) -> dict[str, Any]:
    sample = {"labels": "{}", "value": int(fires)}
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{minute}m", "exp_samples": [sample]}],
    }


def test_each_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(alert_names())


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_when_it_should_not(alert: str, tmp_path: Path) -> None:
    minute, firing, quiet = CASES[alert]
    tests = [case(alert, minute, given, fires=True) for given in firing]
    tests += [case(alert, minute, given, fires=False) for given in quiet]
    ran = run_promtool(tmp_path, tests)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_rules_and_example_configuration_are_valid(tmp_path: Path) -> None:
    dashboards.export(tmp_path, replace=True)
    for arguments in (
        ["check", "rules", "rules/alerts.yml", "rules/recording.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        ran = subprocess.run(["promtool", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_says_how_bad_it_is_and_has_its_section_in_the_runbook() -> None:
    runbook = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL))
    assert sections.keys() == set(alert_names())
    for rule in rules("alerts"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert "for" in rule
        assert all(f"**{word}**" in sections[rule["alert"]] for word in ("Means", "Look at", "Do"))


def metrics_in(expression: str) -> set[str]:
    """Names of ours in a PromQL expression; not those of recording rules, which have colons."""
    return set(re.findall(r"(?<![:\w])lastgood_\w+(?![:\w])", expression))


def scraped_names() -> set[str]:
    """All that a scrape may have."""
    names = set(METRICS)
    for name, metric in METRICS.items():
        if metric.type == "histogram":
            names |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
    return names


def test_rules_ask_for_metrics_and_records_that_there_are() -> None:
    records = {rule["record"] for rule in rules("recording")}
    for rule in rules("recording") + rules("alerts"):
        assert metrics_in(rule["expr"]) <= scraped_names()
        assert set(re.findall(r"\w+:\w+:\w+", rule["expr"])) <= records
