"""Which keepers are waited for."""

from orchestrator.roster import KeeperRoster
from workers.keeper_messages import KeeperJoined


def joined(node: str) -> KeeperJoined:
    return KeeperJoined(keeper=f"keeper-{node}", node=node, pid=1, snapshots=(), receipts=())


def test_a_generation_has_drained_when_its_last_keeper_says_so() -> None:
    roster = KeeperRoster(lambda: {"a", "b"}, lambda member, command: None)
    roster.joined(joined("a"))
    roster.joined(joined("b"))
    roster.await_drained()
    assert not roster.drained("keeper-a")
    assert not roster.drained("keeper-a")
    assert roster.drained("keeper-b")


def test_when_time_is_up_nobody_is_waited_for_also_if_no_keeper_was_known() -> None:
    roster = KeeperRoster(lambda: {"a"}, lambda member, command: None)
    roster.await_drained()
    assert roster.drained(None)
