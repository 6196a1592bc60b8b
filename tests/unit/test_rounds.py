"""Ray Train is started again: without a node, with it after all, or no more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.train import ScalingConfig

from orchestrator import ray_fit
from orchestrator.decide.failure import Cause, Failure
from orchestrator.decide.nodes import FAILURES_MAX
from orchestrator.decide.rendezvous import Rendezvous
from orchestrator.decide.rounds import ENDS_MAX
from orchestrator.nodes import NodeWatch
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.recovery import excluded_nodes
from orchestrator.roster import KeeperRoster
from orchestrator.rounds import Round, Rounds
from workers.messages import AgentJoined, Command, Finish


class Watch(NodeWatch):
    def __init__(self, **cpus: float) -> None:
        super().__init__(lambda: ())
        self.there = {node: {"CPU": count} for node, count in cpus.items()}

    async def look(self) -> dict[str, dict[str, float]]:
        return self.there


class Rig:
    """A run of two ranks, on nodes a and b."""

    def __init__(self, directory: Path, watch: Watch, *, can_exclude: bool = True) -> None:
        self.path = directory / "ledger.jsonl"
        self.ledger = Ledger(self.path)
        self.ledger.append("coordinator", driver="d", resumed=False)
        self.posted: list[tuple[str, Command]] = []
        self.rendezvous = Rendezvous()
        keepers = KeeperRoster(lambda: (), lambda name, command: None)
        for rank, node in enumerate("ab"):
            self.rendezvous.joined(agent(rank, node), now=0.0)
        for generation in range(1, FAILURES_MAX + 1):
            keepers.placed(generation, {0: "a", 1: "b"})
        self.rounds = Rounds(
            ledger=self.ledger,
            rendezvous=self.rendezvous,
            keepers=keepers,
            nodes=watch,
            needed={"CPU": 2.0},
            can_exclude=can_exclude,
            excluded=(),
            post=lambda name, command: self.posted.append((name, command)),
        )

    def fail(self, *ranks: int) -> None:
        for generation, rank in enumerate(ranks, start=1):
            first = Cause(rank=rank, kind="signal", exit_code=-9, at=0.0)
            failure = Failure(generation=generation, first=first, echoes=(), step=1)
            asyncio.run(self.rounds.judged(failure, last_report=7))

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in read_ledger(self.path) if entry["kind"] == kind]


def agent(rank: int, node: str) -> AgentJoined:
    return AgentJoined(
        agent=f"d/{rank}",
        group="ab",
        rank=rank,
        local_rank=0,
        world_size=2,
        node=node,
        node_ip="",
        pid=1,
        ready=True,
        store_port=0,
    )


def test_a_node_is_left_out_by_ending_the_round_and_beginning_another(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Watch(a=1.0, b=1.0, c=1.0))
    rig.fail(*[1] * FAILURES_MAX)
    assert rig.posted == [(f"d/{rank}", Finish(last_report=7)) for rank in (0, 1)]
    assert all(member.leaving for member in rig.rendezvous.members.values())
    assert rig.rounds.ray_ended("its workers returned") == Round(delay_seconds=0.0, excluded=("b",), group="ab")
    assert rig.told("controller") == []
    assert excluded_nodes(rig.path, "d") == {"b"}


@pytest.mark.parametrize(("watch", "can_exclude"), [(Watch(a=1.0, b=1.0), True), (Watch(a=1.0, b=1.0, c=1.0), False)])
def test_a_node_that_cannot_be_done_without_is_only_reported(tmp_path: Path, watch: Watch, can_exclude: bool) -> None:
    rig = Rig(tmp_path, watch, can_exclude=can_exclude)
    rig.fail(*[1] * FAILURES_MAX)
    assert rig.posted == []
    assert [(entry["node"], entry["left_out"]) for entry in rig.told("node_excluded")] == [("b", False)]


def test_a_node_is_taken_back_when_ray_cannot_place_the_ranks_without_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Watch(a=1.0, b=1.0, c=1.0))
    rig.fail(*[1] * FAILURES_MAX)
    rig.rounds.ray_ended("its workers returned")
    following = rig.rounds.ray_ended("WorkerGroupStartupTimeoutError")
    assert isinstance(following, Round)
    assert following.excluded == ()
    assert [entry["nodes"] for entry in rig.told("nodes_taken_back")] == [["b"]]
    assert excluded_nodes(rig.path, "d") == set()


def test_a_node_stays_out_when_the_controller_dies_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Watch(a=1.0, b=1.0, c=1.0))
    rig.fail(*[1] * FAILURES_MAX)
    rig.rounds.ray_ended("its workers returned")
    rig.rounds.joined()
    following = rig.rounds.ray_ended("ActorDiedError")
    assert isinstance(following, Round)
    assert following.excluded == ("b",)


def test_a_controller_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Watch())
    ends = [rig.rounds.ray_ended("ActorDiedError") for _ in range(ENDS_MAX + 1)]
    assert [type(end) for end in ends] == [Round] * ENDS_MAX + [str]
    assert "ActorDiedError" in str(ends[-1])


def test_another_drivers_exclusions_do_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Watch(a=1.0, b=1.0, c=1.0))
    rig.fail(*[1] * FAILURES_MAX)
    rig.ledger.append("coordinator", driver="e", resumed=False)
    assert excluded_nodes(rig.path, "e") == set()


def test_the_users_own_label_selector_is_kept() -> None:
    plain = ScalingConfig(num_workers=2)
    assert ray_fit.without_nodes(plain, ()) is plain
    assert ray_fit.without_nodes(plain, ("x", "y")).label_selector == {"ray.io/node-id": "!in(x, y)"}
    zoned = ScalingConfig(num_workers=2, label_selector={"zone": "a"})  # type: ignore[call-arg]
    assert ray_fit.without_nodes(zoned, ("x",)).label_selector == {"zone": "a", "ray.io/node-id": "!in(x)"}
    each = ScalingConfig(num_workers=2, label_selector=[{"zone": "a"}, {}])  # type: ignore[call-arg]
    assert ray_fit.without_nodes(each, ("x",)).label_selector == [
        {"zone": "a", "ray.io/node-id": "!in(x)"},
        {"ray.io/node-id": "!in(x)"},
    ]


def test_a_selector_of_the_users_on_the_node_leaves_no_room_for_ours() -> None:
    mine = ScalingConfig(num_workers=2, label_selector={"ray.io/node-id": "x"})  # type: ignore[call-arg]
    assert not ray_fit.can_exclude(mine)
    assert ray_fit.can_exclude(ScalingConfig(num_workers=2))


def test_the_ranks_need_their_resources_together() -> None:
    assert ray_fit.needed_resources(ScalingConfig(num_workers=3)) == {"CPU": 3.0}
    assert ray_fit.needed_resources(ScalingConfig(num_workers=2, use_gpu=True)) == {"GPU": 2.0}
    given = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 1})
    assert ray_fit.needed_resources(given) == {"CPU": 8, "GPU": 2}
