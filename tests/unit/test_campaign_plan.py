"""Plans are checked before anything starts: each error names the field, its value, and what would be right."""

import json
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from chaos.campaign.plan import ARMED_POINTS, load_plan, parse_plan, ready_plans
from chaos.campaign.runner import with_overrides
from chaos.command import register
from chaos.faults.registry import ARMED, FAULTS
from workers.errors import CallerError, LastgoodError


@pytest.mark.parametrize("name", sorted(ready_plans()))
def test_ready_plan_can_work_and_names_only_known_faults(name: str) -> None:
    plan = load_plan(name)
    assert plan.name == name
    assert plan.faults.count > 0
    assert set(plan.faults.mix) <= set(FAULTS)
    assert set(plan.armed.points) <= set(ARMED_POINTS)


def test_the_plans_that_are_promised_are_there() -> None:
    assert {"smoke", "mid-save", "cascade", "spot-market", "storage-hell", "soak"} <= set(ready_plans())
    struck = {name for plan in ready_plans() for name in load_plan(plan).faults.mix}
    never = {"hide_checkpoint", "clock_jump"}  # where root runs the ranks, and where there is no machine for it
    assert set(FAULTS) - struck <= never, "a fault that no campaign tries"


def test_spot_market_names_where_its_trace_comes_from() -> None:
    text = ready_plans()["spot-market"]
    assert "https://github.com/uclasystem/bamboo" in text
    assert "MIT" in text
    trace = load_plan("spot-market").faults.gap.trace
    assert trace is not None
    assert len(trace) == 47


def test_soak_asks_for_500_kills_mostly_inside_saves_that_its_budget_allows() -> None:
    plan = load_plan("soak")
    assert plan.faults.count == 500
    assert set(plan.faults.mix) == {"kill_rank", "kill_agent", "kill_keeper", "kill_coordinator"}
    assert plan.faults.moments["save"] > plan.faults.moments["any"]
    assert plan.recovery["max_failures"] >= 500
    assert plan.watch_leaks


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("faults: {count: -1}", r"faults\.count is -1; it has to be a whole number, at least 0"),
        ("faults: {count: 2.5}", r"faults\.count is 2\.5"),
        ("faults: {mix: {kill_everything: 1}}", r"faults\.mix names kill_everything.*kill_rank"),
        ("faults: {mix: {kill_rank: 0}}", r"faults\.mix is \{'kill_rank': 0\}; .* not all of them 0"),
        ("faults: {mix: {kill_rank: many}}", r"faults\.mix"),
        ("faults: {moments: {midnight: 1}}", r"faults\.moments names midnight.*any, save, recovery"),
        ("faults: {gap_seconds: {uniform: [3, 1]}}", r"faults\.gap_seconds\.uniform is \[3, 1\]"),
        ("faults: {gap_seconds: {uniform: [0, 1], mean: 3}}", r"faults\.gap_seconds\.mean.*the only one"),
        ("faults: {burst_chance: 1.5}", r"faults\.burst_chance is 1\.5; .* at most 1"),
        ("faults: {until_step: 900}\njob: {steps: 100}", r"faults\.until_step is 900; .* at most job\.steps, 100"),
        ("faults: {from_step: 50, until_step: 50}", r"faults\.from_step is 50; it has to be less than until_step, 50"),
        ("faults: {rate: 3}", r"faults\.rate is no field of a plan; there are .*faults|count"),
        ("job: {ranks: 0}", r"job\.ranks is 0; it has to be a whole number, at least 1"),
        ("job: {model: huge}", r"job\.model is 'huge'; it has to be one of tiny, demo"),
        ("recovery: {keep_last: 0}", r"RecoveryConfig\.keep_last is 0"),
        ("recovery: {keep: 3}", r"recovery\.keep is no field of RecoveryConfig; there are .*keep_last"),
        ("recovery: {failpoints: []}", r"recovery\.failpoints is no field"),
        ("armed: {points: [persist.lunch]}", r"armed\.points is \['persist\.lunch'\]"),
        ("armed: {actions: [explode]}", r"armed\.actions is \['explode'\].*kill_rank"),
        ("armed: {count: 1, points: [step.end], actions: [enospc]}", r"armed\.actions is 'enospc'.*point"),
        ("faults: {mix: {nan_loss: 1}}\nexact: false", r"faults\.mix is .*nan_loss.*on_bad_loss"),
        ("faults: {mix: {nan_loss: 1}}\nrecovery: {on_bad_loss: rollback}", r"faults\.mix is .*unless exact is false"),
        ("timeout_seconds: soon", r"timeout_seconds is 'soon'; it has to be a number"),
        ("exact: maybe", r"exact is 'maybe'; it has to be true or false"),
        ("colour: red", r"colour is no field of a plan"),
        ("- a\n- b", r"a plan is \['a', 'b'\]; it has to be a mapping"),
        ("job: [", "is no YAML"),
        ("faults: {count: 3, count: 4}", "is no YAML: count is there twice.*line 1"),
        ("seed: 1\ntitle: t\nseed: 2", "is no YAML: seed is there twice"),
        ("a: !!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_wrong_plan_is_refused_by_field(text: str, complaint: str) -> None:
    with pytest.raises(CallerError, match=complaint) as caught:
        parse_plan(text, "wrong.yaml")
    assert "wrong.yaml" in str(caught.value)


def test_empty_plan_has_sensible_defaults() -> None:
    plan = parse_plan("", "empty.yaml")
    assert (plan.job.ranks, plan.faults.mix, plan.exact) == (2, {"kill_rank": 1.0}, True)
    assert plan.faults.until_step < plan.job.steps


def test_plan_that_is_nowhere_lists_the_ready_ones() -> None:
    with pytest.raises(CallerError, match="smoke"):
        load_plan("no-such-plan")


def test_fewer_kills_take_fewer_steps() -> None:
    plan = load_plan("soak")
    short = with_overrides(plan, kills=30, steps=None)
    assert short.faults.count == 30
    assert short.job.steps == plan.job.steps * 30 // 500
    assert plan.faults.from_step < short.faults.until_step < short.job.steps
    assert with_overrides(plan, kills=None, steps=100).job.steps == 100
    assert with_overrides(plan, kills=None, steps=None) == plan


def test_every_fault_says_what_it_does_and_can_be_asked_whether_it_can_be_done() -> None:
    for name, fault in {**FAULTS, **ARMED}.items():
        assert fault.name == name
        assert fault.description
        assert fault.available() is None or isinstance(fault.available(), str)


def complaint_of(*words: str) -> str:
    """What `lastgood chaos run` says before it starts anything."""
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["chaos", "run", "smoke", *words])
    assert isinstance(result.exception, LastgoodError), result.exception
    return str(result.exception)


def test_script_that_cannot_be_used_is_refused_before_a_cluster_is_started(tmp_path: Path) -> None:
    script = tmp_path / "broken_train.py"
    script.write_text("def train(config):\n    pass\n")
    assert "has no function other" in complaint_of("--script", f"{script}:other")
    script.write_text("import nowhere_to_be_found\n")
    assert "nowhere_to_be_found" in complaint_of("--script", f"{script}:train")


def test_cluster_that_does_not_answer_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # and nobody listens there once it is closed
    assert f"no Ray cluster at {address}" in complaint_of("--address", address, "--storage", str(tmp_path))


def test_faults_and_plans_are_listed() -> None:
    app = typer.Typer()
    register(app)
    listed = CliRunner().invoke(app, ["chaos", "faults", "--json"])
    assert listed.exit_code == 0
    for name in (*FAULTS, *ARMED):
        assert f'"{name}"' in listed.stdout
    needs = {fault["name"]: fault["needs"] for fault in json.loads(listed.stdout)["faults"]}
    assert "nftables" in needs["cut_network"]
    assert "several nodes" in needs["kill_raylet"]
    assert "storage-hell" in CliRunner().invoke(app, ["chaos", "plans"]).stdout
    listed = json.loads(CliRunner().invoke(app, ["chaos", "plans", "--json"]).stdout)["plans"]
    assert [plan["name"] for plan in listed] == sorted(ready_plans()) and all(plan["title"] for plan in listed)
