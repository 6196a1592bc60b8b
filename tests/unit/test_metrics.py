"""Metrics from a ledger and from pulses: all that the table promises, no more labels than it allows, never back."""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from made_up_run import MadeUpRun
from observation_samples import eventful_run, observe, pulse
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.observation import Observation
from orchestrator.observe.accounting import KINDS
from orchestrator.observe.metric_table import LABELS, METRICS, RANKS_SHOWN_MAX
from orchestrator.observe.metrics import ExporterFacts, metrics_route

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(observation: Observation) -> str:
    body = metrics_route(observation.view, ExporterFacts())().body
    assert isinstance(body, bytes)
    return body.decode()


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    wanted = {"run": "gpt", **labels}
    [only] = [v for (n, have), v in found.items() if n == name and wanted.items() <= dict(have).items()]
    return only


def observed(tmp_path: Path, ranks: int = 2) -> tuple[MadeUpRun, Observation]:
    run = eventful_run(ranks)
    observation = observe(run, tmp_path / "gpt")
    observation._storage = (10**9, 10**10)
    for rank in range(ranks):
        observation.pulse(rank, pulse(run, rank))
        observation.uses_memory(rank, 10**8 + rank)
    observation.waits(dict.fromkeys(range(ranks), 0.01))
    return run, observation


def base_name(sample: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        if sample.removesuffix(suffix) in METRICS and sample.endswith(suffix):
            return sample.removesuffix(suffix)
    return sample


def test_every_metric_of_the_table_is_in_a_scrape_and_nothing_else(tmp_path: Path) -> None:
    _, observation = observed(tmp_path)
    assert {base_name(name) for name, _ in samples(scrape(observation))} == METRICS.keys()


def test_a_scrape_says_what_the_ledger_says(tmp_path: Path) -> None:
    _, observation = observed(tmp_path)
    found = samples(scrape(observation))
    assert value(found, "lastgood_failures_total", cause="signal") == 1
    assert value(found, "lastgood_lost_steps_total", cause="signal") == 8
    assert value(found, "lastgood_lost_samples_total", cause="signal") == 8 * 32
    assert value(found, "lastgood_checkpoint_step") == 10
    assert value(found, "lastgood_step") == 31
    assert value(found, "lastgood_steps_total") == 18 + 21
    assert value(found, "lastgood_detection_seconds_sum") == pytest.approx(0.5)
    assert value(found, "lastgood_recovery_seconds_count", until="first_step") == 1
    assert value(found, "lastgood_recovery_seconds_sum", until="first_step") == pytest.approx(2.0)
    assert value(found, "lastgood_recovery_seconds_sum", until="regained") == pytest.approx(9.0)
    assert value(found, "lastgood_restores_total", rung="checkpoint") == 1
    assert value(found, "lastgood_interval_bound", tier="durable", bound="overhead") == 1
    assert value(found, "lastgood_interval_bound", tier="durable", bound="disk") == 0
    assert value(found, "lastgood_coordinator_restarts_total") == 1
    assert value(found, "lastgood_state", state="training") == 1
    assert value(found, "lastgood_mtbf_seconds", estimate="low") < value(
        found, "lastgood_mtbf_seconds", estimate="high"
    )
    spent = math.fsum(value(found, "lastgood_time_seconds_total", kind=kind) for kind in KINDS)
    assert spent == pytest.approx(value(found, "lastgood_elapsed_seconds_total"), rel=1e-12)


def test_labels_have_the_values_of_the_table_and_ranks_are_few(tmp_path: Path) -> None:
    small = observed(tmp_path / "small")[1]
    large = observed(tmp_path / "large", ranks=1024)[1]
    counts = {}
    for name, observation in (("small", small), ("large", large)):
        found = samples(scrape(observation))
        counts[name] = len(found)
        ranks: Mapping[str, int] = {}
        for metric, labels in found:
            for label, text in labels:
                if label in LABELS:
                    assert text in LABELS[label]
                if label == "rank":
                    ranks = {**ranks, metric: ranks.get(metric, 0) + 1}
        assert max(ranks.values()) <= RANKS_SHOWN_MAX
    ranked = sum(metric.labels == ("rank",) for metric in METRICS.values())
    assert counts["large"] - counts["small"] <= ranked * RANKS_SHOWN_MAX
    assert counts["large"] < 500


def test_a_cause_that_is_not_known_counts_as_other(tmp_path: Path) -> None:
    run = eventful_run()
    run.fail("from a later version")
    found = samples(scrape(observe(run, tmp_path / "gpt")))
    assert value(found, "lastgood_failures_total", cause="other") == 1


@pytest.mark.skipif(shutil.which("promtool") is None and os.environ.get("CI") != "true", reason="no promtool")
def test_promtool_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    _, observation = observed(tmp_path)
    ran = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(observation), capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def counters(found: Samples) -> Samples:
    return {
        key: number
        for key, number in found.items()
        if METRICS[base_name(key[0])].type != "gauge" and "exporter" not in key[0]
    }


def test_no_counter_goes_back_at_any_entry_nor_when_the_coordinator_is_restarted(tmp_path: Path) -> None:
    whole = eventful_run()
    run = MadeUpRun()
    run.driver = 1
    before: Samples = {}
    for number, entry in enumerate(whole.entries, start=1):
        run.entries, run.now = whole.entries[:number], max(run.now, entry["at"])
        run.generation, run.step = (entry.get("generation", run.generation), entry.get("step", run.step))
        observation = observe(run, tmp_path / "gpt")
        if run.generation and observation.summary.accounting.state == "training":
            observation.pulse(0, pulse(run, step=observation.summary.accounting.position))
        now = counters(samples(scrape(observation)))
        assert all(now.get(key, math.inf) >= number for key, number in before.items())
        before = {**before, **now}


def test_counters_hold_only_what_a_later_entry_cannot_take_back(tmp_path: Path) -> None:
    run = eventful_run()
    observation = observe(run, tmp_path / "gpt")
    observation._written_at = run.now
    run.train(5)
    observation.pulse(0, pulse(run))
    before = samples(scrape(observation))
    assert value(before, "lastgood_step") == 36
    assert value(before, "lastgood_steps_total") == 18 + 21
    assert value(before, "lastgood_time_seconds_total", kind="productive") == pytest.approx(17 - 0.3 + 13)
    run.now += 10
    run.fail("hang")
    run.entries[-1]["failed_at"] = run.now - 10
    after = samples(scrape(observe(run, tmp_path / "gpt")))
    assert value(after, "lastgood_time_seconds_total", kind="detection") == pytest.approx(10.5)
    assert all(after[key] >= number for key, number in counters(before).items())


def test_a_checkpoint_that_was_not_read_back_is_not_verified(tmp_path: Path) -> None:
    run = eventful_run()
    run.commit()
    run.entries[-1]["verified_from"] = ["nothing"]
    assert value(samples(scrape(observe(run, tmp_path / "gpt"))), "lastgood_checkpoint_step") == 10


def test_progress_is_written_when_the_lost_step_is_regained_and_once_in_a_while(tmp_path: Path) -> None:
    run = eventful_run()
    run.fail()
    run.begin(25, "memory")
    run.first_step()
    observation = observe(run, tmp_path / "gpt")

    def told() -> list[int]:
        lines = (tmp_path / "gpt" / "ledger.jsonl").read_text().splitlines()
        return [e["step"] for e in map(json.loads, lines) if e["kind"] == "progress"][1:]

    observation._written_at = run.now
    run.train(3)
    observation.pulse(0, pulse(run))
    assert told() == []  # at step 29 of 31
    run.train(2)
    observation.pulse(0, pulse(run))
    observation.pulse(1, pulse(run, 1))
    assert told() == [31]
    run.train(10)
    observation.pulse(0, pulse(run))
    assert told() == [31]
    run.train(50)
    observation.pulse(0, pulse(run))
    assert told() == [31, 91]
    assert observation.summary.accounting.costs[-1].regained_at == pytest.approx(run.now - 60)
