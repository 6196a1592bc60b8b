"""A member's line to the coordinator, with the coordinator's answers given by the test."""

import threading
from typing import Any

import pytest

from workers.link import Link
from workers.messages import Finish, StandbyLost

DEADLINE_SECONDS = 20.0


def test_a_member_that_has_nothing_to_tell_hears_a_restarted_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for its introduction in answer to a request for commands, and tells nothing afterwards."""
    heard, restarted = threading.Event(), threading.Event()
    asked: list[str] = []

    def answer(link: Link, method: str, *_arguments: Any) -> Any:
        asked.append(method)
        if method == "join":
            return "member"
        if not restarted.is_set():
            restarted.set()
            return "unknown", "second", []
        assert method == "hear"
        if heard.is_set():
            link.close()
            return None
        return "member", "second", [(1, Finish(last_report=7))]

    monkeypatch.setattr(Link, "_call", answer)
    link = Link(
        "coordinator",
        "d/agent",
        introduce=lambda: StandbyLost(agent="d/agent"),
        on_command=lambda _command: heard.set(),
        on_lost=lambda _reason: None,
        lost_after_seconds=DEADLINE_SECONDS,
    )
    link._introduced = True  # as before the restart, with nothing left to tell
    link.start()
    assert heard.wait(DEADLINE_SECONDS)
    link.close()
    assert asked[:2] == ["hear", "join"]
