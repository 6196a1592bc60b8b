"""What restarts took, as the ledger tells it."""

from typing import Any

from orchestrator.observe.restarts import Restart, Restarts


def generation(number: int, source: str = "memory") -> dict[str, Any]:
    return {"kind": "generation", "generation": number, "ranks": 2, "source": source}


def failure(at: float) -> dict[str, Any]:
    return {"kind": "failure", "failed_at": at}


def first_step(number: int, rank: int, at: float) -> dict[str, Any]:
    return {"kind": "first_step", "generation": number, "rank": rank, "at_step": at}


def found(*entries: dict[str, Any]) -> list[Restart]:
    restarts = Restarts()
    return [one for entry in entries if (one := restarts.take(entry))]


def test_a_restart_lasts_until_the_last_rank_has_finished_a_step() -> None:
    start = [generation(1, "fresh"), first_step(1, 0, 1.0), first_step(1, 1, 1.1)]
    assert found(*start) == [], "nothing had failed"
    assert found(*start, failure(10.0), generation(2), first_step(2, 1, 12.0)) == []
    whole = [*start, failure(10.0), generation(2), first_step(2, 1, 12.0), first_step(2, 0, 11.0)]
    assert found(*whole) == [Restart(source="memory", seconds=2.0)]
    assert found(*whole, first_step(2, 0, 13.0)) == [Restart(source="memory", seconds=2.0)]


def test_of_failures_without_a_step_in_between_the_first_took_the_run_down() -> None:
    again = [failure(10.0), generation(2), first_step(2, 0, 12.0), failure(13.0), generation(3, "checkpoint")]
    steps = [first_step(2, 1, 13.5), first_step(3, 0, 15.0), first_step(3, 1, 16.0)]
    assert found(generation(1, "fresh"), *again, *steps) == [Restart(source="checkpoint", seconds=6.0)]


def test_whether_one_is_under_way_is_known() -> None:
    restarts = Restarts()
    restarts.take(generation(1))
    assert not restarts.under_way
    restarts.take(failure(1.0))
    assert restarts.under_way
    for rank in range(2):
        restarts.take(first_step(1, rank, 2.0))
    assert not restarts.under_way
