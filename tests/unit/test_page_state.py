"""The state document says what is the case, for runs in every state."""

from pathlib import Path
from typing import Any

import pytest
from page_samples import STEP_SECONDS, STORIES, T0, Story, finished, healthy, live, recovering, stopped, unprotected

from orchestrator.observe.page.render import page
from orchestrator.observe.page.state import RunView

RUN = Path("/mnt/ckpt/gpt")


def document(story: Story, told: dict[str, Any] | None = None, *, later: float = 4.0) -> dict[str, Any]:
    return RunView(RUN).take_all(story.entries).document(story.now + later, told)


def test_a_run_that_trains_says_how_far_it_is_and_when_it_ends() -> None:
    story = healthy()
    told = document(story, live(story), later=0.0)
    assert (told["state"]["name"], told["state"]["generation"]) == ("training", 3)
    progress = told["progress"]
    assert (progress["step"], progress["total_steps"]) == (story.step, 1000)
    assert progress["step_seconds"] == pytest.approx(STEP_SECONDS, rel=0.05)
    assert progress["eta_seconds"] == pytest.approx((1000 - story.step) * progress["step_seconds"])
    assert told["loss"] == pytest.approx(2.3456789)


def test_a_run_that_was_taken_back_tells_where_it_is_and_not_where_it_was() -> None:
    story = Story()
    story.train(400, save_every=1000)
    story.fail()
    story.begin("failure", source="memory", restored=10)
    story.train(20, save_every=1000)
    progress = document(story, live(story), later=0.0)["progress"]
    assert (progress["step"], progress["regaining_step"]) == (31, 401)
    assert progress["step_seconds"] == pytest.approx(STEP_SECONDS)
    assert progress["eta_seconds"] == pytest.approx((1000 - 31) * STEP_SECONDS)
    story.train(400, save_every=1000)
    assert document(story, live(story))["progress"]["regaining_step"] is None


def test_without_a_total_there_is_no_end_to_tell() -> None:
    story = Story(total_steps=None)
    story.train(100)
    progress = document(story)["progress"]
    assert progress["total_steps"] is None and progress["eta_seconds"] is None
    assert progress["step_seconds"] == pytest.approx(STEP_SECONDS, rel=0.05)


def test_protection_counts_what_is_not_on_disk() -> None:
    story = healthy()
    protection = document(story, live(story))["protection"]
    assert protection["level"] == "protected"
    assert (protection["committed_step"], protection["steps_at_risk"]) == (350, story.step - 350)
    assert protection["memory_step"] == story.step - 5
    assert document(Story())["protection"]["level"] == "nothing"


def test_a_run_whose_saves_fail_is_unprotected_until_one_succeeds() -> None:
    story = unprotected()
    assert document(story)["protection"]["level"] == "unprotected"
    story.commit()
    assert document(story)["protection"]["level"] == "protected"


def test_lost_work_is_told_by_cause_and_adds_up() -> None:
    account = document(healthy())["account"]
    assert account["lost"]["hang"]["steps"] == 41
    assert account["lost"]["signal"]["steps"] == 11
    assert sum(account["seconds"].values()) == pytest.approx(account["elapsed_seconds"])
    losing = sum(account["seconds"][kind] for kind in ("repeated", "detection", "recovery", "restore"))
    first = 1.5  # what was read before the first step, which no failure is to blame for
    assert sum(one["seconds"] for one in account["lost"].values()) == pytest.approx(losing - first)


def test_a_dead_rank_is_named_until_its_successor_trains() -> None:
    story = recovering()
    told = document(story)
    assert told["state"]["name"] == "recovering"
    assert {one["rank"]: one["condition"] for one in told["ranks"]} == {0: "dead", 1: "ok", 2: "ok", 3: "dead"}
    story.begin("failure", source="memory", restored=350)
    assert {one["condition"] for one in document(story)["ranks"]} == {"ok"}


def test_a_rank_that_is_not_heard_of_is_silent_and_stands_first_on_the_page() -> None:
    story = healthy(ranks=64)
    view = RunView(RUN).take_all(story.entries)
    told = view.document(story.now, live(story, silent=50))
    assert [one["rank"] for one in told["ranks"] if one["condition"] == "silent"] == [50]
    drawn = page(told, view.timeline)
    assert drawn.index('scope="row">50<') < drawn.index('scope="row">0<')
    assert "32 more ranks not shown" in drawn


def test_a_run_that_is_not_well_is_not_shown_as_if_it_were() -> None:
    story = healthy()
    view = RunView(RUN).take_all(story.entries)
    assert "is not well" not in page(view.document(story.now, {**live(story), "problems": []}), view.timeline)
    told = view.document(story.now, {**live(story), "problems": ["no progress: <b>3 failures</b>"]})
    drawn = page(told, view.timeline)
    assert told["problems"] == ["no progress: <b>3 failures</b>"]
    assert "The run is not well" in drawn and "no progress: &lt;b&gt;3 failures" in drawn
    assert 'class="state ok"' not in drawn


def test_suspected_ranks_are_told_until_they_move() -> None:
    story = healthy()
    story.add("suspected", generation=story.generation, ranks=[2], quiet_seconds=5.0, limit_seconds=4.0)
    told = document(story)
    assert told["state"]["suspected"] == [2]
    assert told["ranks"][2]["condition"] == "suspected"
    story.add("cleared", generation=story.generation, quiet_seconds=6.0)
    assert document(story)["state"]["suspected"] == []


def test_a_slow_rank_is_told_until_the_next_generation() -> None:
    story = healthy()
    story.add("straggler", generation=story.generation, rank=1, node="n", cost_fraction=0.3, cost_seconds_per_step=0.1)
    assert document(story)["ranks"][1]["condition"] == "slow"
    story.fail()
    story.begin("failure", source="memory", restored=story.step)
    assert document(story)["ranks"][1]["condition"] == "ok"


def test_an_ended_run_does_not_go_on_by_the_clock() -> None:
    for story, name in ((finished(), "finished"), (stopped(), "stopped")):
        told = document(story, later=90_000)
        assert told["state"]["name"] == name
        assert told["account"]["elapsed_seconds"] == pytest.approx(story.entries[-1]["at"] - T0, abs=5)
        assert told["progress"]["eta_seconds"] is None


def test_the_cadence_says_why() -> None:
    cadence = document(healthy())["cadence"]
    assert cadence["durable"]["interval_steps"] == 50
    assert cadence["durable"]["bounds"] == ["overhead"]
    assert "held back because saves may take no larger part" in cadence["durable"]["why"]
    assert "held back" not in cadence["memory"]["why"]


def test_commits_in_a_row_are_one_happening() -> None:
    story = Story()
    story.train(250)
    happenings = document(story)["happenings"]
    assert [one["title"] for one in happenings if one["kind"] == "commit"] == ["Steps 50 to 250 committed, 5 saves"]


def test_entries_that_nobody_understands_change_nothing() -> None:
    story = healthy()
    before = document(story)
    view = RunView(RUN).take_all(story.entries)
    at = story.entries[-1]["at"]
    for strange in (
        {"kind": "from a later version", "at": at},
        {"kind": "commit", "at": at},
        {"kind": "failure", "at": at},
        {"kind": "cadence", "at": at, "tier": "durable"},
        {"kind": "stopped", "at": "soon"},
        {"kind": "straggler", "at": at, "rank": []},
    ):
        view.take({"v": 1, "seq": 1, **strange})
    told = view.document(story.now + 4)
    assert told["state"]["name"] == "training" or told["state"] == before["state"]
    assert page(told, view.timeline)


@pytest.mark.parametrize("name", sorted(STORIES))
def test_an_entry_at_a_time_or_all_at_once_is_the_same(name: str) -> None:
    """A coordinator that is restarted shows what it showed before; and every beginning of a run can be drawn."""
    story = STORIES[name]()
    view = RunView(RUN)
    for entry in story.entries:
        view.take(entry)
        assert page(view.document(entry["at"]), view.timeline)
    assert view.document(story.now) == RunView(RUN).take_all(story.entries).document(story.now)


def test_what_is_kept_is_bounded() -> None:
    story = Story(ranks=2, total_steps=None)
    for _ in range(500):
        story.train(3, save_every=2)
        story.fail()
        story.begin("failure", source="memory", restored=story.step)
    view = RunView(RUN).take_all(story.entries)
    assert len(view.timeline.happenings) == 400
    told = view.document(story.now)
    assert len(told["happenings"]) == 60
    assert len(page(told, view.timeline)) < 200_000
