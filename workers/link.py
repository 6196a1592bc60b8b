"""The line between a member (agent or keeper) and the coordinator, over a Ray actor that may be restarted at any time.

Events are queued, numbered and sent in order until the coordinator has taken them; commands are fetched by a call
that waits on the other side. A coordinator that was restarted knows nobody: it answers "unknown", and the member
introduces itself again with its whole state, then repeats what was not taken yet. So both directions are at least
once; receivers drop repeats.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from workers.messages import Command, Event, Standing

NAMESPACE = "lastgood"
_RETRY_SECONDS = 0.02


class Link:
    """Two threads: one sends events, one fetches commands and passes them to `on_command`, one after the other.

    `introduce` returns the member's Joined event with its present state. `on_lost(reason)` is called at most once,
    when the coordinator has been gone for `lost_after_seconds` or has told this member that it belongs to an older
    group.
    """

    def __init__(
        self,
        coordinator: str,
        member: str,
        *,
        introduce: Callable[[], Event],
        on_command: Callable[[Command], None],
        on_lost: Callable[[str], None],
        lost_after_seconds: float,
    ) -> None:
        self._coordinator = coordinator
        self._member = member
        self._process = uuid.uuid4().hex[:8]
        self._introduce = introduce
        self._on_command = on_command
        self._on_lost = on_lost
        self._lost_after_seconds = lost_after_seconds
        self._events: deque[tuple[int, Event]] = deque()
        self._next_number = 1
        self._changed = threading.Condition()
        self._handle: Any = None
        self._introduced = False
        self._introductions = 0
        self._closed = False
        self._lost = False

    def start(self) -> None:
        threading.Thread(target=self._send, name="lastgood-tell", daemon=True).start()
        threading.Thread(target=self._fetch, name="lastgood-hear", daemon=True).start()

    def tell(self, event: Event) -> None:
        """Queue an event; never blocks and never raises."""
        with self._changed:
            self._events.append((self._next_number, event))
            self._next_number += 1
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything told so far was taken; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._events or self._lost, timeout_seconds) and not self._lost

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the coordinator until it answers; None when the link is closed or the coordinator is lost."""
        gone_since: float | None = None
        while not self._closed:
            try:
                if self._handle is None:
                    self._handle = ray.get_actor(self._coordinator, namespace=NAMESPACE)
                return ray.get(getattr(self._handle, method).remote(self._member, *arguments))
            except (RayError, ValueError) as error:
                self._handle = None
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > self._lost_after_seconds:
                    self._report_lost(f"the coordinator is gone: {type(error).__name__}")
                    return None
                time.sleep(_RETRY_SECONDS)
        return None

    def _report_lost(self, reason: str) -> None:
        with self._changed:
            first, self._lost, self._closed = not self._lost, True, True
            self._changed.notify_all()
        if first:
            self._on_lost(reason)

    def _send(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._events) or not self._introduced or self._closed)
                introduced, introductions = self._introduced, self._introductions
                batch = list(self._events)
                taken = self._next_number - 1 - len(batch)
            if not introduced:
                standing = self._call("join", self._process, self._introduce(), taken)
                with self._changed:
                    self._introduced = True
                    self._introductions += 1
                    introductions = self._introductions
                    self._changed.notify_all()
            elif batch:
                standing = self._call("tell", batch)
                if standing == "member":
                    with self._changed:
                        while self._events and self._events[0][0] <= batch[-1][0]:
                            self._events.popleft()
                        self._changed.notify_all()
            else:
                continue
            self._note_standing(standing, introductions)

    def _note_standing(self, standing: Standing | None, introductions: int) -> None:
        """`introductions`: how many there had been when it was asked."""
        if standing == "stale":
            self._report_lost("another group of workers has taken over")
        elif standing == "unknown":
            with self._changed:
                # Else the answer was on its way while the other thread introduced this member.
                if introductions == self._introductions:
                    self._introduced = False
                self._changed.notify_all()

    def _fetch(self) -> None:
        incarnation: str | None = None
        taken = 0
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._introduced or self._closed)
                introductions = self._introductions
            answer = self._call("hear", incarnation, taken)
            if answer is None:
                return
            standing, new_incarnation, commands = answer
            self._note_standing(standing, introductions)
            if new_incarnation != incarnation:
                incarnation, taken = new_incarnation, 0
            for number, command in commands:
                if number > taken:
                    taken = number
                    self._on_command(command)
