"""A node and everything on it is gone: the run goes on with what remains, or with a node that comes instead."""

from pathlib import Path

import harness
import pytest
from stories import tell


def test_a_node_on_which_ranks_die_again_and_again_is_left_out(tmp_path: Path, reference: Path) -> None:
    run_dir = tell("excluded", tmp_path)
    (excluded,) = harness.entries(run_dir, "node_excluded")
    assert excluded["left_out"]
    agents = harness.entries(run_dir, "agent")
    assert excluded["node"] in {agent["node"] for agent in agents if agent["at"] < excluded["at"]}
    assert excluded["node"] not in {agent["node"] for agent in agents if agent["at"] > excluded["at"]}
    assert harness.entries(run_dir, "controller") == []  # Ray Train was started again, but it had not failed
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.parametrize("story", ["lost-with-a-spare", pytest.param("lost-and-replaced", marks=pytest.mark.slow)])
def test_a_lost_node_is_replaced_by_another(tmp_path: Path, reference: Path, story: str) -> None:
    run_dir = tell(story, tmp_path)
    (failure,) = harness.entries(run_dir, "failure")
    assert (failure["rank"], failure["cause"]) == (1, "agent_lost")
    harness.assert_equal_runs(run_dir, reference)
