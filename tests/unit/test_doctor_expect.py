"""What saves will cost follows from the measured speeds as the model says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.doctor.expect import RESTART_RANK_SECONDS, RESTART_WORKER_SECONDS, Scale, Span, Speeds, expect

GB = 10**9
SPEEDS = Speeds(
    cpus=64,
    copy=10 * GB,
    copy_all=40 * GB,
    copy_fresh=2 * GB,
    hash=20 * GB,
    write=2 * GB,
    read_back=4 * GB,
    read=1 * GB,
    sync_seconds=0.5,
)
ONE_RANK = Scale(state_bytes=10 * GB, ranks=1, ranks_per_node=1, slots=2)


def test_one_rank_on_one_node() -> None:
    found = expect(ONE_RANK, SPEEDS)
    assert (found.nodes, found.rank_bytes, found.node_bytes, found.memory_bytes) == (1, 10 * GB, 10 * GB, 20 * GB)
    assert found.stall_seconds == pytest.approx(1.0)
    # copy 1, digest 1, write 5, fsync 0.5
    assert found.durable_seconds.least == found.durable_seconds.most == pytest.approx(7.5)
    # and read back 2.5, digest 1
    assert found.verified_seconds.least == pytest.approx(11.0)
    assert found.save_seconds.least == pytest.approx(10.0)
    # digest 1, copy 1
    assert found.recovery_memory_seconds == pytest.approx(RESTART_RANK_SECONDS + 2.0)
    # read 10, into fresh memory 5, digest 1, copy 1
    assert found.recovery_storage_seconds.least == pytest.approx(RESTART_RANK_SECONDS + 17.0)
    assert found.recovery_worker_seconds.least == pytest.approx(RESTART_WORKER_SECONDS + 17.0)


def test_ranks_of_a_node_share_its_memory_bandwidth_and_its_storage() -> None:
    alone = expect(ONE_RANK, SPEEDS)
    together = expect(replace(ONE_RANK, state_bytes=80 * GB, ranks=8, ranks_per_node=8), SPEEDS)
    assert together.rank_bytes == alone.rank_bytes
    assert together.stall_seconds == pytest.approx(2 * alone.stall_seconds)  # 8 ranks at 5 GB/s, not 10
    assert together.memory_bytes == 8 * alone.memory_bytes
    assert together.save_seconds.least == pytest.approx(8 * 7.5 + 2.5)


def test_many_ranks_that_read_a_checkpoint_share_the_memory_bandwidth_too() -> None:
    found = expect(replace(ONE_RANK, ranks=32, ranks_per_node=32), SPEEDS)
    # read 10, rank / (40 / 32) twice, digest 2 x rank / 20
    rank = 10 / 32
    assert found.recovery_storage_seconds.least == pytest.approx(
        RESTART_RANK_SECONDS + 10 + 2 * rank / 1.25 + rank / 10
    )


def test_fewer_cpus_than_ranks_slow_the_digests_down() -> None:
    scale = replace(ONE_RANK, ranks=4, ranks_per_node=4)
    many, few = expect(scale, SPEEDS), expect(scale, replace(SPEEDS, cpus=2))
    assert few.recovery_memory_seconds - many.recovery_memory_seconds == pytest.approx(0.25)


def test_several_nodes_are_a_span_from_full_speed_each_to_one_storage_for_all() -> None:
    found = expect(replace(ONE_RANK, state_bytes=80 * GB, ranks=8), SPEEDS)
    assert found.nodes == 8
    assert found.durable_seconds == Span(least=pytest.approx(7.5), most=pytest.approx(7.5 + 7 * 5.0))


def test_a_last_node_that_is_not_full_counts_as_a_node() -> None:
    assert expect(replace(ONE_RANK, ranks=9, ranks_per_node=8), SPEEDS).nodes == 2


@given(
    state_bytes=st.integers(1, 10**15),
    ranks=st.integers(1, 10**5),
    ranks_per_node=st.integers(1, 64),
    factor=st.floats(1, 100),
)
def test_nothing_gets_worse_with_faster_storage_and_each_level_takes_longer_than_the_one_below(
    state_bytes: int, ranks: int, ranks_per_node: int, factor: float
) -> None:
    scale = Scale(state_bytes=state_bytes, ranks=ranks, ranks_per_node=ranks_per_node, slots=2)
    slow = expect(scale, SPEEDS)
    fast = expect(scale, replace(SPEEDS, write=SPEEDS.write * factor, read_back=SPEEDS.read_back * factor))
    assert 0 < slow.stall_seconds < slow.durable_seconds.least < slow.verified_seconds.least
    assert slow.durable_seconds.least <= slow.durable_seconds.most
    assert fast.durable_seconds.most <= slow.durable_seconds.most
    assert fast.save_seconds.most <= slow.save_seconds.most
    assert slow.node_bytes * slow.nodes >= state_bytes
