"""A rank that waits for orders is started only if it is the one that the orders are for."""

import os
from pathlib import Path

import pytest

from workers.forks import ForkedRank
from workers.heartbeat import HeartbeatPage
from workers.messages import StartRank
from workers.processes import ProcessId
from workers.wire import channel_pair


def order(rank: int, store_port: int) -> StartRank:
    return StartRank(
        generation=2,
        rank=rank,
        local_rank=0,
        world_size=2,
        store_host="127.0.0.1",
        store_port=store_port,
        restore=None,
    )


@pytest.mark.parametrize(("rank", "port", "may"), [(0, 7, True), (0, 8, False), (1, 8, True)])
def test_a_rank_0_that_took_a_dead_ones_place_does_not_start_with_its_orders(
    rank: int, port: int, may: bool, tmp_path: Path
) -> None:
    """The others would look for the store of the one that is dead."""
    ours, theirs = channel_pair()
    heartbeat_fd, last_words_fd = HeartbeatPage.create_fd(), os.memfd_create("words")
    standby = ForkedRank(
        token=1,
        directory=tmp_path,
        channel=ours,
        heartbeat=HeartbeatPage(heartbeat_fd),
        last_words_fd=last_words_fd,
    )
    os.close(heartbeat_fd)
    standby.ready, standby.store_port = True, 7
    assert not standby.may_start(order(rank, port)), "it has no process yet"
    standby.process = ProcessId(pid=1, start_ticks=0)
    assert standby.may_start(order(rank, port)) == may
    standby.process = None
    standby.close()
    theirs.close()
