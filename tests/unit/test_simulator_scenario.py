"""A scenario file is read as docs/cadence.md says; a mistake in it is named with its value and what would be right."""

import re
from pathlib import Path

import pytest

from chaos.simulator.draws import Cost
from chaos.simulator.failures import Exponential, MarkovModulated, Periodic, RateSteps, Trace, Weibull
from chaos.simulator.scenario import read_file, read_scenario
from chaos.simulator.seen import with_costs_given, with_costs_seen
from orchestrator.decide.failure_rate import prior_from_cluster
from orchestrator.observe.costs import RunCosts
from workers.errors import CallerError

SCENARIOS = Path(__file__).parents[2] / "docs" / "scenarios"
SAVES = "[durable]\nstall = '30s'\n"
FAILS = "[[failures]]\nkind = 'exponential'\nmtbf = '3h'\n"


def written(path: Path, text: str) -> Path:
    file = path / "some.toml"
    file.write_text(text)
    return file


def test_all_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("seconds_since_previous_failure\n864000\n")
    text = """
        gpus = 1024
        gpus_per_node = 4
        failures_per_node_day = 1e-2
        horizon = "10d"
        step = "5s"
        state = "1TB"
        keep_last = 5
        damaged = 0.01
        max_failures = 7
        policies = ["auto", "30min"]

        [durable]
        stall = { mean = "2s", variation = 0.5 }
        interference = "1s"
        durable = { seen = ["30s", "60s"] }
        restart = "5min"

        [memory]
        stall = "200ms"
        replicated = false

        [limits]
        durable_overhead_max = 0.05
        memory_steps_min = 3

        [[failures]]
        kind = "exponential"
        failures_per_node_day = 5e-3
        domain = "node"

        [[failures]]
        kind = "weibull"
        mtbf = "1d"
        shape = 0.7
        cause = "hang"
        memory_survives = 0.5

        [[failures]]
        kind = "markov"
        mtbf = ["10h", "20min"]
        stay = ["2d", "2h"]

        [[failures]]
        kind = "steps"
        from = ["0s", "5d"]
        mtbf = ["10h", "1h"]

        [[failures]]
        kind = "periodic"
        every = "24h"
        jitter = "10min"

        [[failures]]
        kind = "trace"
        file = "trace.csv"
    """
    scenario = read_scenario(written(tmp_path, text))
    job = scenario.job
    assert (job.horizon_seconds, job.step_seconds, job.state_bytes) == (864_000.0, 5.0, 10**12)
    assert (job.keep_last, job.damaged, job.max_failures) == (5, 0.01, 7)
    assert job.durable.stall == Cost(mean_seconds=2.0, variation=0.5)
    assert job.durable.durable == Cost(seen=(30.0, 60.0))
    assert (job.durable.interference.mean, job.durable.restart.mean) == (1.0, 300.0)
    assert job.memory is not None
    assert job.memory.stall.mean == 0.2
    assert scenario.prior == prior_from_cluster(256, 1e-2)
    assert (scenario.limits.durable_overhead_max, scenario.limits.memory_steps_min) == (0.05, 3)
    assert scenario.policies == ("auto", "30min")
    assert [one.source for one in scenario.sources] == [
        Exponential(mtbf_seconds=pytest.approx(86400 / (256 * 5e-3))),
        Weibull(mtbf_seconds=86400.0, shape=0.7),
        MarkovModulated(mtbf_seconds=(36000.0, 1200.0), stay_seconds=(172_800.0, 7200.0)),
        RateSteps(from_seconds=(0.0, 432_000.0), mtbf_seconds=(36000.0, 3600.0)),
        Periodic(every_seconds=86400.0, jitter_seconds=600.0),
        Trace(seconds_since_previous_failure=(864_000.0,)),
    ]
    assert [one.memory_survives for one in scenario.sources] == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert (scenario.sources[1].cause, scenario.sources[0].domain) == ("hang", "node")


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_read(path: Path) -> None:
    scenario, is_trace = read_file(path)
    assert not is_trace
    assert scenario.failures_per_second > 0


def test_copies_on_other_nodes_are_expected_where_there_are_several() -> None:
    scenario = read_scenario(SCENARIOS / "llama3-16384.toml")
    assert scenario.replicated
    assert {one.domain: one.memory_survives for one in scenario.sources} == {"node": 0.95, "process": 1.0}
    assert scenario.missed_per_second == pytest.approx(0.05 * scenario.sources[0].source.failures_per_second(1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus = [", "some.toml cannot be read as a scenario: "),
        (FAILS, "some.toml has no table [durable]; it says what a save costs, such as stall = '30s'"),
        (SAVES, "some.toml.failures is missing; "),
        (
            FAILS + "[durable]\nstall = 30",
            "some.toml.durable.stall is '30'; it has to be a duration at least 0 with its",
        ),
        (FAILS + "[durable]\nrestart = '1s'", "some.toml.durable.stall is missing; "),
        (
            FAILS + SAVES + "stale = '3s'",
            "some.toml.durable.stale is '3s'; there is no such field, see docs/cadence.md",
        ),
        ("gpu = 3\n" + FAILS + SAVES, "some.toml.gpu is 3; there is no such field"),
        ("gpus = 0\n" + FAILS + SAVES, "some.toml.gpus is 0; it has to be a whole number, at least 1"),
        ("state = 5\n" + FAILS + SAVES, "some.toml.state is '5'; it has to be a size above 0 with its unit"),
        ("damaged = 2\n" + FAILS + SAVES, "some.toml.damaged is 2; it has to be a number from 0 to 1"),
        ("policies = 'auto'\n" + FAILS + SAVES, "some.toml.policies is 'auto'; it has to be a list of texts"),
        ("memory = 3\n" + FAILS + SAVES, "some.toml.memory is 3; it has to be a table, [memory]"),
        (
            SAVES + "[failures]\nkind = 'x'",
            "some.toml.failures is {'kind': 'x'}; it has to be tables, each headed by [[",
        ),
        (
            SAVES + "[[failures]]\nkind = 'x'",
            "some.toml.failures[0].kind is 'x'; it has to be one of exponential, weib",
        ),
        (SAVES + "[[failures]]\nkind = 'exponential'", "some.toml.failures[0].mtbf is missing"),
        (
            SAVES + FAILS + "domain = 'rack'",
            "some.toml.failures[0].domain is 'rack'; it has to be one of process, node",
        ),
        (SAVES + FAILS + "cause = 'mice'", "some.toml.failures[0].cause is 'mice'; it has to be one of exception, "),
        (
            SAVES + "[[failures]]\nkind = 'markov'\nmtbf = ['1h', '2h']\nstay = ['1d']",
            "some.toml.failures[0].stay has 1 entries; it has to have 2, like mtbf",
        ),
        (
            SAVES + "[[failures]]\nkind = 'steps'\nmtbf = ['1h', '2h']\nfrom = ['0s', '0s']",
            "some.toml.failures[0].from is [0.0, 0.0] s; it has to ascend from 0s",
        ),
        (
            SAVES + "[[failures]]\nkind = 'markov'\nmtbf = []\nstay = []",
            "some.toml.failures[0].mtbf is []; it has to be a list of durations, such as ['2h', '20min']",
        ),
        (
            "horizon = '11s'\n" + SAVES + "[[failures]]\nkind = 'trace'\nfile = 'trace.csv'",
            "some.toml.horizon is 11 s, and a trace ends after 10 s; it has to be shorter, or left out",
        ),
    ],
)
def test_a_mistake_is_named_with_its_value_and_what_would_be_right(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text("seconds_since_previous_failure\n4\n6\n")
    with pytest.raises(CallerError, match=re.escape(message)):
        read_scenario(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no failures; it has to be a CSV file with the column seconds_since_previous_failure"),
        ("gap\n3\n", "holds no failures; "),
        (
            "seconds_since_previous_failure\n3\nx\n",
            ", line 3: seconds_since_previous_failure is 'x'; it has to be a numb",
        ),
        ("seconds_since_previous_failure\n-1\n", ", line 2: seconds_since_previous_failure is '-1'; "),
        ("seconds_since_previous_failure\n0\n0\n", "all of seconds_since_previous_failure is 0"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(CallerError, match=re.escape(message)):
        read_file(path)


def test_a_trace_is_a_scenario_that_ends_with_its_last_failure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("other,seconds_since_previous_failure\nx,100\ny,50.5\n")
    scenario, is_trace = read_file(path)
    assert is_trace
    assert scenario.job.horizon_seconds == scenario.ends_after_seconds == 150.5
    assert [one.at for one in scenario.failures(0)] == [100.0, 150.5]


def test_costs_of_a_run_take_the_place_of_those_of_a_scenario() -> None:
    costs = RunCosts(
        stall_seconds=[0.1, 0.3],
        durable_seconds=[2.0],
        copied_seconds=[0.5],
        restart_seconds={"memory": [1.0], "checkpoint": [3.0, 4.0]},
        step_seconds=0.25,
        bytes=77,
    )
    before = read_scenario(SCENARIOS / "spot.toml").job
    job = with_costs_seen(before, costs)
    assert (job.durable.stall.seen, job.durable.durable.seen, job.durable.restart.seen) == (
        (0.1, 0.3),
        (2.0,),
        (3.0, 4.0),
    )
    assert job.memory is not None
    assert (job.memory.stall.seen, job.memory.durable.seen, job.memory.restart.seen) == ((0.1, 0.3), (0.5,), (1.0,))
    assert (job.step_seconds, job.state_bytes) == (0.25, 77)
    assert with_costs_seen(before, RunCosts()) == before


def test_what_the_user_gives_takes_the_place_of_both() -> None:
    before = read_scenario(SCENARIOS / "llama3-16384.toml").job
    job = with_costs_given(before, stall=9.0, durable=None, restart=8.0, step=None)
    assert (job.durable.stall.mean, job.durable.durable, job.durable.restart.mean) == (9.0, before.durable.durable, 8.0)
    assert job.memory is not None
    assert job.memory.restart.mean == 8.0
    assert job.step_seconds == before.step_seconds
