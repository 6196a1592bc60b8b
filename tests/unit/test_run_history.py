"""The run's own clock and its failures, from the ledger: alive and after a restart the same."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.decide.failure_rate import FailureRate
from orchestrator.decide.hazard import Prior
from orchestrator.decide.run_history import RunHistory
from orchestrator.decide.tuner import Tuner

T0 = 1.7e9
HOUR = 3600.0


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.failures: list[tuple[float, str, str]] = []
        self.ranks: list[tuple[float, int]] = []

    def failed(self, at: float, *, cause: str, domain: str) -> None:
        self.failures.append((at, cause, domain))

    def resized(self, at: float, ranks: int) -> None:
        self.ranks.append((at, ranks))


def generation(at: float, ranks: int = 8) -> dict[str, Any]:
    return {"kind": "generation", "at": T0 + at, "ranks": ranks}


def failure(failed_at: float, cause: str = "signal", *, at: float | None = None) -> dict[str, Any]:
    return {
        "kind": "failure",
        "at": T0 + (failed_at if at is None else at),
        "failed_at": T0 + failed_at,
        "cause": cause,
    }


def entry(kind: str, at: float) -> dict[str, Any]:
    return {"kind": kind, "at": T0 + at}


def history(*entries: Mapping[str, Any]) -> tuple[RunHistory, Told]:
    told = Told()
    subject = RunHistory(told)
    subject.take_all(entries)
    return subject, told


def test_the_clock_stands_still_between_generations() -> None:
    subject, told = history(
        generation(0), failure(100, at=103), generation(110), failure(200), generation(1000), entry("commit", 1040)
    )
    assert told.failures == [(100.0, "signal", "process"), (190.0, "signal", "process")]
    assert subject.at(T0 + 1050) == 240.0


def test_a_night_without_a_driver_is_no_time_without_failures() -> None:
    """It was killed and wrote nothing more: its generation ran until the last that is known of it."""
    driver = entry("coordinator", 40_000) | {"resumed": False}
    subject, told = history(generation(0), entry("commit", 300), driver, generation(40_010))
    assert told.failures == []
    assert subject.at(T0 + 40_020) == pytest.approx(310.0)


def test_a_coordinator_that_comes_back_ends_no_generation() -> None:
    subject, _ = history(generation(0), entry("commit", 300), entry("coordinator", 400) | {"resumed": True})
    assert subject.at(T0 + 500) == 500.0


@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_run_that_is_over_does_not_run_on(end: str) -> None:
    subject, _ = history(generation(0), entry(end, 500))
    assert subject.at(T0 + 9000) == 500.0


def test_a_lost_node_makes_it_the_nodes_failure_whichever_is_written_first() -> None:
    _, before = history(
        generation(0), entry("node_lost", 99), failure(100, "agent_lost"), generation(200), failure(300)
    )
    _, after = history(
        generation(0), failure(100, "agent_lost"), entry("node_lost", 130), generation(200), failure(300)
    )
    assert before.failures == [(100.0, "agent_lost", "node"), (200.0, "signal", "process")]
    # Told again, as one of the node: within a minute of itself, so it counts once (FailureRate).
    assert after.failures == [
        (100.0, "agent_lost", "process"),
        (100.0, "agent_lost", "node"),
        (200.0, "signal", "process"),
    ]


def test_the_world_size_is_told_with_each_generation() -> None:
    _, told = history(generation(0, ranks=8), failure(100), generation(150, ranks=4))
    assert told.ranks == [(0.0, 8), (100.0, 4)]


def test_rebuilt_after_a_restart_the_estimate_is_what_it_was() -> None:
    rng = random.Random(4)
    entries: list[dict[str, Any]] = []
    at = 0.0
    for _ in range(40):
        entries.append(generation(at, ranks=rng.choice((4, 8))))
        at += rng.expovariate(1 / HOUR)
        if rng.random() < 0.3:
            entries.append(entry("node_lost", at))
        entries.append(failure(at, rng.choice(("signal", "hang", "drain"))))
        at += 30.0
    entries.append(generation(at))

    def fresh() -> FailureRate:
        return FailureRate(Prior(failures_per_second=1 / HOUR), ranks=8)

    alive, rebuilt = fresh(), fresh()
    living = RunHistory(Tuner(alive))
    for one in entries:
        living.take(one)
    again = RunHistory(rebuilt)
    again.take_all(entries)
    now = T0 + at + 500
    assert again.at(now) == living.at(now)
    for domain in ("process", "node", None):
        assert rebuilt.posterior(again.at(now), domain) == alive.posterior(living.at(now), domain)
        assert rebuilt.hazard_per_second(again.at(now), 60, domain) == alive.hazard_per_second(
            living.at(now), 60, domain
        )
    assert rebuilt.by_cause(again.at(now)) == alive.by_cause(living.at(now))
    assert alive.posterior(living.at(now)).mean_per_second == pytest.approx(1 / HOUR, rel=0.5)
