"""A real Prometheus watches a real run, in which a rank and the coordinator are killed: what is shipped finds data."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import loops
import pytest
import ray
import yaml
from harness import Run, entries, kill, wait_for

import dashboards
from orchestrator.observe.accounting import KINDS
from orchestrator.observe.discovery import TARGETS_FILE
from orchestrator.observe.metric_table import METRICS
from orchestrator.ray_metrics import RAY_METRICS
from workers.failpoint import Arm

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None and os.environ.get("CI") != "true", reason="no Prometheus is installed"
    ),
]

STEPS, PACE_SECONDS = 700, 0.04
WINDOW_SECONDS = 8
DEADLINE_SECONDS = 120.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        try:
            return "ready" in get(f"{self._url}/-/ready").lower()
        except OSError:
            return False

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        asked = {"query": expression} | ({} if at is None else {"time": str(at)})
        answer = self._ask("query", asked)
        assert answer["resultType"] == "vector", expression
        found: list[dict[str, Any]] = answer["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._ask("rules", {})["groups"] for rule in group["rules"]]

    def _ask(self, what: str, asked: dict[str, str]) -> dict[str, Any]:
        answer = json.loads(get(f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(asked)}"))
        assert answer["status"] == "success", (asked, answer)
        data: dict[str, Any] = answer["data"]
        return data


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


@contextmanager
def prometheus(directory: Path, run_dir: Path) -> Iterator[Prometheus]:
    """With the rules and the configuration that are shipped, but each second, and for this run."""
    dashboards.export(directory, replace=False)
    config = yaml.safe_load((directory / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [job] = config["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(run_dir / TARGETS_FILE)], "refresh_interval": "1s"}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        server = Prometheus(port)

        def is_ready() -> bool | None:
            assert process.poll() is None, (directory / "log").read_text()
            return server.ready() or None

        wait_for(is_ready, DEADLINE_SECONDS)
        yield server
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def exporter(run_dir: Path) -> str | None:
    try:
        return str(json.loads((run_dir / TARGETS_FILE).read_text())[0]["targets"][0])
    except (OSError, ValueError):
        return None


def panels() -> Iterator[tuple[str, str, bool]]:
    """Dashboard and panel, query, and whether it may find nothing."""
    for name in (name for name in dashboards.FILES if name.endswith(".json")):
        for panel in json.loads(dashboards.read(name))["panels"]:
            for target in panel.get("targets", ()):
                may_be_empty = panel["fieldConfig"]["defaults"].get("noValue") == "none"
                yield f"{name}: {panel['title']}", target["expr"], may_be_empty


def for_this_run(expression: str) -> str:
    filled = {"$run": ".*", "$__rate_interval": f"{WINDOW_SECONDS}s", "$__range": "5m", "$__interval": "5s"}
    for variable, value in filled.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def names_shipped() -> set[str]:
    text = "".join(dashboards.read(name) for name in dashboards.FILES)
    return set(re.findall(r"(?<![:\w])lastgood_\w+(?![:\w])", text))


def ray_reports() -> set[str] | None:
    """Names of ours that Ray's own exporters show; None if they are off: they need what `ray[default]` brings."""
    ports = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes()]
    if all(port < 0 for _, port in ports):
        return None
    text = ""
    for host, port in ports:
        with contextlib.suppress(OSError):
            text += get(f"http://{host}:{port}/metrics")
    return set(re.findall(r"^ray_(lastgood_\w+)\{", text, re.MULTILINE))


def growing(names: set[str]) -> set[str]:
    """Of these, what must never go back: all but gauges, and but what the exporter counts of itself."""
    gauges = {name for name, metric in METRICS.items() if metric.type == "gauge"}
    found = {name for name in names - gauges if not name.startswith("lastgood_exporter_")}
    assert "lastgood_steps_total" in found and "lastgood_recovery_seconds_bucket" in found
    return found


def test_what_is_shipped_finds_data_in_a_real_run_and_counters_outlive_the_coordinator(tmp_path: Path) -> None:
    arms = [Arm(id="kill", point="step.end", when={"rank": 1, "step": 205})]
    run = Run(
        harness.trainer(
            tmp_path,
            "watched",
            loops.train_loop,
            config={"steps": STEPS, "pace_seconds": PACE_SECONDS},
            failpoints=arms,
            cadence="auto",
            snapshot_every_steps=20,
        )
    )
    run_dir = run.trainer.run_dir
    target = wait_for(lambda: exporter(run_dir), DEADLINE_SECONDS)
    with prometheus(tmp_path / "prometheus", run_dir) as server:
        run.status_when(lambda status: status["generation"] >= 2 and status["step"] >= 300)
        kill(entries(run_dir, "coordinator")[-1]["pid"])
        killed_at = time.time()
        run.status_when(lambda status: status["step"] >= 450)
        assert exporter(run_dir) == target, "the restarted coordinator answers elsewhere"
        again = f"timestamp(lastgood_steps_total) > {killed_at}"
        wait_for(lambda: server.query(again) or None, DEADLINE_SECONDS)
        run.status_when(lambda status: status["step"] >= 600)
        scraped, at = get(f"http://{target}/metrics"), time.time()
        assert json.loads(get(f"http://{target}/healthz")) == {"healthy": True, "problems": []}

        checked = subprocess.run(["promtool", "check", "metrics"], input=scraped, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        names = set(re.findall(r"^(lastgood_\w+)\{", scraped, re.MULTILINE))
        maybe = {"lastgood_straggler_cost_ratio", "lastgood_rank_waited_for_ratio", "lastgood_snapshot_step"}
        assert METRICS.keys() - maybe <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} | names
        assert names_shipped() - maybe <= names
        if ray_reports() is not None:
            wanted = {metric.name for metric in RAY_METRICS}
            wait_for(lambda: wanted <= (ray_reports() or set()) or None, DEADLINE_SECONDS)

        run.result()
        empty = [
            (where, expression)
            for where, expression, may_be_empty in panels()
            if not server.query(for_this_run(expression), at) and not may_be_empty
        ]
        assert not empty
        failed = [rule for rule in server.rules() if rule["health"] != "ok"]
        assert not failed
        records = {rule["name"] for rule in server.rules() if rule["type"] == "recording"}
        assert {name for name in records if server.query(name, at)} == records

        # What Prometheus saw: no counter of the run ever went back, and time adds up at each scrape.
        back = [name for name in sorted(growing(names)) if server.query(f"resets({name}[5m]) > 0", at)]
        assert not back
        spent = server.query("sum by (run) (lastgood_time_seconds_total) - on (run) lastgood_elapsed_seconds_total", at)
        assert abs(float(spent[0]["value"][1])) < 1e-6
        kinds = {one["metric"]["kind"] for one in server.query("lastgood_time_seconds_total", at)}
        assert kinds == set(KINDS)
        [failures] = server.query('lastgood_failures_total{cause="signal"}', at)
        assert failures["value"][1] == "1"
        wait_for(lambda: exporter(run_dir) is None or None, DEADLINE_SECONDS)
    assert [entry["step"] for entry in entries(run_dir, "progress")], "nobody said how far the run was"
