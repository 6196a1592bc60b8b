"""A member's line to the coordinator, with the coordinator's answers given by the test."""

import threading
import time
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


def test_a_late_answer_that_it_is_unknown_does_not_make_a_member_introduce_itself_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both threads ask a restarted coordinator; the one's answer is read after the other has introduced the member."""
    hearing, told, hears = threading.Event(), threading.Event(), 0
    asked: list[str] = []

    def answer(link: Link, method: str, *_arguments: Any) -> Any:
        nonlocal hears
        asked.append(method)
        match method:
            case "tell" if "join" not in asked:
                assert hearing.wait(DEADLINE_SECONDS)
                return "unknown"
            case "tell":
                told.set()
            case "hear":
                hearing.set()
                hears += 1
                if hears == 1:
                    while link._introductions == 0:
                        time.sleep(0.001)  # until the link has taken in the answer to its introduction
                    return "unknown", "second", []
                assert told.wait(DEADLINE_SECONDS)
                link.close()
                return None
        return "member"

    monkeypatch.setattr(Link, "_call", answer)
    link = Link(
        "coordinator",
        "d/keeper",
        introduce=lambda: StandbyLost(agent="d/keeper"),
        on_command=lambda _command: None,
        on_lost=lambda _reason: None,
        lost_after_seconds=DEADLINE_SECONDS,
    )
    link._introduced = True  # as before the restart
    link.tell(StandbyLost(agent="d/keeper"))
    link.start()
    assert told.wait(DEADLINE_SECONDS)
    while not link._closed:
        time.sleep(0.001)
    assert asked.count("join") == 1
