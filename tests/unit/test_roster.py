"""Which keeper is told what, and who is waited for."""

from orchestrator.roster import KeeperRoster
from workers.keeper_messages import EndGeneration, KeeperJoined
from workers.messages import Command

END = EndGeneration(generation=1)


def keeper(node: str, pid: int = 1) -> KeeperJoined:
    return KeeperJoined(keeper=f"d/keeper-{node}", node=node, pid=pid, snapshots=(), receipts=())


def roster(*nodes: str, in_use: tuple[str, ...]) -> tuple[KeeperRoster, list[tuple[str, Command]]]:
    posted: list[tuple[str, Command]] = []
    subject = KeeperRoster(lambda: in_use, lambda name, command: posted.append((name, command)))
    for node in nodes:
        subject.joined(keeper(node))
    return subject, posted


def test_a_generation_can_start_when_every_node_in_use_has_a_keeper() -> None:
    assert not roster("a", in_use=("a", "b"))[0].complete()
    assert roster("a", "b", "c", in_use=("a", "b"))[0].complete()


def test_the_keeper_of_a_lost_node_is_neither_told_anything_nor_waited_for() -> None:
    subject, posted = roster("a", "b", in_use=("a",))
    subject.node_lost("b")
    subject.await_drained()
    subject.post_all(END)
    subject.post_to_node("b", END)
    assert posted == [("d/keeper-a", END)]
    assert subject.drained("d/keeper-a")


def test_a_lost_node_names_the_ranks_that_it_had_by_generation() -> None:
    subject, _ = roster("a", "b", in_use=())
    subject.placed(1, {0: "a", 1: "b"})
    subject.placed(2, {0: "b", 1: "a"})
    subject.placed(3, {0: "a", 1: "a"})
    assert subject.node_lost("b") == [(1, [1]), (2, [0])]
    assert subject.places(2)[1] == "a"
    assert subject.places(9) == {}
