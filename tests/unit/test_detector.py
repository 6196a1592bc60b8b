"""The hang detector, fed with pulses of simulated ranks: single stories, then a hundred thousand steps."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pulse_samples import PULSE_SECONDS, a_pulse

from orchestrator.decide.detector import Cleared, Decision, HangDetector, Hung, Silent, Suspect
from workers.messages import RankPulse


@dataclass
class Simulation:
    """Ranks that step together every 0.1 s until they are told to hang; what is decided, with its time."""

    world_size: int = 2
    detector: HangDetector = field(default_factory=lambda: HangDetector(floor_seconds=2.0, start_seconds_max=600.0))
    at: float = 0.0
    decided: list[tuple[float, Decision]] = field(default_factory=list)
    step: int = 0
    cpu_seconds: float = 0.0
    stacks_come: bool = True

    def __post_init__(self) -> None:
        self.detector.generation_started(self.world_size)

    def train(self, seconds: float) -> None:
        for _ in range(int(seconds / PULSE_SECONDS)):
            self.step += 5
            self.cpu_seconds += PULSE_SECONDS
            here = a_pulse(
                self.at,
                step=self.step,
                moves=self.step,
                step_seconds=5 * (0.1,),
                sequence=6 * self.step,
                cpu_seconds=self.cpu_seconds,
            )
            self.send(*self.world_size * [here])

    def send(self, *pulses: RankPulse) -> None:
        """One pulse of each rank, then half a second."""
        for rank, pulse in enumerate(pulses):
            self.decided += [(self.at, one) for one in self.detector.pulse(rank, pulse)]
        if self.stacks_come and self.decided and isinstance(self.decided[-1][1], Suspect):
            for rank in range(self.world_size):
                self.detector.stacks(rank, None)
        self.at += PULSE_SECONDS

    def hang(self, seconds: float, *changes: Callable[[float], dict[str, Any]] | dict[str, Any]) -> None:
        """All ranks stay where they are, apart from these changes of each; a callable is given the seconds since."""
        began = self.at
        for _ in range(int(seconds / PULSE_SECONDS)):
            here = a_pulse(
                self.at, step=self.step, moves=self.step, sequence=6 * self.step, cpu_seconds=self.cpu_seconds
            )
            made = [change(self.at - began) if callable(change) else change for change in changes]
            self.send(*(replace(here, **change) for change in made))

    def of(self, kind: type) -> list[tuple[float, Any]]:
        return [(at, one) for at, one in self.decided if isinstance(one, kind)]


def trained(world_size: int = 2) -> Simulation:
    simulation = Simulation(world_size)
    simulation.train(30)
    assert not simulation.decided
    return simulation


def busy(since: float) -> dict[str, Any]:
    return {"cpu_seconds": 1000.0 + since, "state": "R"}


def test_a_sleeping_rank_is_suspected_after_the_limit_and_hung_after_twice_the_limit() -> None:
    run = trained()
    began = run.at - PULSE_SECONDS
    run.hang(10, {"sequence": 1800}, {"sequence": 1801})
    ((suspected_at, suspect),) = run.of(Suspect)
    ((hung_at, hung),) = run.of(Hung)
    assert suspect.limit_seconds == 2.0
    assert 2.0 <= suspected_at - began <= 2.0 + PULSE_SECONDS
    assert 3.5 <= hung_at - began <= 4.0
    assert (hung.rank, hung.evidence) == (0, "behind in collectives")


def test_stacks_that_are_still_being_taken_are_waited_for_but_not_for_long() -> None:
    never = trained()
    never.stacks_come = False
    began = never.at - PULSE_SECONDS
    never.hang(20, {"sequence": 1800}, {"sequence": 1801})
    ((at, _),) = never.of(Hung)
    assert 6.5 <= at - began <= 7.0
    late = trained()
    late.stacks_come = False
    late.hang(5, {"sequence": 1800}, {"sequence": 1801})
    assert late.of(Suspect) and not late.of(Hung)
    late.detector.stacks(0, None)
    late.detector.stacks(1, True)
    late.hang(PULSE_SECONDS, {"sequence": 1800}, {"sequence": 1801})
    assert late.of(Hung)


def test_a_spinning_rank_is_hung_as_fast_as_a_sleeping_one_while_its_peer_waits() -> None:
    run = trained()
    began = run.at - PULSE_SECONDS
    run.hang(10, busy, {"sequence": 1806})
    ((hung_at, hung),) = run.of(Hung)
    assert hung_at - began <= 4.0
    assert hung.rank == 0


def test_ranks_that_all_compute_and_wait_for_nobody_are_given_more_time() -> None:
    run = trained()
    run.hang(15, busy, busy)
    assert len(run.of(Suspect)) == 1
    assert not run.of(Hung)
    run.train(1)
    assert len(run.of(Cleared)) == 1
    run.hang(90, busy, busy)
    assert len(run.of(Hung)) == 1


def test_a_stopped_rank_inside_a_collective_is_told_apart_from_its_peer() -> None:
    run = trained()
    tick = int(run.at / PULSE_SECONDS)
    run.hang(10, {}, {"state": "T", "tick": tick})
    ((_, hung),) = run.of(Hung)
    assert hung.rank == 1
    assert hung.evidence.startswith("stopped")


def test_a_rank_that_is_held_while_its_stacks_are_taken_is_not_taken_to_be_stopped() -> None:
    run = trained()
    run.hang(10, {}, lambda since: {"state": "t" if since > 2 else "S"})
    ((_, hung),) = run.of(Hung)
    assert "stopped" not in hung.evidence
    run = trained()
    tick = int(run.at / PULSE_SECONDS)
    run.hang(10, {}, lambda since: {"state": "t" if since > 2 else "T", "tick": tick})
    ((_, hung),) = run.of(Hung)
    assert (hung.rank, hung.evidence.startswith("stopped")) == (1, True)


def test_a_rank_whose_interpreter_is_locked_is_told_apart_from_its_peer() -> None:
    run = trained()
    run.hang(10, {"tick": int(run.at / PULSE_SECONDS)}, {})
    ((_, hung),) = run.of(Hung)
    assert (hung.rank, hung.evidence) == (0, "its interpreter stands still")


def test_a_tie_in_collectives_is_settled_by_stacks() -> None:
    run = trained(3)
    run.hang(3, {}, {}, {})
    for rank in range(3):
        run.detector.stacks(rank, in_collective=rank != 1)
    run.hang(3, {}, {}, {})
    ((_, hung),) = run.of(Hung)
    assert (hung.rank, hung.evidence) == (1, "not in a collective")


def test_nobody_is_blamed_if_nothing_tells_the_ranks_apart() -> None:
    run = trained()
    run.hang(10, {}, {})
    ((_, hung),) = run.of(Hung)
    assert (hung.rank, hung.ranks, hung.evidence) == (-1, (0, 1), "nothing tells the ranks apart")


def test_a_single_rank_can_only_be_to_blame_itself() -> None:
    run = trained(1)
    run.hang(10, {})
    assert run.of(Hung)[0][1].rank == 0


def test_a_rank_waits_for_one_that_is_in_a_declared_phase_as_long_as_that_may_take() -> None:
    run = trained()
    run.hang(59, {"phase": "declared", "label": "validation", "allowance_seconds": 60.0}, {"sequence": 1806})
    assert not run.decided
    run.hang(20, {"phase": "declared", "label": "validation", "allowance_seconds": 60.0}, {"sequence": 1806})
    ((_, hung),) = run.of(Hung)
    assert (hung.rank, hung.limit_seconds) == (0, 60.0)


def test_a_rank_that_waits_for_one_that_still_moves_is_not_suspected() -> None:
    run = trained()
    moves = count(10_000)
    run.hang(60, lambda _: {"moves": next(moves)}, {"sequence": 1806})
    assert not run.decided


def test_a_rank_is_hung_although_its_peer_goes_on_polling_ahead_of_it() -> None:
    run = trained()
    moves = count(10_000)
    run.hang(10, {}, lambda _: {"moves": next(moves), "phase": "saving", "sequence": 1806})
    assert run.of(Hung)[0][1].rank == 0


def test_collectives_alone_are_progress() -> None:
    run = trained()
    sequences = count(2000)
    run.hang(60, lambda _: {"sequence": next(sequences)}, lambda _: {"sequence": next(sequences)})
    assert not run.decided


@pytest.mark.parametrize("phase", ["starting", "building", "restoring", "training"])
def test_starting_and_the_first_step_have_an_allowance_of_their_own(phase: str) -> None:
    run = Simulation()
    run.hang(590, {"phase": phase, "stepped": False}, {"phase": phase, "stepped": False})
    assert not run.decided
    run.hang(700, {"phase": phase, "stepped": False}, {"phase": phase, "stepped": False})
    assert len(run.of(Hung)) == 1


def test_the_allowance_for_starting_is_learnt_from_earlier_generations() -> None:
    run = Simulation()
    run.hang(20, *2 * [{"phase": "restoring", "stepped": False}])
    run.hang(4, *2 * [{"stepped": False}])
    run.train(30)
    run.detector.generation_started(2)
    began = run.at - PULSE_SECONDS
    run.hang(100, {"phase": "restoring", "stepped": False}, {"phase": "restoring", "stepped": False})
    ((suspected_at, suspect),) = run.of(Suspect)
    assert suspect.limit_seconds == pytest.approx(60, abs=3)
    assert suspected_at - began == pytest.approx(60, abs=3)


def test_quiet_is_not_counted_while_no_pulses_come() -> None:
    """An agent, or the coordinator, that did not get to run for a minute."""
    run = trained()
    for _ in range(3):
        run.at += 60
        run.hang(0.5, {}, {})
    assert not run.of(Hung)


def test_an_agent_that_says_nothing_is_reported_but_not_because_the_coordinator_slept() -> None:
    run = trained()
    run.detector.look(1000.0)
    assert not run.detector.look(1100.0)
    decisions = [one for second in range(30) for one in run.detector.look(1100.0 + second)]
    assert {type(one) for one in decisions} == {Silent}
    assert len(decisions) == 2


def test_a_pause_that_ended_by_itself_raises_the_limit() -> None:
    run = trained()
    run.hang(2.5, {}, {})
    run.train(30)
    assert (len(run.of(Suspect)), len(run.of(Cleared))) == (1, 1)
    run.hang(2.5, {}, {})
    run.train(1)
    assert len(run.of(Suspect)) == 1


def test_a_loop_with_something_long_and_undeclared_gets_through_in_the_end() -> None:
    run = trained()
    for attempt in range(10):
        run.hang(40, {}, {})
        if len(run.of(Hung)) == attempt:
            break
        run.detector.generation_started(2)
        run.step -= 50
        run.train(5)
    assert 3 <= len(run.of(Hung)) <= 6
    hung_before = len(run.of(Hung))
    for _ in range(3):  # and from then on
        run.train(30)
        run.hang(40, {}, {})
    run.train(5)
    assert len(run.of(Hung)) == hung_before


def test_a_rank_that_has_ended_is_no_longer_watched() -> None:
    run = trained()
    run.detector.ended(1)
    run.hang(10, {"phase": "finishing"})
    assert run.of(Hung)[0][1].rank == 0


# ------------------------------------------------------------ no false alarms


def step_lengths(rng: random.Random, median: float, sigma: float) -> Iterator[tuple[str, float]]:
    """(phase, seconds): steps, with a pause within every fiftieth or so, and now and then a declared phase."""
    while True:
        seconds = median * rng.lognormvariate(0.0, sigma)
        if rng.random() < 0.02:
            seconds += rng.uniform(0.0, 1.5)
        yield "training", seconds
        if rng.random() < 0.001:
            yield "declared", rng.uniform(0.0, 59.0)


def replay(median: float, sigma: float, steps: int, seed: int) -> list[Decision]:
    """Two ranks whose steps take equally long, as those of a synchronous run do; only the pulses are simulated."""
    detector = HangDetector(floor_seconds=2.0, start_seconds_max=600.0)
    detector.generation_started(2)
    lengths = step_lengths(random.Random(seed), median, sigma)
    pulse_seconds = max(PULSE_SECONDS, min(1.0, median / 8))
    phase, left, step, at = "training", 0.0, 0, 0.0
    length = median
    found: list[Decision] = []
    while step < steps:
        elapsed, last = pulse_seconds, []
        while left <= elapsed:
            elapsed -= left
            if phase == "training" and left:
                step += 1
                last.append(length)
            phase, length = next(lengths)
            left = length
        left -= elapsed
        at += pulse_seconds
        for rank in range(2):
            pulse = a_pulse(
                at,
                step=step,
                moves=step,
                still_seconds=length - left,
                phase=phase,
                allowance_seconds=60.0 if phase == "declared" else 0.0,
                step_seconds=tuple(last),
                stepped=step > 0,
                sequence=6 * step,
            )
            found += detector.pulse(rank, pulse)
    return found


@settings(max_examples=3, deadline=None)
@given(median=st.sampled_from([0.02, 0.1, 0.4]), sigma=st.floats(0.05, 0.5), seed=st.integers(0, 2**32))
def test_no_healthy_run_of_a_hundred_thousand_steps_is_taken_to_hang(median: float, sigma: float, seed: int) -> None:
    assert not [one for one in replay(median, sigma, 100_000, seed) if isinstance(one, Hung)]


@settings(max_examples=3, deadline=None)
@given(median=st.sampled_from([1.0, 5.0]), sigma=st.floats(0.05, 0.5), seed=st.integers(0, 2**32))
def test_no_healthy_run_of_long_steps_is_taken_to_hang(median: float, sigma: float, seed: int) -> None:
    assert not [one for one in replay(median, sigma, 10_000, seed) if isinstance(one, Hung)]
