"""`lastgood advise` says what the cost model says, in units and words that people use."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from ledger_samples import write_ledger
from typer.testing import CliRunner

from orchestrator.cli import advise
from orchestrator.cli.advice import Situation
from orchestrator.cli.plots import bar
from orchestrator.decide.cost import SaveCost, Tier, goodput_ratio, optimal_interval_seconds
from orchestrator.decide.failure_rate import FAILURES_PER_NODE_DAY
from workers.errors import CallerError, EnvironmentProblem

HOUR = 3600.0


def app() -> typer.Typer:
    application = typer.Typer()
    application.callback()(lambda: None)
    advise.register(application)
    return application


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app(), ["advise", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def found(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(told(*arguments, "--json")))


def test_half_a_minute_every_ten_minutes_costs_476_percent_and_replays_five_minutes() -> None:
    text = told("--stall", "30s", "--every", "10min")
    assert "every 10 min: goodput 95.24 %, saving costs 4.76 %, a failure replays 5 min on average" in text
    numbers = found("--stall", "30s", "--every", "10min")
    assert numbers["overhead_ratio"] == pytest.approx(30 / 630)
    assert numbers["lost_seconds_per_failure"] == 300.0
    assert numbers["interval_seconds"] == 600.0
    assert numbers["mtbf_seconds"] is None


def test_the_best_interval_is_the_cost_models() -> None:
    numbers = found("--stall", "30s", "--durable", "90s", "--mtbf", "10h", "--restart", "5min")
    best = optimal_interval_seconds(SaveCost(30.0), 1 / (10 * HOUR))
    assert numbers["interval_seconds"] == numbers["best_interval_seconds"] == pytest.approx(best)
    expected = goodput_ratio(SaveCost(30.0, 90.0), best, 1 / (10 * HOUR), 300.0)
    assert numbers["goodput_ratio"] == pytest.approx(expected)
    assert numbers["lost_seconds_per_failure"] == pytest.approx(best / 2 + 60)
    assert numbers["half"]["goodput_ratio"] < numbers["goodput_ratio"] > numbers["double"]["goodput_ratio"]
    assert numbers["double"]["interval_seconds"] == pytest.approx(2 * best)
    assert sum(numbers["waste_ratio"].values()) == pytest.approx(1 - expected)
    low, high = numbers["flat"]["from_seconds"], numbers["flat"]["to_seconds"]
    assert low < best < high
    assert goodput_ratio(SaveCost(30.0, 90.0), high, 1 / (10 * HOUR), 300.0) == pytest.approx(0.999 * expected)


def test_intervals_are_whole_steps() -> None:
    numbers = found("--stall", "30s", "--mtbf", "10h", "--step-time", "7s")
    assert numbers["interval_seconds"] == 7 * numbers["interval_steps"]
    assert found("--stall", "30s", "--mtbf", "10h", "--step-time", "3h")["interval_steps"] == 1
    slow = found("--stall", "1s", "--durable", "1h", "--mtbf", "10h", "--step-time", "7s")
    assert slow["interval_steps"] == math.ceil(3599 / 7)


def test_a_save_is_not_advised_before_the_last_one_can_be_restored() -> None:
    assert found("--stall", "1s", "--durable", "1h", "--mtbf", "10h")["interval_seconds"] == 3599.0


def test_the_size_of_a_cluster_gives_its_failure_rate() -> None:
    numbers = found("--stall", "30s", "--gpus", "1024")
    assert numbers["mtbf_seconds"] == pytest.approx(86400 / (128 * FAILURES_PER_NODE_DAY))
    more = found("--stall", "30s", "--gpus", "1000", "--gpus-per-node", "4", "--failures-per-node-day", "0.01")
    assert more["mtbf_seconds"] == pytest.approx(86400 / 2.5)


def test_a_second_tier_takes_the_failures_that_memory_survives() -> None:
    numbers = found(
        *("--stall", "20s", "--mtbf", "3h", "--restart", "10min"),
        *("--memory-stall", "1s", "--memory-restart", "1min", "--memory-misses", "0.1"),
    )
    rate = 1 / (3 * HOUR)
    assert numbers["interval_seconds"] == pytest.approx(optimal_interval_seconds(SaveCost(20.0), 0.1 * rate))
    assert numbers["memory_interval_seconds"] == pytest.approx(optimal_interval_seconds(SaveCost(1.0), 0.9 * rate))
    assert numbers["mtbf_seconds"] == pytest.approx(3 * HOUR)
    assert numbers["lost_seconds_per_failure"] == pytest.approx(
        0.1 * numbers["interval_seconds"] / 2 + 0.9 * numbers["memory_interval_seconds"] / 2
    )
    alone = found("--stall", "20s", "--mtbf", "3h", "--restart", "10min")
    assert numbers["goodput_ratio"] > alone["goodput_ratio"] + 0.05
    assert numbers["memory_half"]["goodput_ratio"] < numbers["goodput_ratio"]
    assert numbers["memory_half"]["interval_seconds"] == numbers["interval_seconds"]


@pytest.mark.parametrize("misses", ["0", "1"])
def test_a_tier_that_no_failure_needs_is_never_saved_to(misses: str) -> None:
    numbers = found("--stall", "20s", "--mtbf", "3h", "--memory-stall", "1s", "--memory-misses", misses)
    unused = "interval_seconds" if misses == "0" else "memory_interval_seconds"
    assert numbers[unused] is None
    assert 0 < numbers["lost_seconds_per_failure"] < HOUR
    assert "for ever" in told("--stall", "20s", "--mtbf", "3h", "--memory-stall", "1s", "--memory-misses", misses)


def test_what_helps_most_comes_first_and_gains_what_it_says() -> None:
    numbers = found("--stall", "1s", "--mtbf", "3h", "--restart", "20min", "--interference", "1s", "--durable", "60s")
    gains = {lever["what"]: lever["gain_ratio"] for lever in numbers["levers"]}
    assert list(gains) == sorted(gains, key=lambda what: -gains[what])
    assert next(iter(gains)) == "half the restart time"
    better = found("--stall", "1s", "--mtbf", "3h", "--restart", "10min", "--interference", "1s", "--durable", "60s")
    assert gains["half the restart time"] == pytest.approx(better["goodput_ratio"] - numbers["goodput_ratio"])
    assert set(gains) == {
        "half the restart time",
        "half the stall",
        "half the time until durable",
        "half the slowdown while saving",
        "snapshots in memory between saves",
    }
    slow = found("--stall", "5min", "--mtbf", "3h", "--restart", "10s")
    assert slow["levers"][0]["what"] == "snapshots in memory between saves"
    assert slow["levers"][1]["what"] == "half the stall"


def test_a_ceiling_that_a_run_would_keep_to_is_told_with_what_it_costs() -> None:
    text = told("--stall", "30s", "--mtbf", "3h")
    assert "a run keeps saves to 1 % of its time unless told otherwise: every 49.5 min" in text
    assert "ceiling" not in told("--stall", "1s", "--mtbf", "3d")


def test_the_text_has_the_best_interval_and_a_plot_around_it() -> None:
    text = told("--stall", "30s", "--mtbf", "10h", "--restart", "5min")
    assert "save     every 24.2 min: goodput 95.1" in text
    assert "flat     from " in text
    last_words = [line.split()[-1] for line in text.splitlines() if line]
    bars = [word for word in last_words if set(word) <= set("█▓▒")]
    assert len(bars) == 7
    assert max(map(len, bars)) == 30
    assert len(bars[3]) == min(map(len, bars))
    assert (bars[0].count("█"), bars[-1].count("█")) > (20, 0)


def test_a_runs_ledger_gives_costs_and_failures(tmp_path: Path) -> None:
    write_ledger(tmp_path, failures=40, up_seconds=1000.0)
    numbers = found("--run", str(tmp_path))
    assert numbers["inputs"]["durable"]["cost"]["stall_seconds"] == 0.5
    assert numbers["inputs"]["durable"]["cost"]["interference_seconds"] == 0.25
    assert numbers["inputs"]["durable"]["cost"]["durable_seconds"] == 3.0
    assert numbers["inputs"]["memory"]["restart_seconds"] == pytest.approx(2.0)
    assert numbers["inputs"]["step_seconds"] == 0.5
    assert numbers["mtbf_seconds"] == pytest.approx(1000.0, rel=0.2)
    rate = numbers["failure_rate"]
    assert rate["low_per_second"] < 1 / 1000 < rate["high_per_second"]
    assert "with 90 % certainty between" in told("--run", str(tmp_path))
    mixed = found("--run", str(tmp_path), "--stall", "2s", "--mtbf", "1h", "--restart", "7s")
    assert mixed["inputs"]["durable"]["cost"]["stall_seconds"] == 2.0
    assert mixed["mtbf_seconds"] == pytest.approx(HOUR)
    assert mixed["inputs"]["memory"]["restart_seconds"] == 7.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--mtbf", "3h"),
            "neither --stall nor --run is given, so what a save costs is unknown; give --stall, such as",
        ),
        (("--stall", "30s"), "how often the job fails is unknown; give --mtbf, such as 3h, or --gpus, or --run"),
        (("--stall", "30", "--mtbf", "3h"), "--stall is '30'; it has to be a duration at least 0 with its unit"),
        (("--stall", "3s", "--mtbf", "0h"), "--mtbf is '0h'; it has to be a duration above 0 with its unit"),
        (("--stall", "3s", "--every", "x"), "--every is 'x'; it has to be a duration"),
        (
            ("--stall", "3s", "--gpus", "8", "--failures-per-node-day", "-1"),
            "--failures-per-node-day is -1.0; it has to",
        ),
        (
            ("--stall", "3s", "--failures-per-node-day", "1"),
            "and neither --gpus nor --run says how many nodes there are",
        ),
        (("--run", "/nowhere"), "--run is '/nowhere'; it has to be the storage_path/name of a run, with ledger.jsonl"),
        (
            ("--stall", "3s", "--mtbf", "3h", "--plot", "x.pdf"),
            "--plot is 'x.pdf'; it has to be a file that ends in .png",
        ),
        (("--stall", "3s", "--mtbf", "3h", "--plot", "/no/x.png"), "--plot is '/no/x.png'; its directory has to exist"),
    ],
)
def test_wrong_usage_names_the_field_its_value_and_what_would_be_right(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CallerError) as error:
        told(*arguments)
    assert message in str(error.value)


def test_a_run_without_a_save_does_not_say_what_one_costs(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    with pytest.raises(CallerError, match="has no committed save yet"):
        told("--run", str(tmp_path))


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
def test_a_figure_is_drawn(tmp_path: Path, name: str, magic: bytes) -> None:
    told("--stall", "30s", "--mtbf", "3h", "--plot", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_without_matplotlib_a_figure_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentProblem, match=r"install it: pip install 'lastgood\[plot\]'"):
        told("--stall", "30s", "--mtbf", "3h", "--plot", str(tmp_path / "plot.png"))


def test_saving_that_costs_nothing_is_advised_as_often_as_can_be() -> None:
    situation = Situation(durable=Tier(SaveCost(0.0), 1e-4, 0.0), step_seconds=2.0)
    assert situation.score().interval_seconds == 2.0


def test_parts_of_a_bar_end_where_they_belong() -> None:
    assert bar([1.0, 1.0, 2.0], 8.0, 8) == "█▓▒▒"
    assert bar([0.3, 0.3, 0.4], 1.0, 1) == "▓"
    assert bar([1.0], 0.0, 5) == ""
