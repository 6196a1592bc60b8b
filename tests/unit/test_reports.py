"""Every agent gets the same numbered sequence of reports."""

from orchestrator.reports import WAITING_MAX, ReportSequence
from workers.messages import AgentJoined, AskDraining, Command, Report, Reported


def agent(rank: int, *, queued: int = 0, done: int = 0, asked_last: int = 0) -> AgentJoined:
    return AgentJoined(
        agent=f"d/{rank}",
        group="g",
        rank=rank,
        local_rank=rank,
        world_size=2,
        node="n",
        node_ip="",
        pid=1,
        ready=True,
        store_port=0,
        reports_queued=queued,
        reports_done=done,
        asked_last=asked_last,
    )


Posted = dict[str, list[Command]]


def sequence(*agents: AgentJoined) -> tuple[ReportSequence, Posted]:
    posted: Posted = {"d/0": [], "d/1": []}
    reports = ReportSequence(lambda name, command: posted[name].append(command))
    for event in agents or (agent(0), agent(1)):
        reports.joined(event, new_group=event.rank == 0)
    return reports, posted


def test_metrics_that_come_while_ray_is_busy_are_merged_and_commits_are_not() -> None:
    reports, posted = sequence()
    reports.metrics({"loss": 3.0})
    reports.metrics({"loss": 2.0, "lr": 0.1})
    reports.commit(10, "/a")
    reports.commit(20, "/b")
    assert posted["d/0"] == [Report(number=1, metrics={"loss": 3.0}, checkpoint=None)]
    for number in (1, 2, 3):
        for rank in (0, 1):
            reports.done(Reported(agent=f"d/{rank}", number=number))
    assert posted["d/0"] == posted["d/1"]
    assert posted["d/0"][1:] == [
        Report(number=2, metrics={"loss": 2.0, "lr": 0.1, "committed_step": 10}, checkpoint="/a"),
        Report(number=3, metrics={"loss": 2.0, "lr": 0.1, "committed_step": 20}, checkpoint="/b"),
    ]


def test_of_commits_that_come_faster_than_ray_takes_them_the_newest_few_are_reported() -> None:
    reports, posted = sequence()
    for step in range(1, 301):
        reports.commit(step, f"/{step}")
    reports.flush()
    sent = [report.checkpoint for report in posted["d/0"] if isinstance(report, Report)]
    assert sent == ["/1", *(f"/{step}" for step in range(301 - WAITING_MAX, 301))]
    assert reports.last == len(sent)


def test_the_next_report_waits_for_all_agents() -> None:
    reports, posted = sequence()
    reports.commit(1, "/a")
    reports.commit(2, "/b")
    reports.done(Reported(agent="d/0", number=1))
    reports.done(Reported(agent="d/0", number=1))
    assert len(posted["d/1"]) == 1
    reports.done(Reported(agent="d/1", number=1))
    assert len(posted["d/1"]) == 2


def test_the_end_of_the_run_sends_what_is_left_and_fixes_the_last_number() -> None:
    reports, posted = sequence()
    reports.commit(1, "/a")
    reports.commit(2, "/b")
    reports.metrics({"loss": 1.0})
    reports.flush()
    assert [report.number for report in posted["d/1"] if isinstance(report, Report)] == [1, 2]
    assert reports.last == 2


def test_after_a_restart_of_the_coordinator_the_numbers_go_on() -> None:
    reports, posted = sequence(agent(0, queued=4, done=4), agent(1, queued=4, done=4))
    reports.commit(5, "/e")
    assert posted["d/1"] == [Report(number=5, metrics={"committed_step": 5}, checkpoint="/e")]


def test_an_agent_that_missed_a_report_makes_an_empty_one_in_its_place() -> None:
    reports, posted = sequence(agent(0, queued=3, done=3), agent(1, queued=4, done=3))
    reports.commit(5, "/e")
    assert posted == {"d/0": [Report(number=4, metrics={}, checkpoint=None)], "d/1": []}
    for rank in (0, 1):
        reports.done(Reported(agent=f"d/{rank}", number=4))
    assert posted["d/0"][1:] == posted["d/1"] == [Report(number=5, metrics={"committed_step": 5}, checkpoint="/e")]


def test_ray_is_asked_for_draining_nodes_while_nothing_else_is_under_way() -> None:
    reports, posted = sequence()
    reports.ask_draining()
    reports.ask_draining()
    reports.commit(5, "/e")
    assert posted["d/0"] == posted["d/1"] == [AskDraining(number=1)]
    for rank in (0, 1):
        reports.done(Reported(agent=f"d/{rank}", number=1))
    assert posted["d/0"][1:] == [Report(number=2, metrics={"committed_step": 5}, checkpoint="/e")]
    reports.ask_draining()
    assert len(posted["d/0"]) == 2


def test_an_agent_that_missed_a_question_asks_it_too() -> None:
    """Ray has one barrier for all calls: an agent that made another one there would hang the run."""
    for order in ((0, 1), (1, 0)):
        agents = (agent(0, queued=3, done=3), agent(1, queued=4, done=3, asked_last=4))
        posted: Posted = {"d/0": [], "d/1": []}
        reports = ReportSequence(lambda name, command, to=posted: to[name].append(command))
        for index in order:
            reports.joined(agents[index], new_group=index == order[0])
        assert posted == {"d/0": [AskDraining(number=4)], "d/1": []}


def test_nobody_is_asked_before_an_agent_is_there() -> None:
    reports = ReportSequence(lambda name, command: None)
    reports.ask_draining()
    assert reports.last == 0
