"""What a power loss may leave of runs on object storage, and what of it the judge and the mutants show."""

from dataclasses import replace

import pytest

from chaos.crash_states import object_search
from chaos.crash_states.check import GUARANTEES, Judge
from chaos.crash_states.object_mutants import object_mutants
from chaos.crash_states.object_record import bucket_of
from chaos.crash_states.object_search import look_at_object_mutant, look_at_objects
from chaos.crash_states.ops import Mark
from chaos.crash_states.promises import promises
from chaos.crash_states.requests import (
    Answered,
    Delete,
    Moment,
    Put,
    Sent,
    all_states,
    carry_out,
    moments,
    tree_of,
)
from chaos.crash_states.scenario import Plan, record_requests
from orchestrator import recovery
from orchestrator.archive import RunArchive
from orchestrator.observe.ledger import begun_generations, parse_ledger

PLAN = Plan(seed=1, ranks=2, saves=(2, 1), keep_last=1, order="in step")


def test_conditions_decide_what_a_request_does() -> None:
    bucket = {"a": b"1"}
    for request in (Put("a", b"2", "absent"), Put("a", b"2", "same", b"0"), Put("b", b"2", "same", b"0")):
        carry_out(request, bucket)
        assert bucket == {"a": b"1"}
    carry_out(Put("a", b"2", "same", b"1"), bucket)
    carry_out(Put("b", b"3", "absent"), bucket)
    assert bucket == {"a": b"2", "b": b"3"}
    carry_out(Put("a", b"4"), bucket)
    carry_out(Delete("b"), bucket)
    carry_out(Delete("c"), bucket)
    assert bucket == {"a": b"4"}


def test_what_was_sent_and_not_answered_stays_possible_for_good() -> None:
    late = Put("late", b"x")
    found = list(moments([Sent(0, late), Sent(1, Put("a", b"1")), Answered(1), Mark("m")]))
    assert [sorted(moment.bucket) for moment in found] == [[], [], [], ["a"], ["a"]]
    assert [len(moment.under_way) for moment in found] == [0, 1, 2, 1, 1]
    assert [sorted(state.tree) for state in all_states(found[-1])] == [["a"], ["a", "late"]]


def test_all_subsets_are_left_and_every_order_where_that_matters() -> None:
    first, second, other = Put("k", b"1", "absent"), Put("k", b"2", "absent"), Delete("gone")
    moment = Moment(3, None, {"gone": b""}, (first, second, other))
    found = [state.tree for state in all_states(moment)]
    expected = [{**k, **gone} for k in ({}, {"k": b"1"}, {"k": b"2"}) for gone in ({}, {"gone": b""})]
    assert sorted(map(repr, found)) == sorted(map(repr, map(dict, map(sorted_items, expected))))


def sorted_items(tree: dict[str, bytes]) -> list[tuple[str, bytes]]:
    return sorted(tree.items())


def test_keys_are_paths() -> None:
    tree = tree_of({"a/b/c": b"1", "a/d": b"2", "e": b"3"})
    assert tree == {"a": {"b": {"c": b"1"}, "d": b"2"}, "e": b"3"}
    store = bucket_of(tree)
    assert store.list_dir("a") == ["b", "d"] and store.read_bytes("a/b/c") == b"1"


def test_a_recording_holds_every_request_and_is_the_same_each_time() -> None:
    first, again = record_requests(PLAN), record_requests(PLAN)
    assert first.ops == again.ops and first.calls > 30
    sent = [event for event in first.ops if isinstance(event, Sent)]
    assert {event.number for event in sent} == {event.number for event in first.ops if isinstance(event, Answered)}
    keys = [event.request.key for event in sent]
    for part in ("ledger.jsonl", "generations/", "rank-00001", "manifest.json", "trash/"):
        assert any(part in key for key in keys), part
    # What is left at the end is what the bucket holds.
    *_, last = moments(first.ops)
    (state,) = all_states(last)
    (newest,) = promises(first.ops)[-1].acceptable
    found = recovery.newest_committed(RunArchive(bucket_of(state.tree)))
    assert found is not None and found.name == newest


def test_requests_of_ranks_are_under_way_together() -> None:
    together = [moment for moment in moments(record_requests(PLAN).ops) if len(moment.under_way) > 1]
    assert any(all(".safetensors" in request.key for request in moment.under_way) for moment in together)


@pytest.mark.parametrize("back", [False, True])
def test_every_state_recovers_wherever_the_run_is_killed(back: bool) -> None:
    tally = look_at_objects(replace(PLAN, back=back), 0, 3)
    assert tally.violations == 0, tally.examples
    assert tally.recordings > 10 and len(tally.states) > 100


def test_a_commit_that_arrives_after_another_driver_began_afresh_does_not_stop_the_run() -> None:
    """Found here: the run was neither restored from it, rightly, nor begun afresh again."""
    plan = replace(PLAN, saves=(1, 0))
    calls = record_requests(plan).calls
    chosen: dict[bool, set[str | None]] = {False: set(), True: set()}
    for after in range(calls):
        recording = record_requests(replace(plan, killed_after=after))
        judge, owed = Judge(recording, bucket_of), promises(recording.ops)
        for moment, promise in zip(moments(recording.ops), owed, strict=True):
            late = [request for request in moment.under_way if request.key.endswith("manifest.json")]
            if late and promise.generation == 2:
                bucket = dict(moment.bucket)
                for request in late:
                    carry_out(request, bucket)
                verdict = judge.check(tree_of(bucket), promise)
                assert verdict.violations == ()
                chosen[2 in begun_generations(parse_ledger(bucket["ledger.jsonl"]))].add(verdict.chosen)
    # One that had not begun counts for nothing beside what it had not seen.
    assert chosen == {True: {None}, False: {"step-000000010-g0001-a01"}}


@pytest.mark.parametrize("index", range(len(object_mutants())), ids=[mutant.name for mutant in object_mutants()])
def test_each_mutant_on_object_storage_is_caught(index: int) -> None:
    found = look_at_object_mutant(index, seed=1)
    assert found["caught"], found
    assert found["guarantee"] in GUARANTEES and found["detail"] and found["when"]


def test_parts_of_a_plan_are_all_of_it() -> None:
    plan = replace(PLAN, saves=(1, 0))
    whole, parts = look_at_objects(plan, 0, 1), [look_at_objects(plan, part, 2) for part in range(2)]
    assert set().union(*(part.states for part in parts)) == whole.states
    assert sum(part.recordings for part in parts) == whole.recordings
    assert {plan.ranks for plan in object_search.object_plans(0)} == {2, 3}
