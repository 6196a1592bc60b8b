"""The drawing shows what the history says: who trained when, what struck whom, and what was restored."""

from pathlib import Path

from run_samples import killed_twice

from chaos.history import History
from chaos.judge.timeline import timeline


def test_ranks_train_recover_and_are_struck_as_recorded(tmp_path: Path) -> None:
    run = killed_twice(tmp_path / "run")
    drawn = timeline(History(run.directory))
    assert [lane.name for lane in drawn.lanes] == ["rank 0", "rank 1", "run"]
    for lane in drawn.lanes[:2]:
        assert [span.kind for span in lane.spans] == ["training", "recovering"] * 2 + ["training"]
        assert all(span.start_seconds <= span.end_seconds for span in lane.spans)
        assert "from step 4" in lane.spans[1].label
    first, second, whole = drawn.lanes
    assert [mark.label for mark in first.marks if mark.kind == "fault"] == ["kill_rank at random moment"]
    assert [mark.label for mark in second.marks if mark.kind == "fault"] == ["kill_rank at snapshot.copy"]
    assert [mark.label for mark in whole.marks if mark.kind == "commit"] == ["step 4", "step 8", "step 12"]
    assert sum(mark.kind == "restore" for mark in first.marks) == 2
