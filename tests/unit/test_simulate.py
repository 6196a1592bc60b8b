"""`lastgood simulate` compares policies under the same failures; the tuner among them is production's."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from ledger_samples import write_ledger
from typer.testing import CliRunner

from chaos.simulator import command
from chaos.simulator.compare import run_all, runs
from chaos.simulator.policies import Auto, build, known, memoryless_best_seconds
from chaos.simulator.scenario import Scenario, read_scenario
from orchestrator.decide.tuner import FIRST_STEPS
from workers.errors import CallerError

SCENARIO = """
gpus = 512
horizon = "20d"
state = "1GB"
policies = ["auto", "young", "overhead", "30min", "best-fixed"]

[durable]
stall = "20s"
durable = "30s"
restart = "5min"

[limits]
durable_overhead_max = 1.0

[[failures]]
kind = "exponential"
mtbf = "2h"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def scenario(file: Path) -> Scenario:
    return read_scenario(file)


def told(*arguments: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def found(*arguments: str) -> dict[str, dict[str, Any]]:
    return {one["policy"]: one for one in json.loads(told(*arguments, "--jobs", "1", "--json"))}


def nothing(done: int) -> None: ...


def test_each_policy_has_its_object(file: Path) -> None:
    by_policy = found(str(file), "--seeds", "3")
    assert list(by_policy) == ["auto", "young", "overhead", "30min", "best-fixed"]
    for one in by_policy.values():
        assert one["seeds"] == 3
        assert one["goodput_ratio"] + sum(one["badput_ratio"].values()) == pytest.approx(1.0)
        assert one["goodput_ratio_p05"] <= one["goodput_ratio"] <= one["goodput_ratio_p95"]
        assert one["failures"]["signal"] == pytest.approx(240, rel=0.2)
        assert one["bytes_written"] == one["saves"]["durable"] * 10**9
        assert one["bytes_read"] <= 240 * 1.2 * 10**9
    assert by_policy["best-fixed"]["goodput_ratio"] > by_policy["30min"]["goodput_ratio"]
    assert by_policy["best-fixed"]["interval_seconds"] == pytest.approx(537, rel=0.5)
    assert by_policy["auto"]["decisions"] > 1 == by_policy["young"]["decisions"]


def test_all_policies_meet_the_same_failures(file: Path) -> None:
    counts = {
        json.dumps(one["failures"])
        for one in found(str(file), "--seeds", "2", "--policy", "auto", "--policy", "1h").values()
    }
    assert len(counts) == 1


def test_people_get_a_table_with_the_best_first_and_a_plot(file: Path) -> None:
    lines = told(str(file), "--seeds", "1", "--jobs", "1", "--policy", "1h", "--policy", "10min").splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["10min", "1h"]
    bars = [line.split()[-1] for line in lines[1:3]]
    assert bars[0].startswith("█")
    assert bars[1].count("▒") > 10
    assert len(bars[0]) < len(bars[1]) == 30
    assert "█ stall" in lines[3]


def test_processes_give_what_one_gives(scenario: Scenario) -> None:
    told_of: list[int] = []
    names = ["young", "auto"]
    alone = run_all(scenario, names, range(5), jobs=1, told=told_of.append)
    assert sum(told_of) == runs(names, 5) == 10
    together = run_all(scenario, names, range(5), jobs=2, told=nothing)
    assert alone == together


def test_the_best_fixed_interval_is_better_than_those_around_it(scenario: Scenario) -> None:
    told_of: list[int] = []
    outcomes = run_all(scenario, ["best-fixed"], range(4), jobs=1, told=told_of.append)
    assert sum(told_of) == runs(["best-fixed"], 4)
    ((name, best),) = outcomes.items()
    seconds = float(name.removeprefix("best-fixed: ").removesuffix("s"))
    for other in (f"{seconds * 1.5:.3f}s", f"{seconds / 1.5:.3f}s"):
        worse = run_all(scenario, [other], range(4), jobs=1, told=nothing)[other]
        assert sum(one.goodput_ratio for one in worse) < sum(one.goodput_ratio for one in best)


def test_the_production_tuner_comes_near_the_best_interval(scenario: Scenario) -> None:
    seeds = range(6)
    outcomes = run_all(scenario, ["auto", "young", "30min"], seeds, jobs=1, told=nothing)
    mean = {name: sum(one.goodput_ratio for one in some) / 6 for name, some in outcomes.items()}
    assert mean["auto"] > 0.996 * mean["young"]
    assert mean["auto"] > mean["30min"]


def test_the_first_save_comes_when_production_takes_it_and_the_tuner_decides_from_its_costs(scenario: Scenario) -> None:
    auto = build("auto", scenario)
    assert isinstance(auto, Auto)
    assert auto.intervals(0.0).durable_seconds == FIRST_STEPS * scenario.job.step_seconds
    assert auto.review_at == 0.0
    auto.saved("durable", 20.0, 30.0, 0.0)
    assert auto.intervals(30.0).durable_seconds > 600.0
    assert 30.0 < auto.review_at < math.inf


def test_what_policies_know() -> None:
    for name in ("auto", "young", "overhead", "best-fixed", "30min", "500 steps"):
        assert known(name, "--policy") == name
    for name in ("steps", "0 steps", "daily", "30"):
        with pytest.raises(
            CallerError, match=r"--policy is '.*'; it has to be one of auto, young, overhead, best-fixed"
        ):
            known(name, "--policy")


def test_rival_policies_follow_their_rules(scenario: Scenario) -> None:
    def interval(name: str) -> float:
        return build(name, scenario).intervals(0.0).durable_seconds

    assert interval("young") == pytest.approx(math.sqrt(2 * 20 * 7200))
    assert 20 / (interval("overhead") + 20) == pytest.approx(0.035)
    assert interval("500 steps") == 500.0
    assert interval("30min") == 1800.0
    assert interval(f"{memoryless_best_seconds(scenario)}s") == pytest.approx(524, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: [str(path / "no.toml")], "it has to be a scenario (.toml) or a trace (.csv) that exists"),
        (lambda path: [str(path / "some.toml"), "--policy", "daily"], "--policy is 'daily'; it has to be one of auto"),
        (
            lambda path: [str(path / "trace.csv")],
            "trace.csv does not say what a save costs, no trace does; give --stall",
        ),
        (
            lambda path: [str(path / "trace.csv"), "--stall", "1s", "--horizon", "1d"],
            "--horizon is '1d'; it has to be at most 9000s, where the trace ends",
        ),
        (lambda path: [str(path / "some.toml"), "--run", str(path)], "it has to be the storage_path/name of a run"),
        (
            lambda path: [str(path / "some.toml"), "--step-time", "0s"],
            "--step-time is '0s'; it has to be a duration above",
        ),
    ],
)
def test_wrong_usage_is_named(tmp_path: Path, file: Path, change: Callable[[Path], list[str]], message: str) -> None:
    (tmp_path / "trace.csv").write_text("seconds_since_previous_failure\n4000\n5000\n")
    with pytest.raises(CallerError) as error:
        told(*change(tmp_path))
    assert message in str(error.value)


def test_a_policy_in_a_scenario_that_nobody_knows_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(SCENARIO.replace('"30min"', '"daily"'))
    with pytest.raises(CallerError, match=r"some\.toml\.policies is 'daily'"):
        told(str(path))


def test_a_trace_needs_costs_and_is_simulated_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds_since_previous_failure\n" + "4000\n5000\n" * 20)
    by_policy = found(str(trace), "--stall", "10s", "--durable", "20s", "--restart", "60s", "--policy", "10min")
    one = by_policy["10min"]
    assert (one["seeds"], one["failures"]) == (1, {"signal": 39.0})
    assert one["wall_seconds"] == 180_000.0
    assert one["badput_ratio"]["restart"] == pytest.approx(39 * 60 / 180_000)
    shorter = found(str(trace), "--stall", "10s", "--policy", "10min", "--horizon", "1h")["10min"]
    assert (shorter["wall_seconds"], shorter["failures"]) == (3600.0, {})


def test_the_ceiling_of_the_tuner_can_be_lifted(tmp_path: Path, file: Path) -> None:
    file.write_text(SCENARIO.replace("durable_overhead_max = 1.0", "durable_overhead_max = 0.01"))
    bound = found(str(file), "--policy", "auto", "--seeds", "1")["auto"]
    free = found(str(file), "--policy", "auto", "--seeds", "1", "--overhead-max", "1")["auto"]
    assert bound["badput_ratio"]["stall"] < 0.011 < free["badput_ratio"]["stall"]


def test_a_runs_ledger_says_what_saves_cost(tmp_path: Path, file: Path) -> None:
    write_ledger(tmp_path, failures=3, up_seconds=1000.0)
    one = found(str(file), "--run", str(tmp_path), "--seeds", "1", "--policy", "10min", "--horizon", "10d")["10min"]
    assert one["wall_seconds"] == 864_000.0
    assert one["restores"].keys() == {"memory"}
    assert one["badput_ratio"]["restart"] == pytest.approx(one["failures"]["signal"] * 2.0 / 864_000, rel=0.01)
    assert one["saves"]["memory"] > one["saves"]["durable"]


def test_runs_that_the_budget_stops_are_told(tmp_path: Path, file: Path) -> None:
    file.write_text(SCENARIO.replace('mtbf = "2h"', 'mtbf = "1min"'))
    text = told(str(file), "--seeds", "1", "--jobs", "1", "--policy", "10min")
    assert "10min: 1 of 1 runs were stopped, e.g. because " in text


def test_a_figure_is_drawn(tmp_path: Path, file: Path) -> None:
    told(str(file), "--seeds", "1", "--jobs", "1", "--policy", "10min", "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
