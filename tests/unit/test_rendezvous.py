"""Membership and generations: single stories, then arbitrary orders of events."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.decide.failure import Cause
from orchestrator.decide.losses import WorkerLoss
from orchestrator.decide.rendezvous import (
    AllFinished,
    CreateGeneration,
    Decision,
    EndRanks,
    Judge,
    Phase,
    Rendezvous,
    StartRanks,
)
from workers.messages import AgentJoined, RankError, RankExited, RankFinished


def joined(rank: int, *, world: int = 2, group: str = "g1", **fields: Any) -> AgentJoined:
    values: dict[str, Any] = {
        "agent": f"d/{group}-{rank}",
        "group": group,
        "rank": rank,
        "local_rank": rank,
        "world_size": world,
        "node": "n",
        "node_ip": "127.0.0.1",
        "pid": 100 + rank,
        "ready": True,
        "store_port": 5000 + rank,
    }
    return AgentJoined(**{**values, **fields})


def exited(rank: int, generation: int, *, at: float, code: int = -9, group: str = "g1", **fields: Any) -> RankExited:
    values: dict[str, Any] = {"ordered": False, "error": None}
    return RankExited(
        agent=f"d/{group}-{rank}", generation=generation, pid=1, exit_code=code, at=at, **{**values, **fields}
    )


def finished(rank: int, generation: int, *, group: str = "g1") -> RankFinished:
    return RankFinished(agent=f"d/{group}-{rank}", generation=generation, step=10, metrics={}, protected=True)


def kinds(decisions: list[Decision]) -> list[type]:
    return [type(decision) for decision in decisions]


def running(world: int = 2) -> Rendezvous:
    rendezvous = Rendezvous()
    for rank in range(world):
        decisions = rendezvous.joined(joined(rank, world=world), now=0.0)
    assert decisions == [CreateGeneration(reason="start")]
    assert kinds(rendezvous.created(1)) == [StartRanks]
    return rendezvous


def test_ranks_start_only_when_every_agent_has_a_fresh_rank_waiting() -> None:
    rendezvous = Rendezvous()
    assert rendezvous.joined(joined(0), now=0.0) == []
    assert rendezvous.joined(joined(1, ready=False), now=0.0) == []
    assert rendezvous.ready("d/g1-1", store_port=7) == [CreateGeneration(reason="start")]
    start = rendezvous.created(4)
    assert start == [StartRanks(generation=4, agents=("d/g1-0", "d/g1-1"), store_host="127.0.0.1", store_port=5000)]


def test_a_lost_agent_is_the_first_cause_and_not_the_errors_of_its_peers() -> None:
    rendezvous = running()
    rendezvous.progressed("d/g1-0", 1, 5, at=10.0)
    rendezvous.progressed("d/g1-1", 1, 5, at=10.1)
    broken = RankError(type="RuntimeError", message="connection reset", traceback="", at=10.3, exit_code=1)
    rendezvous.exited(exited(0, 1, at=10.4, code=1, error=broken))
    (verdict,) = rendezvous.agents_lost([1])
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.rank, verdict.failure.first.kind) == (1, "agent_lost")
    assert [echo.kind for echo in verdict.failure.echoes] == ["exception"]


def test_a_generation_waits_for_a_new_group_when_an_agent_is_to_leave() -> None:
    rendezvous = running()
    rendezvous.fail(Cause(rank=1, kind="drain", exit_code=None, at=3.0))
    for rank in (0, 1):
        rendezvous.exited(exited(rank, 1, at=3.1, ordered=True))
    rendezvous.leave(frozenset({"d/g1-1"}))
    rendezvous.proceed("failure")
    for rank in (0, 1):
        assert rendezvous.ready(f"d/g1-{rank}", store_port=1) == []
    rendezvous.joined(joined(0, group="g2"), now=5.0)
    assert rendezvous.joined(joined(1, group="g2"), now=5.0) == [CreateGeneration(reason="failure")]


def test_when_all_agents_are_lost_at_once_the_generation_is_over_at_once() -> None:
    rendezvous = running()
    (verdict,) = rendezvous.agents_lost([0, 1], kind="controller")
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.kind == "controller"


def test_a_cause_from_outside_ends_a_running_generation_and_nothing_else() -> None:
    stuck = Cause(rank=1, kind="hang", exit_code=None, at=3.0, detail={"stacks": "s.txt"})
    assert Rendezvous().fail(stuck) == []
    rendezvous = running()
    assert rendezvous.fail(stuck) == [EndRanks(generation=1, agents=("d/g1-0", "d/g1-1"))]
    assert rendezvous.fail(stuck) == []
    assert rendezvous.exited(exited(0, 1, at=3.1, ordered=True)) == []
    (verdict,) = rendezvous.exited(exited(1, 1, at=3.2, ordered=True))
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first, verdict.failure.echoes) == (stuck, ())


def test_one_dead_rank_ends_the_generation_for_all_and_the_earliest_cause_is_the_first() -> None:
    rendezvous = running()
    error = RankError(type="RuntimeError", message="connection closed", traceback="", at=5.3, exit_code=1)
    assert rendezvous.exited(exited(0, 1, at=5.4, code=1, error=error)) == [EndRanks(generation=1, agents=("d/g1-1",))]
    (verdict,) = rendezvous.exited(exited(1, 1, at=5.2))
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.rank, verdict.failure.first.kind) == (1, "signal")
    assert [echo.rank for echo in verdict.failure.echoes] == [0]


def test_a_kill_that_is_reaped_after_its_peers_have_noticed_is_still_the_first_cause() -> None:
    rendezvous = running()
    error = RankError(type="RuntimeError", message="connection reset", traceback="", at=5.1, exit_code=1)
    rendezvous.exited(exited(0, 1, at=5.2, code=1, error=error))
    (verdict,) = rendezvous.exited(exited(1, 1, at=5.15))
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.rank == 1


def test_a_process_that_exits_without_a_word_comes_before_its_peers_exception() -> None:
    rendezvous = running()
    error = RankError(type="RuntimeError", message="connection reset", traceback="", at=5.1, exit_code=1)
    rendezvous.exited(exited(0, 1, at=5.2, code=1, error=error))
    (verdict,) = rendezvous.exited(exited(1, 1, at=5.15, code=0))
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.rank, verdict.failure.first.kind) == (1, "exit")


def test_an_abort_that_follows_a_peers_exception_is_an_echo() -> None:
    rendezvous = running()
    error = RankError(type="ValueError", message="bad batch", traceback="", at=5.1, exit_code=1)
    rendezvous.exited(exited(0, 1, at=5.2, code=1, error=error))
    (verdict,) = rendezvous.exited(exited(1, 1, at=5.15, code=-6))
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.rank == 0


def test_a_rank_that_was_told_to_end_is_no_cause() -> None:
    rendezvous = running()
    rendezvous.exited(exited(0, 1, at=1.0))
    (verdict,) = rendezvous.exited(exited(1, 1, at=0.5, ordered=True))
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.rank == 0
    assert verdict.failure.echoes == ()


def test_the_next_generation_waits_for_the_verdict_and_for_fresh_ranks() -> None:
    rendezvous = running()
    rendezvous.exited(exited(0, 1, at=1.0))
    rendezvous.ready("d/g1-0", 6000)
    rendezvous.exited(exited(1, 1, at=1.1, ordered=True))
    assert rendezvous.proceed("failure") == []
    assert rendezvous.ready("d/g1-1", 6001) == [CreateGeneration(reason="failure")]


def test_no_generation_is_created_while_a_waiting_rank_is_lost() -> None:
    rendezvous = Rendezvous()
    rendezvous.joined(joined(0), now=0.0)
    rendezvous.standby_lost("d/g1-0")
    assert rendezvous.joined(joined(1), now=0.0) == []
    assert kinds(rendezvous.ready("d/g1-0", 1)) == [CreateGeneration]


def test_exit_code_zero_without_having_finished_is_a_failure() -> None:
    rendezvous = running(world=1)
    (verdict,) = rendezvous.exited(exited(0, 1, at=1.0, code=0))
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.kind == "exit"


def test_the_run_is_finished_when_all_ranks_have_finished_and_left() -> None:
    rendezvous = running()
    for rank in (0, 1):
        rendezvous.rank_finished(finished(rank, 1))
    assert rendezvous.exited(exited(0, 1, at=1.0, code=0)) == []
    assert kinds(rendezvous.exited(exited(1, 1, at=1.0, code=0))) == [AllFinished]


def test_a_rank_that_dies_after_another_has_finished_repeats_the_generation() -> None:
    rendezvous = running()
    rendezvous.rank_finished(finished(0, 1))
    rendezvous.exited(exited(0, 1, at=1.0, code=0))
    (verdict,) = rendezvous.exited(exited(1, 1, at=2.0))
    assert isinstance(verdict, Judge)
    rendezvous.ready("d/g1-0", 1)
    rendezvous.ready("d/g1-1", 2)
    assert kinds(rendezvous.proceed("failure")) == [CreateGeneration]


def test_messages_about_another_generation_change_nothing() -> None:
    rendezvous = running()
    assert rendezvous.exited(exited(0, 0, at=1.0)) == []
    rendezvous.rank_finished(finished(0, 7))
    assert rendezvous.phase is Phase.RUNNING
    assert rendezvous.members[0].finished is None


def test_a_new_group_of_workers_replaces_the_old_one_as_a_whole() -> None:
    rendezvous = running()
    (verdict,) = rendezvous.joined(joined(1, group="g2"), now=9.0)
    assert isinstance(verdict, Judge)
    assert verdict.failure.first.kind == "agent_lost"
    assert list(rendezvous.members) == [1]
    rendezvous.proceed("failure")
    assert kinds(rendezvous.joined(joined(0, group="g2"), now=9.1)) == [CreateGeneration]


def test_a_generation_is_judged_only_when_its_slowest_rank_is_gone_however_long_that_takes() -> None:
    rendezvous = running()
    rendezvous.exited(exited(0, 1, at=1.0))
    assert rendezvous.ready("d/g1-0", 6000) == []  # the other one still gives its memory back
    assert kinds(rendezvous.exited(exited(1, 1, at=99.0, ordered=True))) == [Judge]


def test_an_agent_that_dies_while_its_generation_ends_is_replaced_with_its_group() -> None:
    rendezvous = running()
    rendezvous.exited(exited(0, 1, at=1.0))
    (verdict,) = rendezvous.joined(joined(0, group="g2"), now=9.0)
    assert isinstance(verdict, Judge)
    assert {cause.kind for cause in verdict.failure.echoes} == {"agent_lost"}
    rendezvous.proceed("failure")
    assert kinds(rendezvous.joined(joined(1, group="g2"), now=9.1)) == [CreateGeneration]


def test_a_restarted_coordinator_lets_a_running_generation_go_on() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True)
    assert rendezvous.joined(joined(0, generation=3, ready=False), now=0.0) == []
    assert rendezvous.joined(joined(1, generation=3), now=0.0) == []
    assert rendezvous.phase is Phase.RUNNING
    assert kinds(rendezvous.exited(exited(0, 3, at=1.0))) == [EndRanks]


def test_a_restarted_coordinator_ends_a_generation_that_lost_a_rank_meanwhile() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True)
    rendezvous.joined(joined(0, generation=3), now=0.0)
    assert rendezvous.joined(joined(1), now=0.0) == [EndRanks(generation=3, agents=("d/g1-0",))]
    assert kinds(rendezvous.exited(exited(0, 3, at=1.0, ordered=True))) == [Judge]


def test_a_loss_that_ray_names_comes_before_the_errors_of_its_peers() -> None:
    rendezvous = running()
    rendezvous.progressed("d/g1-1", 1, 7, at=4.9)
    rendezvous.losses.lost("d/g1-1", WorkerLoss(kind="oom", message="low on memory"))
    error = RankError(type="RuntimeError", message="connection closed", traceback="", at=5.0, exit_code=1)
    rendezvous.exited(exited(0, 1, at=5.1, code=1, error=error))
    (verdict,) = rendezvous.joined(joined(0, group="g2"), now=9.0)
    assert isinstance(verdict, Judge)
    first = verdict.failure.first
    assert (first.rank, first.kind, first.at) == (1, "oom", 4.9)
    assert first.detail == {"killer": "ray", "ray": "low on memory"}
    assert [echo.kind for echo in verdict.failure.echoes] == ["exception"]


def test_a_kill_by_the_kernel_for_memory_is_no_mere_signal() -> None:
    rendezvous = running()
    rendezvous.exited(exited(1, 1, at=1.0, out_of_memory=True, detail={"killer": "kernel"}))
    (verdict,) = rendezvous.exited(exited(0, 1, at=1.1, ordered=True))
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.kind, verdict.failure.first.detail) == ("oom", {"killer": "kernel"})


def test_a_restarted_coordinator_learns_from_the_agents_what_its_predecessor_was_told() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True, agents_before=frozenset({"d/g1-0", "d/g1-1"}))
    ended_by = exited(1, 3, at=1.0, code=-11, detail={"signal": "SIGSEGV"})
    rendezvous.joined(joined(0, exited=exited(0, 3, at=1.1, ordered=True)), now=2.0)
    (verdict,) = rendezvous.joined(joined(1, exited=ended_by), now=2.0)
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.rank, verdict.failure.first.detail) == (1, {"signal": "SIGSEGV"})
    assert verdict.failure.echoes == ()


def test_what_an_agent_tells_a_restarted_coordinator_twice_counts_once() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True, agents_before=frozenset({"d/g1-0", "d/g1-1"}))
    ended = exited(1, 3, at=1.0)
    rendezvous.joined(joined(0, generation=3), now=2.0)
    assert kinds(rendezvous.joined(joined(1, exited=ended), now=2.0)) == [EndRanks]
    assert rendezvous.exited(ended) == []
    (verdict,) = rendezvous.exited(exited(0, 3, at=2.1, ordered=True))
    assert isinstance(verdict, Judge)
    assert (verdict.failure.first.rank, verdict.failure.echoes) == (1, ())


def test_a_failure_that_was_judged_before_the_coordinators_restart_is_not_judged_again() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True, judged=3)
    rendezvous.joined(joined(0, exited=exited(0, 3, at=1.0)), now=2.0)
    assert kinds(rendezvous.joined(joined(1), now=2.0)) == [CreateGeneration]


def test_agents_lost_together_with_the_coordinator_are_a_failure() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True, agents_before=frozenset({"d/g1-0", "d/g1-1"}))
    rendezvous.joined(joined(0, group="g2"), now=2.0)
    (verdict,) = rendezvous.joined(joined(1, group="g2"), now=2.5)
    assert isinstance(verdict, Judge)
    assert [verdict.failure.first.kind, *(echo.kind for echo in verdict.failure.echoes)] == ["agent_lost"] * 2


def test_a_generation_whose_ranks_never_started_because_the_coordinator_died_is_no_failure() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True, agents_before=frozenset({"d/g1-0", "d/g1-1"}))
    rendezvous.joined(joined(0, exited=exited(0, 2, at=1.0)), now=2.0)
    assert kinds(rendezvous.joined(joined(1), now=2.0)) == [CreateGeneration]


def test_a_restarted_coordinator_finishes_a_run_whose_ranks_have_all_finished() -> None:
    rendezvous = Rendezvous(generation=3, resuming=True)
    rendezvous.joined(joined(0, finished=finished(0, 3)), now=0.0)
    assert kinds(rendezvous.joined(joined(1, finished=finished(1, 3)), now=0.0)) == [AllFinished]


class ArbitraryOrders(RuleBasedStateMachine):
    """Agents, ranks and the coordinator's answers in any order: no rank is ever started beside a running one."""

    @initialize(world=st.integers(1, 3))
    def begin(self, world: int) -> None:
        self.world = world
        self.rendezvous = Rendezvous()
        self.groups = 0
        self.group = ""
        self.left: set[str] = set()
        self.running: dict[str, int] = {}  # the truth: agent -> generation of its living rank
        self.created = 0
        self.pending: list[str] = []
        self.clock = 0.0
        self.new_group()

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case CreateGeneration():
                    self.pending.append("create")
                case StartRanks():
                    alive = [a for a in decision.agents if a in self.running]
                    assert not alive, f"{alive} already run a rank"
                    assert len(set(decision.agents)) == self.world
                    assert self.left.isdisjoint(decision.agents), "an agent that was to leave got a rank"
                    for agent in decision.agents:
                        self.running[agent] = decision.generation
                case Judge():
                    self.pending.append("proceed")
                    assert not any(a in self.running for a in self.members()), "judged while ranks run"
                case AllFinished():
                    raise AssertionError("no rank ever finished")

    def members(self) -> list[str]:
        return [member.joined.agent for member in self.rendezvous.members.values()]

    def tick(self) -> float:
        self.clock += 1.0
        return self.clock

    @rule()
    def new_group(self) -> None:
        self.groups += 1
        self.group = f"g{self.groups}"
        self.running.clear()  # Ray has killed the old agents, and their ranks died with them

    @rule(rank=st.integers(0, 2), ready=st.booleans())
    def join(self, rank: int, ready: bool) -> None:
        if rank < self.world:
            agent = f"d/{self.group}-{rank}"
            if agent not in self.members():
                event = joined(rank, world=self.world, group=self.group, ready=ready)
                self.carry_out(self.rendezvous.joined(event, now=self.tick()))

    @rule(rank=st.integers(0, 2))
    def become_ready(self, rank: int) -> None:
        agent = f"d/{self.group}-{rank}"
        self.carry_out(self.rendezvous.ready(agent, store_port=1))

    @rule(rank=st.integers(0, 2))
    def die(self, rank: int) -> None:
        agent = f"d/{self.group}-{rank}"
        generation = self.running.pop(agent, None)
        if generation is not None:
            self.carry_out(self.rendezvous.exited(exited(rank, generation, at=self.tick(), group=self.group)))

    @rule(rank=st.integers(0, 2))
    def leave(self, rank: int) -> None:
        agent = f"d/{self.group}-{rank}"
        if agent in self.members():
            self.left.add(agent)
            self.rendezvous.leave(frozenset({agent}))

    @rule(rank=st.integers(0, 2))
    def lose_node(self, rank: int) -> None:
        agent = f"d/{self.group}-{rank}"
        if agent in self.members():
            self.left.add(agent)
            self.running.pop(agent, None)
            self.carry_out(self.rendezvous.agents_lost([rank]))

    @rule()
    def answer(self) -> None:
        if self.pending:
            if self.pending.pop(0) == "create":
                self.created += 1
                self.carry_out(self.rendezvous.created(self.created))
            elif self.rendezvous.phase is Phase.JUDGING:
                self.carry_out(self.rendezvous.proceed("failure"))

    @invariant()
    def the_machine_knows_every_running_rank(self) -> None:
        if hasattr(self, "rendezvous") and self.rendezvous.phase is Phase.RUNNING:
            for member in self.rendezvous.members.values():
                agent = member.joined.agent
                if agent in self.running:
                    assert member.generation == self.running[agent]


ArbitraryOrders.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestArbitraryOrders = ArbitraryOrders.TestCase


def test_a_failure_carries_the_exit_of_the_rank_to_blame_and_the_step_that_it_had_reached() -> None:
    rendezvous = running()
    rendezvous.progressed("d/g1-0", 1, 3, 0.0)
    last_words = exited(1, 1, at=2.0, step=7, log=("step 7", "out of luck"))
    rendezvous.exited(last_words)
    (verdict,) = rendezvous.exited(exited(0, 1, at=3.0, ordered=True, step=6))
    assert isinstance(verdict, Judge)
    assert verdict.failure.exit == last_words
    assert verdict.failure.step == 7, "told with the exit: progress is only looked at now and then"
