"""How often ranks are told to save, from what the ledger, the pulses and the keepers say."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pulse_samples import a_pulse

from orchestrator.cadence import Cadence
from orchestrator.config import RecoveryConfig
from orchestrator.decide.tuner import FIRST_STEPS, TierName
from orchestrator.observe.ledger import Ledger, read_ledger
from workers.keeper_messages import HeldSnapshot
from workers.messages import Command, SaveEvery

STEP_SECONDS = 0.1
FREQUENT = 6000.0
"""Failures of a node in a day, so that intervals are short in a test."""


class Rig:
    """A run of two ranks whose clock the test moves; time passes in the ledger's entries as well."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.now = 1000.0
        self.ledger = Ledger(directory / "ledger.jsonl", clock=lambda: self.now)
        self.config = RecoveryConfig(**{"failures_per_node_day": FREQUENT} | settings)
        self.told: list[Command] = []
        self.step = 0
        self.generation = 0
        self.ledger.append("coordinator", driver="d", resumed=False, pid=1)
        self.cadence = self.successor()

    def successor(self) -> Cadence:
        return Cadence(self.config, self.ledger, self.told.append, clock=lambda: self.now)

    def start(self, source: str = "fresh", ranks: int = 2) -> None:
        self.generation += 1
        self.ledger.append("generation", generation=self.generation, ranks=ranks, nodes=1, source=source)
        for rank in range(ranks):
            self.ledger.append(
                "first_step", generation=self.generation, rank=rank, step=self.step + 1, at_step=self.now
            )

    def train(self, seconds: float, step_seconds: float = STEP_SECONDS) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            steps = round(0.5 / step_seconds)
            self.step += steps
            for rank in range(2):
                pulse = a_pulse(self.now, step_seconds=(step_seconds,) * steps, generation=self.generation)
                self.cadence.pulse(pulse, rank)

    def save(self, *, stall: float = 0.02, durable: float = 0.5, slower: float = 0.0) -> None:
        for rank in range(2):
            self.snapshot(rank, stall, 2 * stall)
        costs = {"copy_seconds": 2 * stall, "stall_seconds": stall}
        key = {"generation": self.generation, "step": self.step, "attempt": 1}
        self.ledger.append("snapshot", **key, **costs)
        self.train(durable, STEP_SECONDS * (1 + slower))
        found = self.cadence.interference_seconds()
        self.ledger.append("commit", **key, **costs, commit_seconds=durable, interference_seconds=found)

    def snapshot(self, rank: int, stall: float, copy: float) -> None:
        self.cadence.snapshotted(
            HeldSnapshot(
                rank=rank,
                generation=self.generation,
                step=self.step,
                digest="",
                copy_seconds=copy,
                stall_seconds=stall,
            )
        )

    def fail(self, cause: str = "signal", again_after: float = 1.0) -> None:
        self.ledger.append("failure", generation=self.generation, cause=cause, failed_at=self.now)
        self.now += again_after
        self.start("memory")

    def decisions(self, tier: TierName) -> list[dict[str, Any]]:
        return [one for one in read_ledger(self.ledger.path) if one["kind"] == "cadence" and one["tier"] == tier]

    def orders(self, tier: TierName) -> list[int]:
        return [one.steps for one in self.told if isinstance(one, SaveEvery) and one.tier == tier]


def test_before_anything_is_measured_both_tiers_save_after_the_first_steps(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert (rig.cadence.save_every_steps, rig.cadence.snapshot_every_steps) == (FIRST_STEPS, FIRST_STEPS)
    rig.start()
    rig.train(5)
    assert rig.told == []


def test_a_measured_save_leads_to_a_decision_that_is_told_to_the_ranks_and_logged_with_all_it_came_from(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None, save_overhead_max=None)
    rig.start()
    rig.train(5)
    rig.save(stall=0.02, durable=1.0, slower=0.5)  # six steps of 0.15 s
    (decision,) = rig.decisions("durable")
    assert decision["inputs"]["cost"] == {
        "stall_seconds": 0.02,
        "durable_seconds": 1.04,
        "interference_seconds": pytest.approx(0.3),
    }
    assert decision["inputs"]["step_seconds"] == pytest.approx(STEP_SECONDS)
    assert decision["interval_seconds"] == pytest.approx(decision["interval_steps"] * STEP_SECONDS)
    assert {"best_seconds", "bounds", "goodput_ratio", "goodput_ratio_half", "goodput_ratio_double"} <= decision.keys()
    assert decision["failures"]["node"]["low_per_second"] < decision["failures"]["node"]["high_per_second"]
    assert rig.orders("durable") == [decision["interval_steps"]] == [rig.cadence.save_every_steps]
    assert rig.told == [SaveEvery(generation=1, tier="durable", steps=decision["interval_steps"])]


def test_a_disk_that_turns_ten_times_slower_counts_at_the_next_save_but_one_at_the_latest(tmp_path: Path) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None, save_overhead_max=None)
    rig.start()
    for _ in range(5):
        rig.train(5)
        rig.save(durable=1.0)
    before = rig.cadence.save_every_steps
    rig.train(5)
    rig.save(durable=10.0)
    rig.train(5)
    rig.save(durable=10.0)
    latest = rig.decisions("durable")[-1]
    assert before is not None and latest["interval_steps"] > before
    assert "bandwidth" in {bound["name"] for bound in latest["bounds"]}
    assert latest["interval_seconds"] >= 9.9


def test_failures_that_come_ten_times_as_often_shorten_the_interval_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None, save_overhead_max=None, failures_per_node_day=40.0)
    rig.start()
    for _ in range(6):
        rig.train(1800)
        rig.save()
        rig.fail()
    before = rig.cadence.save_every_steps
    for _ in range(4):
        rig.train(150)
        rig.save()
        rig.fail()
    assert before is not None and rig.cadence.save_every_steps is not None
    assert rig.cadence.save_every_steps < 0.6 * before


def test_a_fixed_number_of_steps_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cadence=7, snapshot_every_steps=3)
    rig.start()
    rig.train(5)
    rig.save()
    assert rig.told == []
    assert (rig.cadence.save_every_steps, rig.cadence.snapshot_every_steps) == (None, 3)
    assert not rig.decisions("durable") and not rig.decisions("memory")


def test_never_stays_never(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cadence=None, snapshot_every_steps=None)
    rig.start()
    rig.train(5)
    rig.save()
    assert rig.told == []
    assert (rig.cadence.save_every_steps, rig.cadence.snapshot_every_steps) == (None, None)


def test_snapshots_in_memory_are_weighed_by_their_slowest_rank_and_by_the_whole_copy(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start()
    rig.train(5)
    rig.snapshot(0, 0.01, 0.05)
    assert rig.decisions("memory") == []
    rig.snapshot(1, 0.02, 0.09)
    (decision,) = rig.decisions("memory")
    cost = decision["inputs"]["cost"]
    assert (cost["stall_seconds"], cost["interference_seconds"]) == (0.02, pytest.approx(0.07))
    assert rig.orders("memory") == [decision["interval_steps"]] == [rig.cadence.snapshot_every_steps]


def test_a_snapshot_whose_costs_are_not_known_says_nothing_of_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start()
    rig.train(5)
    for rank in range(2):
        rig.snapshot(rank, 0.0, 0.0)
    assert not rig.told


def test_what_a_restart_takes_is_learnt_for_the_tier_that_was_restored(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start()
    rig.train(5)
    rig.save()
    rig.fail(again_after=3.0)
    rig.train(5)
    rig.save(stall=0.2)
    assert rig.decisions("memory")[-1]["inputs"]["restart_seconds"] == pytest.approx(3.0)


def test_a_coordinator_that_comes_back_goes_on_with_what_held_and_what_was_learnt(tmp_path: Path) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None)
    rig.start()
    for _ in range(3):
        rig.train(20)
        rig.save()
        rig.fail()
    rig.ledger.append("coordinator", driver="d", resumed=True, pid=2)
    successor = rig.successor()
    assert successor.save_every_steps == rig.cadence.save_every_steps != FIRST_STEPS
    rig.told.clear()
    rig.cadence = successor
    rig.train(1)
    assert all(_close(one, successor.save_every_steps) for one in rig.orders("durable"))


def _close(one: int, other: int | None) -> bool:
    return other is not None and 0.7 < one / other < 1.4


def test_a_full_disk_makes_saves_rare_until_there_is_room_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None, keep_last=1)
    rig.start()
    rig.train(5)
    rig.save()
    before = rig.cadence.save_every_steps
    rig.cadence.room(50, 100)
    assert before is not None and rig.cadence.save_every_steps is not None
    assert rig.cadence.save_every_steps > before
    assert "disk" in _names(rig.decisions("durable")[-1]["bounds"])
    rig.cadence.room(1000, 100)
    assert rig.cadence.save_every_steps < rig.decisions("durable")[-2]["interval_steps"]


def _names(bounds: Iterable[dict[str, Any]]) -> set[str]:
    return {bound["name"] for bound in bounds}


def test_a_ceiling_that_loses_more_than_it_spares_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path, snapshot_every_steps=None, failures_per_node_day=300.0)
    rig.start()
    rig.train(5)
    rig.save(stall=4.0, durable=5.0)
    assert "overhead" in _names(rig.decisions("durable")[-1]["bounds"])
    assert "RecoveryConfig.save_overhead_max costs" in caplog.text
