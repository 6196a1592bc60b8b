"""The exporter of a coordinator that is not there: health, the port, where it is announced, and what may go wrong."""

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar

import pytest
from made_up_run import MadeUpRun
from observation_samples import eventful_run, observe, pulse

from orchestrator import ray_metrics
from orchestrator.config import RecoveryConfig
from orchestrator.observation import Observation
from orchestrator.observe import discovery
from orchestrator.observe.ledger import read_ledger
from workers.errors import CallerError


def ask(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reported through Ray, which is not there."""
    monkeypatch.setattr(Observation, "_report_through_ray", lambda self: None)


def target(run_dir: Path) -> str:
    [group] = json.loads((run_dir / discovery.TARGETS_FILE).read_text())
    [only] = group["targets"]
    assert isinstance(only, str)
    return only


@pytest.mark.usefixtures("quiet")
def test_the_next_driver_replaces_the_target_that_a_killed_one_left_behind(tmp_path: Path) -> None:
    discovery.announce(tmp_path, "127.0.0.1:1", "killed")
    discovery.announce(tmp_path, "127.0.0.1:2", "next")
    discovery.announce(tmp_path, "127.0.0.1:3", "next")  # its coordinator was restarted
    assert target(tmp_path) == "127.0.0.1:3"
    discovery.withdraw(tmp_path, "next")
    assert list(tmp_path.iterdir()) == []


def test_the_exporter_is_found_through_the_ledger_and_prometheus_target_file(tmp_path: Path) -> None:
    run = eventful_run()
    observation = observe(run, tmp_path / "gpt")
    observation.start()
    assert observation._server is not None
    entry = discovery.last_exporter(read_ledger(tmp_path / "gpt" / "ledger.jsonl"))
    assert entry is not None
    assert target(tmp_path / "gpt") == f"{entry['host']}:{entry['port']}"
    url = f"http://{target(tmp_path / 'gpt')}"
    status, body = ask(f"{url}/metrics")
    assert status == 200 and b"lastgood_goodput_ratio{" in body
    assert ask(f"{url}/nothing")[0] == 404
    observation._server.close()
    discovery.withdraw(tmp_path / "gpt", "another driver")
    assert (tmp_path / "gpt" / discovery.TARGETS_FILE).exists()
    discovery.withdraw(tmp_path / "gpt", "d1")
    assert not (tmp_path / "gpt" / discovery.TARGETS_FILE).exists()
    discovery.withdraw(tmp_path / "gpt", "d1")


@pytest.mark.usefixtures("quiet")
def test_a_restarted_coordinator_answers_at_the_same_port(tmp_path: Path) -> None:
    run = eventful_run()
    first = observe(run, tmp_path / "gpt")
    first.start()
    assert first._server is not None
    port = first._server.port
    first._server.close()
    again = observe(run, tmp_path / "gpt")
    again.start()
    assert again._server is not None
    assert again._server.port == port
    again._server.close()


@pytest.mark.usefixtures("quiet")
def test_a_taken_port_is_said_in_the_ledger_and_an_address_that_is_not_ours_hurts_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        observation = observe(eventful_run(), tmp_path / "gpt", recovery=RecoveryConfig(metrics_port=port))
        observation.start()
        assert observation._server is not None and observation._server.port != port
        observation._server.close()
    entry = read_ledger(tmp_path / "gpt" / "ledger.jsonl")[-1]
    assert (entry["kind"], entry["wanted_port"]) == ("exporter", port)
    assert "in use" in entry["problem"]
    elsewhere = observe(eventful_run(), tmp_path / "else", recovery=RecoveryConfig(metrics_host="192.0.2.1"))
    elsewhere.start()
    assert elsewhere._server is None
    assert read_ledger(tmp_path / "else" / "ledger.jsonl")[-1]["port"] == 0
    off = observe(eventful_run(), tmp_path / "off", recovery=RecoveryConfig(metrics_port=None))
    off.start()
    assert read_ledger(tmp_path / "off" / "ledger.jsonl")[-1]["kind"] == "coordinator"


class Recorder:
    """Takes the place of Ray's gauges."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description and tag_keys == ("run",)
        self.name = name
        self.values: list[tuple[float, dict[str, str]]] = []
        self.made.append(self)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tags))


def test_ray_hears_of_the_run_again_and_again_through_one_gauge_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_metrics, "Gauge", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    observation = observe(eventful_run(), tmp_path / "gpt")
    reporter = ray_metrics.Reporter()
    for _ in range(3):
        reporter.report(reporter.of(observation.view()))
    gauges = {gauge.name: gauge for gauge in Recorder.made}
    assert len(Recorder.made) == len(gauges)
    assert gauges.keys() == {metric.name for metric in ray_metrics.RAY_METRICS}
    assert gauges["lastgood_generation"].values == [(2.0, {"run": "gpt"})] * 3


def test_an_entry_that_cannot_be_understood_hurts_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = eventful_run()
    observation = observe(run, tmp_path / "gpt")
    observation._ledger.append("generation", generation="three")
    assert "the run could not be observed" in caplog.text
    observation._ledger.append("commit", generation=2)
    observation.pulse(0, pulse(run))
    assert healthz(observation)[0] == 200


def healthz(observation: Observation) -> tuple[int, list[str]]:
    answer = observation._healthz()
    assert isinstance(answer.body, bytes)
    return answer.status, json.loads(answer.body)["problems"]


def test_health_is_lost_without_progress_and_comes_back_with_it(tmp_path: Path) -> None:
    run = eventful_run()
    observation = observe(run, tmp_path / "gpt")
    observation.pulse(0, pulse(run))
    assert healthz(observation) == (200, [])
    run.now += 59
    observation.pulse(0, pulse(run))
    assert healthz(observation)[0] == 200
    run.now += 2
    observation.pulse(0, pulse(run))
    status, [problem] = healthz(observation)
    assert status == 503 and "no step was finished for 61 s" in problem
    observation.pulse(0, pulse(run, allowance_seconds=100.0))
    assert healthz(observation) == (200, [])  # it had said so
    observation.pulse(0, pulse(run))
    run.step += 1
    observation.pulse(0, pulse(run))
    assert healthz(observation) == (200, [])


def test_health_is_lost_while_unprotected(tmp_path: Path) -> None:
    run = eventful_run()
    observation = observe(run, tmp_path / "gpt")
    observation.pulse(0, pulse(run))
    observation._ledger.append("unprotected", since=run.now - 30, seconds=30, reason="disk")
    status, [problem] = healthz(observation)
    assert status == 503 and problem.startswith("unprotected")


def test_health_is_lost_in_a_crash_loop_and_when_the_run_is_stopped(tmp_path: Path) -> None:
    run = eventful_run()
    for _ in range(3):
        run.fail()
        run.begin(25, "memory")
        run.first_step()
    observation = observe(run, tmp_path / "gpt")
    status, [problem] = healthz(observation)
    assert status == 503 and "3 failures since step 31" in problem
    run.stop()
    assert healthz(observe(run, tmp_path / "gpt"))[0] == 503
    finished = eventful_run()
    finished.finish()
    assert healthz(observe(finished, tmp_path / "finished")) == (200, [])


def test_a_start_may_take_as_long_as_the_configuration_says(tmp_path: Path) -> None:
    run = MadeUpRun()
    run.drive()
    observation = observe(run, tmp_path / "gpt", recovery=RecoveryConfig(start_seconds_max=100.0))
    run.now += 99
    assert healthz(observation)[0] == 200
    run.now += 2
    assert healthz(observation)[0] == 503


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("metrics_port", -1),
        ("metrics_port", 65536),
        ("metrics_port", "9090"),
        ("metrics_port", True),
        ("metrics_host", ""),
        ("metrics_host", "http://x"),
        ("metrics_host", None),
    ],
)
def test_a_wrong_port_or_host_is_refused_with_its_name_and_value(field: str, wrong: object) -> None:
    with pytest.raises(CallerError, match=rf"RecoveryConfig\.{field} is .*it has to be") as refused:
        RecoveryConfig(**{field: wrong})  # type: ignore[arg-type]
    assert repr(wrong) in str(refused.value)
