"""A node and everything on it is gone: the run goes on with what remains, or with a node that comes instead."""

from pathlib import Path

import harness
import pytest
from stories import tell


@pytest.mark.slow
def test_a_node_on_which_ranks_die_again_and_again_is_left_out(tmp_path: Path, reference: Path) -> None:
    run_dir = tell("excluded", tmp_path)
    (excluded,) = harness.entries(run_dir, "node_excluded")
    assert excluded["left_out"]
    agents = harness.entries(run_dir, "agent")
    assert excluded["node"] in {agent["node"] for agent in agents if agent["at"] < excluded["at"]}
    assert excluded["node"] not in {agent["node"] for agent in agents if agent["at"] > excluded["at"]}
    assert harness.entries(run_dir, "controller") == []  # Ray Train was started again, but it had not failed
    harness.assert_equal_runs(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("story", ["lost-with-a-spare", "lost-and-replaced"])
def test_a_lost_node_is_replaced_by_another(tmp_path: Path, reference: Path, story: str) -> None:
    run_dir = tell(story, tmp_path)
    (failure,) = harness.entries(run_dir, "failure")
    assert (failure["rank"], failure["cause"]) == (1, "agent_lost")
    harness.assert_equal_runs(run_dir, reference)


def test_after_losing_a_node_the_run_goes_on_from_the_copies_that_another_has(tmp_path: Path, reference: Path) -> None:
    run_dir = tell("lost-with-copies", tmp_path)
    _, second = harness.entries(run_dir, "generation")
    assert (second["source"], second["from_copies"]) == ("memory", [1])
    assert second["restored_step"] >= 20
    restored = [entry for entry in harness.entries(run_dir, "restored") if entry["generation"] == 2]
    assert {(entry["rank"], entry["source"], entry["step"]) for entry in restored} == {
        (rank, "memory", second["restored_step"]) for rank in (0, 1)
    }
    # What only memory had is committed as well, by the keeper that has the copy.
    committed = [entry["step"] for entry in harness.entries(run_dir, "commit") if entry["generation"] == 1]
    assert committed == [second["restored_step"]]
    harness.assert_equal_runs(run_dir, reference)
