"""SIGTERM is told and not obeyed, except by a process that only inherited the handler."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from workers import termination
from workers.wire import channel_pair


@pytest.fixture(autouse=True)
def handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_rank_tells_its_agent_and_goes_on() -> None:
    agent, rank = channel_pair()
    before = time.time()
    termination.tell_on_sigterm(rank)
    os.kill(os.getpid(), signal.SIGTERM)
    received = agent.receive(5.0)
    assert received is not None
    assert received[0]["kind"] == "terminated"
    assert before <= received[0]["at"] <= time.time()


def test_a_child_of_a_rank_dies_of_the_signal() -> None:
    agent, rank = channel_pair()
    termination.tell_on_sigterm(rank)
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    with pytest.raises(TimeoutError):
        agent.receive(0.0)


def test_an_agent_is_woken_by_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "_pipe", None)
    assert termination.fd() is None
    before = signal.set_wakeup_fd(-1)
    try:
        termination.watch()
        assert not termination.received()
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.received()
        assert not termination.received()
    finally:
        signal.set_wakeup_fd(before)
