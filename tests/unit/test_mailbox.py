"""At least once in both directions, handed on once, and never to the wrong process."""

import asyncio

from orchestrator.mailbox import Mailboxes
from workers.messages import Finish, RankReady, Reported


def reported(number: int) -> Reported:
    return Reported(agent="d/a", number=number)


def test_an_event_that_is_sent_again_is_handed_on_once() -> None:
    mail = Mailboxes("d")
    assert mail.join("d/a", "p", 0) == "member"
    batch = [(1, reported(1)), (2, reported(2))]
    assert mail.accept("d/a", batch) == ("member", [reported(1), reported(2)])
    assert mail.accept("d/a", [*batch, (3, reported(3))]) == ("member", [reported(3)])


def test_a_coordinator_that_was_restarted_asks_members_to_introduce_themselves() -> None:
    mail = Mailboxes("d")
    assert mail.accept("d/a", [(7, reported(7))]) == ("unknown", [])
    mail.join("d/a", "p", 6)
    assert mail.accept("d/a", [(6, reported(6)), (7, reported(7))]) == ("member", [reported(7)])


def test_another_drivers_members_are_turned_away() -> None:
    mail = Mailboxes("d")
    assert mail.join("e/a", "p", 0) == "stale"
    assert mail.accept("e/a", [(1, RankReady(agent="e/a", store_port=0))]) == ("stale", [])


def test_a_command_stays_until_its_member_has_taken_it() -> None:
    async def story() -> None:
        mail = Mailboxes("d")
        mail.join("d/a", "p", 0)
        mail.post("d/a", Finish(last_report=1))
        _, incarnation, commands = await mail.hear("d/a", None, 0)
        assert commands == [(1, Finish(last_report=1))]
        assert (await mail.hear("d/a", incarnation, 0))[2] == commands
        mail.post("d/a", Finish(last_report=2))
        assert (await mail.hear("d/a", incarnation, 1))[2] == [(2, Finish(last_report=2))]

    asyncio.run(story())


def test_a_waiting_member_gets_a_command_as_soon_as_there_is_one() -> None:
    async def story() -> None:
        mail = Mailboxes("d")
        mail.join("d/a", "p", 0)
        waiting = asyncio.create_task(mail.hear("d/a", mail.incarnation, 0))
        await asyncio.sleep(0)
        mail.post("d/a", Finish(last_report=3))
        assert (await waiting)[2] == [(1, Finish(last_report=3))]

    asyncio.run(story())


def test_commands_for_a_process_that_is_gone_are_not_given_to_its_successor() -> None:
    async def story() -> None:
        mail = Mailboxes("d")
        mail.join("d/keeper", "first", 0)
        mail.post("d/keeper", Finish(last_report=1))
        mail.join("d/keeper", "second", 0)
        mail.post("d/keeper", Finish(last_report=2))
        assert [command for _, command in (await mail.hear("d/keeper", None, 0))[2]] == [Finish(last_report=2)]

    asyncio.run(story())


def test_commands_and_events_stay_when_the_same_process_introduces_itself_again() -> None:
    """It does so when the answer to its introduction, or to what it told, was lost."""

    async def story() -> None:
        mail = Mailboxes("d")
        mail.join("d/keeper", "p", 0)
        mail.accept("d/keeper", [(1, reported(1))])
        mail.post("d/keeper", Finish(last_report=1))
        mail.join("d/keeper", "p", 0)
        assert mail.accept("d/keeper", [(1, reported(1)), (2, reported(2))]) == ("member", [reported(2)])
        assert [command for _, command in (await mail.hear("d/keeper", None, 0))[2]] == [Finish(last_report=1)]

    asyncio.run(story())


def test_a_retired_member_is_told_at_once() -> None:
    async def story() -> None:
        mail = Mailboxes("d")
        mail.join("d/a", "p", 0)
        waiting = asyncio.create_task(mail.hear("d/a", mail.incarnation, 0))
        await asyncio.sleep(0)
        mail.retire("d/a")
        assert (await waiting)[0] == "stale"

    asyncio.run(story())
