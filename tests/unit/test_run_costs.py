"""What saves and restarts took, read from a ledger."""

from typing import Any

import pytest

from orchestrator.observe.costs import run_costs


def generation(number: int, source: str, ranks: int = 2) -> dict[str, Any]:
    return {"kind": "generation", "at": 0.0, "generation": number, "ranks": ranks, "source": source}


def first_step(number: int, rank: int, at: float) -> dict[str, Any]:
    return {"kind": "first_step", "at": at, "generation": number, "rank": rank, "at_step": at}


def commit(number: int, step: int, copied_at: float, stall: float = 0.5) -> dict[str, Any]:
    return {
        "kind": "commit",
        "at": copied_at + 3.0,
        "generation": number,
        "step": step,
        "snapshot_at": copied_at,
        "copy_seconds": 1.0,
        "stall_seconds": stall,
        "durable_seconds": 1.5,
        "commit_seconds": 2.0,
        "bytes": 100 * step,
    }


def failure(at: float) -> dict[str, Any]:
    return {"kind": "failure", "at": at, "failed_at": at, "cause": "signal"}


def test_a_save_can_be_restored_once_it_is_committed_counted_from_its_steps_end() -> None:
    costs = run_costs([generation(1, "fresh"), commit(1, 10, 20.0), commit(1, 20, 40.0, stall=0.7)])
    assert costs.stall_seconds == [0.5, 0.7]
    assert costs.durable_seconds == [3.0, 3.0]
    assert costs.copied_seconds == [1.0, 1.0]
    assert (costs.bytes, costs.ranks) == (2000, 2)


def test_a_restart_ends_with_the_last_ranks_first_step_and_that_step_is_not_part_of_it() -> None:
    costs = run_costs(
        [
            generation(1, "fresh"),
            first_step(1, 0, 1.0),
            first_step(1, 1, 1.1),
            {"kind": "cadence", "at": 2.0, "inputs": {"step_seconds": 0.2}},
            failure(10.0),
            generation(2, "memory"),
            first_step(2, 1, 11.0),
            first_step(2, 0, 11.4),
            failure(20.0),
            failure(22.0),
            generation(3, "checkpoint"),
            first_step(3, 0, 25.0),
            first_step(3, 1, 24.0),
        ]
    )
    assert costs.step_seconds == 0.2
    assert costs.restart_seconds == {"memory": [pytest.approx(1.2)], "checkpoint": [pytest.approx(4.8)]}
    assert costs.restarts_from("checkpoint") == costs.restart_seconds["checkpoint"]
    assert sorted(costs.restarts_from("fresh")) == [pytest.approx(1.2), pytest.approx(4.8)]


def test_without_other_word_steps_are_timed_between_commits_of_one_generation() -> None:
    entries = [
        generation(1, "fresh"),
        commit(1, 10, 21.0),
        commit(1, 20, 31.5),
        failure(40.0),
        generation(2, "checkpoint"),
        commit(2, 30, 100.0),
        commit(2, 40, 112.5),
        commit(2, 50, 125.0),
    ]
    assert run_costs(entries).step_seconds == pytest.approx(1.2)


def test_an_empty_ledger_says_nothing() -> None:
    costs = run_costs([])
    assert (costs.stall_seconds, costs.step_seconds, costs.restarts_from("memory"), costs.nodes) == ([], None, [], 1)


def test_nodes_are_those_of_the_newest_generation() -> None:
    fields = {"kind": "generation", "at": 0.0, "ranks": 4, "restored_step": 0, "source": "fresh"}
    entries = [{**fields, "generation": number, "nodes": nodes} for number, nodes in ((1, 3), (2, 2))]
    assert run_costs(entries).nodes == 2
