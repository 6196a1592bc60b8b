"""From pulses to what is ordered and written down."""

from pathlib import Path

import pytest
from pulse_samples import a_pulse

from orchestrator import watch as watch_module
from orchestrator.decide.rendezvous import Rendezvous
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.watch import Watch
from workers.keeper_messages import KillAgent
from workers.messages import AgentJoined, Command, DumpStacks, RankPulse, StacksDumped


class Rig:
    """Two running ranks, whose agents are a0 and a1."""

    def __init__(self, tmp_path: Path, *, floor_seconds: float | None = 2.0) -> None:
        self.to_agents: list[Command] = []
        self.to_nodes: list[tuple[str, Command]] = []
        self.suspicions: list[str] = []
        self.rendezvous = Rendezvous()
        for rank in range(2):
            self.rendezvous.joined(
                AgentJoined(
                    agent=f"a{rank}",
                    group="g",
                    rank=rank,
                    local_rank=rank,
                    world_size=2,
                    node=f"n{rank}",
                    node_ip="127.0.0.1",
                    pid=100 + rank,
                    start_ticks=7,
                    ready=True,
                    store_port=1,
                ),
                now=0.0,
            )
        self.rendezvous.created(1)
        self.path = tmp_path / "ledger.jsonl"
        self.watch = Watch(
            rendezvous=self.rendezvous,
            ledger=Ledger(self.path),
            floor_seconds=floor_seconds,
            start_seconds_max=60.0,
            post_to_agents=self.to_agents.append,
            post_to_node=lambda node, command: self.to_nodes.append((node, command)),
            on_suspect_health=lambda: self.suspicions.append("slow"),
        )

    def pulse(self, rank: int, at: float, **fields: object) -> RankPulse:
        return a_pulse(at, agent=f"a{rank}", **fields)

    def train(self, until: float) -> None:
        for beat in range(int(until * 2)):
            for rank in range(2):
                assert (
                    self.watch.pulse(self.pulse(rank, beat / 2, step=beat, sequence=6 * beat, step_seconds=(0.1,)))
                    is None
                )

    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in read_ledger(self.path)]


def test_a_hang_is_written_down_with_the_stacks_that_were_taken_when_it_was_suspected(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.train(30)
    cause = None
    for beat in range(60, 80):
        cause = rig.watch.pulse(rig.pulse(0, beat / 2, step=59, sequence=354)) or cause
        cause = rig.watch.pulse(rig.pulse(1, beat / 2, step=59, sequence=355)) or cause
        if rig.to_agents and "stacks" not in rig.kinds():
            for rank in range(2):
                file = f"stacks/of-{rank}.txt"
                rig.watch.stacks(StacksDumped(agent=f"a{rank}", generation=1, file=file, where=f"line {rank}"))
        if cause:
            break
    assert rig.to_agents == [DumpStacks(generation=1, name="hang-0")]
    assert rig.kinds() == ["suspected", "stacks", "stacks"]
    assert cause is not None
    assert (cause.rank, cause.kind) == (0, "hang")
    assert cause.detail["stacks"] == {"0": "stacks/of-0.txt", "1": "stacks/of-1.txt"}
    assert cause.detail["where"] == {"0": "line 0", "1": "line 1"}


def test_what_moves_again_is_written_down_and_ends_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.train(30)
    for beat in range(60, 65):
        for rank in range(2):
            assert rig.watch.pulse(rig.pulse(rank, beat / 2, step=59, sequence=354)) is None
    for rank in range(2):
        assert rig.watch.pulse(rig.pulse(rank, 33.0, step=60, sequence=360)) is None
    assert rig.kinds() == ["suspected", "cleared"]


def test_a_rank_that_turns_slow_is_written_down_and_the_run_saved_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for beat in range(60):
        for rank in range(2):
            fields = {"step": beat, "sequence": 6 * beat - rank, "step_seconds": (0.5,), "tick": beat}
            assert rig.watch.pulse(rig.pulse(rank, beat / 2, **fields)) is None
    assert rig.kinds() == ["straggler"]
    assert rig.suspicions == ["slow"]


def test_an_agent_that_says_nothing_is_ended_by_the_keeper_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.train(5)
    now = 0.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now)
    for second in range(25):
        now = 100.0 + second
        rig.watch.look()
        rig.watch.pulse(rig.pulse(0, 5 + second, step=100 + second))
    assert rig.to_nodes == [("n1", KillAgent(pid=101, start_ticks=7))]
    assert rig.kinds() == ["silent"]


def test_with_hangs_left_alone_nothing_is_suspected(tmp_path: Path) -> None:
    rig = Rig(tmp_path, floor_seconds=None)
    rig.train(30)
    for beat in range(60, 200):
        for rank in range(2):
            assert rig.watch.pulse(rig.pulse(rank, beat / 2, step=59)) is None
    rig.watch.look()
    assert not rig.path.exists()


def test_pulses_of_another_generation_change_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.train(30)
    for beat in range(60, 90):
        assert rig.watch.pulse(rig.pulse(0, beat / 2, step=1, generation=2)) is None
    assert not rig.path.exists()
