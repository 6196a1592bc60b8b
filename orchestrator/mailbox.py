"""The coordinator's end of the members' links (workers.link): who is known, what is new from them, what waits for them.

Invariants: an event is handed on once, in its member's order; a command stays until its member has said that it took
it. All of it is forgotten when the coordinator is restarted, which members notice by the incarnation.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.messages import Command, Event, Standing

_HEAR_SECONDS = 10.0


@dataclass(slots=True)
class _Box:
    process: str
    taken_events: int
    next_command: int = 1
    commands: list[tuple[int, Command]] = field(default_factory=list)
    stale: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Mailboxes:
    """One box a member. A member's name begins with its driver's id; another driver's members are stale."""

    def __init__(self, driver: str) -> None:
        self.incarnation = uuid.uuid4().hex[:8]
        self._driver = driver
        self._boxes: dict[str, _Box] = {}

    def join(self, member: str, process: str, events_taken: int) -> Standing:
        """`process` tells a member that introduces itself again from another process of that name."""
        if not member.startswith(f"{self._driver}/"):
            return "stale"
        box = self._boxes.setdefault(member, _Box(process=process, taken_events=events_taken))
        if box.process != process:
            box.process, box.taken_events = process, events_taken
            box.commands.clear()  # they were meant for the one that is gone
        return self._standing(member)

    def accept(self, member: str, batch: Sequence[tuple[int, Event]]) -> tuple[Standing, list[Event]]:
        """The events of the batch that are new."""
        standing = self._standing(member)
        if standing != "member":
            return standing, []
        box = self._boxes[member]
        new = [event for number, event in batch if number > box.taken_events]
        box.taken_events = max(box.taken_events, *(number for number, _ in batch))
        return standing, new

    def post(self, member: str, command: Command) -> None:
        box = self._boxes.get(member)
        if box is not None:
            box.commands.append((box.next_command, command))
            box.next_command += 1
            box.changed.set()

    async def hear(
        self, member: str, incarnation: str | None, taken: int
    ) -> tuple[Standing, str, list[tuple[int, Command]]]:
        """The member's commands; waits for some, but not for ever, so that a lost connection is noticed."""
        if self._standing(member) == "member":
            box = self._boxes[member]
            if incarnation == self.incarnation:
                box.commands = [(number, command) for number, command in box.commands if number > taken]
            if not box.commands and not box.stale:
                box.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(box.changed.wait(), _HEAR_SECONDS)
            return self._standing(member), self.incarnation, list(box.commands)
        return self._standing(member), self.incarnation, []

    def retire(self, member: str) -> None:
        """Another member has taken its place: it is told so, and must end."""
        if member in self._boxes:
            self._boxes[member].stale = True
            self._boxes[member].changed.set()

    def _standing(self, member: str) -> Standing:
        if not member.startswith(f"{self._driver}/"):
            return "stale"
        box = self._boxes.get(member)
        if box is None:
            return "unknown"
        return "stale" if box.stale else "member"
