"""A node and everything on it is gone: the run goes on with what remains, or with a node that comes instead."""

from pathlib import Path

import harness
import pytest
from stories import tell


@pytest.mark.parametrize("story", ["lost-with-a-spare", "lost-and-replaced"])
def test_a_lost_node_is_replaced_by_another(tmp_path: Path, reference: Path, story: str) -> None:
    run_dir = tell(story, tmp_path)
    (failure,) = harness.entries(run_dir, "failure")
    assert (failure["rank"], failure["cause"]) == (1, "agent_lost")
    harness.assert_equal_runs(run_dir, reference)
