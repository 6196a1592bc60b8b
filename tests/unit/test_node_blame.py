"""Which node is left out, and how often Ray Train is started again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.causes import MACHINE_CAUSES
from orchestrator.decide.nodes import FAILURES_MAX, WINDOW_SECONDS, NodeBlame, fits
from orchestrator.decide.rounds import ENDS_MAX, RayRounds

BOTH = ["a", "b"]


def test_a_node_with_three_failures_in_a_row_is_left_out() -> None:
    blame = NodeBlame()
    assert blame.failed("signal", "a", BOTH, at=0.0) is None
    assert blame.failed("hang", "a", BOTH, at=1.0) is None
    assert blame.failed("agent_lost", "a", BOTH, at=2.0) == "a"


def test_failures_that_change_places_blame_no_node() -> None:
    blame = NodeBlame()
    assert [blame.failed("signal", node, BOTH, at=0.0) for node in "aabaabaab"] == [None] * 9


@pytest.mark.parametrize("cause", ["exception", "exit", "loss", "drain", "controller", "unknown"])
def test_what_the_loop_did_or_was_announced_neither_blames_nor_clears_a_node(cause: str) -> None:
    blame = NodeBlame()
    for at in range(5):
        assert blame.failed(cause, "a", BOTH, at=float(at)) is None
    blame.failed("signal", "a", BOTH, at=5.0)
    blame.failed("signal", "a", BOTH, at=6.0)
    blame.failed(cause, "b", BOTH, at=7.0)
    assert blame.failed("signal", "a", BOTH, at=8.0) == "a"


def test_where_all_ranks_are_on_one_node_it_is_not_blamed() -> None:
    blame = NodeBlame()
    assert {blame.failed("signal", "a", ["a", "a"], at=float(at)) for at in range(9)} == {None}


def test_failures_that_lie_far_apart_blame_no_node() -> None:
    blame = NodeBlame()
    assert {blame.failed("signal", "a", BOTH, at=at * WINDOW_SECONDS) for at in range(9)} == {None}


@given(
    st.lists(st.tuples(st.sampled_from([*sorted(MACHINE_CAUSES), "exception"]), st.sampled_from("abc")), max_size=40)
)
def test_a_node_is_left_out_exactly_when_the_last_failures_that_count_are_all_its_own(
    failures: list[tuple[str, str]],
) -> None:
    blame, row = NodeBlame(), ""
    for at, (cause, node) in enumerate(failures):
        if cause != "exception":
            row += node
        out = blame.failed(cause, node, "abc", at=float(at))
        expected = cause != "exception" and row.endswith(node * FAILURES_MAX)
        assert out == (node if expected else None)
        row = "" if out else row


def test_the_rest_of_the_cluster_has_to_have_the_resources() -> None:
    assert fits({"CPU": 2.0}, [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}])
    assert not fits({"CPU": 2.0, "GPU": 2.0}, [{"CPU": 4.0, "GPU": 1.0}])
    assert not fits({}, [])


def test_ray_is_started_again_at_once_then_later_and_later_then_no_more() -> None:
    rounds = RayRounds()
    assert [rounds.ended() for _ in range(ENDS_MAX + 1)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]


def test_a_newer_checkpoint_refills_the_budget_of_restarts() -> None:
    rounds = RayRounds()
    for _ in range(20):
        assert rounds.ended() == 0.0
        rounds.committed()
