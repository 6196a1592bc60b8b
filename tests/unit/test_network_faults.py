"""Packets between two processes are lost while the fault lasts, and only theirs; it does not outlive its campaign."""

import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.faults import network
from chaos.faults.fault import Target
from chaos.faults.registry import FAULTS

UNAVAILABLE = FAULTS["cut_network"].available()
needs_firewall = pytest.mark.skipif(
    UNAVAILABLE is not None and not (os.environ.get("CI") == "true" and os.geteuid() == 0),
    reason=UNAVAILABLE or "",
)

ECHO = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := link.recv(65536):
    link.sendall(data)
"""


class Peer:
    """A process that sends back what it is sent."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.process = subprocess.Popen([sys.executable, "-c", ECHO, str(port)])
            listener.settimeout(60)
            self.link, _ = listener.accept()

    def answers(self, word: bytes, *, within_seconds: float) -> bool:
        """Whether what is sent comes back in time; it stays to be read if not."""
        self.link.sendall(word)
        return self.hears(word, within_seconds=within_seconds)

    def hears(self, word: bytes, *, within_seconds: float) -> bool:
        deadline, heard = time.monotonic() + within_seconds, b""
        while len(heard) < len(word) and (left := deadline - time.monotonic()) > 0:
            if select.select([self.link], [], [], left)[0]:
                heard += self.link.recv(65536)
        return heard == word

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    pair = Peer(), Peer()
    yield pair
    for peer in pair:
        peer.close()


def status_of(*pids: int) -> dict[str, Any]:
    ranks = [{"rank": rank, "pid": pid, "node_id": "n"} for rank, pid in enumerate(pids)]
    return {"generation": 2, "step": 3, "ranks": ranks, "keepers": []}


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout


@needs_firewall
def test_cut_network_lets_nothing_through_until_it_is_released_and_then_all_of_it(peers: tuple[Peer, Peer]) -> None:
    cut, other = peers
    # The victim is drawn among both; whichever it is, the connection is the one between them.
    target = Target(run_dir=Path(), status=lambda: status_of(cut.process.pid, os.getpid()))
    injected = FAULTS["cut_network"].inject(target, random.Random(0))
    assert injected is not None
    assert injected.release is not None
    assert injected.context["connections"] == 1
    try:
        assert not cut.answers(b"lost", within_seconds=0.5)
        assert other.answers(b"not touched", within_seconds=30)
    finally:
        injected.release()
    assert cut.hears(b"lost", within_seconds=60)
    assert "lastgood" not in tables()


@needs_firewall
def test_bad_network_delays_and_loses_nothing_for_good(peers: tuple[Peer, Peer]) -> None:
    ways = network.ways_between([peers[0].process.pid], [os.getpid()])
    end = network.lose(ways, percent=33)
    try:
        for number in range(20):
            assert peers[0].answers(b"%d" % number, within_seconds=60)
        counted = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout
    finally:
        end()
    assert counted.count("numgen random mod 100 < 33 drop") == len(ways) == 2


@needs_firewall
def test_rules_go_with_a_campaign_that_is_killed(peers: tuple[Peer, Peer]) -> None:
    script = (
        "import sys, time\n"
        "from chaos.faults import network\n"
        "network.lose(network.ways_between([int(sys.argv[1])], [int(sys.argv[2])]), percent=100)\n"
        "print('cut', flush=True)\n"
        "time.sleep(600)\n"
    )
    campaign = subprocess.Popen(
        [sys.executable, "-c", script, str(peers[0].process.pid), str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    assert campaign.stdout is not None
    assert campaign.stdout.readline() == "cut\n"
    assert not peers[0].answers(b"lost", within_seconds=0.3)
    campaign.kill()
    campaign.wait()
    campaign.stdout.close()
    assert peers[0].hears(b"lost", within_seconds=60)


@needs_firewall
def test_what_the_kernel_refuses_is_told() -> None:
    with pytest.raises(RuntimeError, match="did not take the rules"):
        network.lose([("no address", 1, "127.0.0.1", 2)], percent=100)


def test_ranks_that_are_not_connected_are_tried_again_later() -> None:
    for status in ({}, status_of(os.getpid()), status_of(os.getpid(), 2**22 + 1)):
        target = Target(run_dir=Path(), status=lambda status=status: status)  # type: ignore[misc]
        assert FAULTS["cut_network"].inject(target, random.Random(0)) is None


def test_nothing_is_offered_without_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in (FAULTS["slow_network"].available() or "")
