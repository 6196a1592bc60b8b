"""How often ranks are told to save, in both tiers: the wiring of decide/tuner.py.

What the tuner learns of failures, commits and restarts comes from the ledger's entries, as they are written or, after a
restart, as they were; what it learns of steps and of snapshots in memory, from pulses and keepers. Each decision
becomes an entry, with all that it was made from, and an order to the ranks.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.config import RecoveryConfig
from orchestrator.decide.cost import overhead_ratio
from orchestrator.decide.failure_rate import FailureRate, RatePosterior, prior_from_cluster
from orchestrator.decide.run_history import RunHistory
from orchestrator.decide.slowdown import Slowdown
from orchestrator.decide.tuner import (
    FIRST_STEPS,
    MISSES_ALONE,
    MISSES_REPLICATED,
    IntervalDecision,
    Limits,
    TierName,
    Tuner,
)
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.observe.restarts import Restarts
from workers import failpoint
from workers.keeper_messages import HeldSnapshot
from workers.messages import Command, RankPulse, SaveEvery

logger = logging.getLogger("lastgood")

_SETS_KEPT = 8
_DEAR_CEILING = 0.01
"""A ceiling on overhead that costs more than this part of the training time is worth a warning."""
_RANKS_PER_NODE = 8
"""The published rates are of nodes with so many GPUs."""


class Cadence:
    """`post_to_agents(command)` sends a command."""

    def __init__(
        self,
        config: RecoveryConfig,
        ledger: Ledger,
        post_to_agents: Callable[[Command], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._post_to_agents = post_to_agents
        self._clock = clock
        self._steps: dict[TierName, int] = {"memory": FIRST_STEPS, "durable": FIRST_STEPS}
        self._tuned: dict[TierName, bool] = {
            "memory": config.snapshot_every_steps == "auto",
            "durable": config.cadence == "auto",
        }
        self._has_memory = config.snapshot_every_steps is not None
        self._history: RunHistory | None = None
        self._tuner: Tuner | None = None
        self._slowdown = Slowdown()
        self._generation = self._ranks = 0
        self._restarts = Restarts()
        self._sets: dict[tuple[int, int], dict[int, HeldSnapshot]] = {}
        for entry in read_ledger(ledger.path):
            self._take(entry)
        ledger.listen(self._heard)

    # ------------------------------------------------------------ what holds

    @property
    def save_every_steps(self) -> int | None:
        """After how many steps a checkpoint is saved if that is tuned; None if it is not."""
        return self._steps["durable"] if self._tuned["durable"] else None

    @property
    def snapshot_every_steps(self) -> int | None:
        """After how many steps a snapshot is taken that stays in memory; None for never."""
        every = self._config.snapshot_every_steps
        return self._steps["memory"] if every == "auto" else every

    def interference_seconds(self) -> float:
        """How much longer the steps took while the save that has just ended was written."""
        return self._slowdown.seconds

    def failure_rate(self) -> RatePosterior | None:
        """Of all failures; None before the first generation."""
        if self._tuner is None or self._history is None:
            return None
        return self._tuner.rates.posterior(self._history.at(self._clock()))

    # ------------------------------------------------------------ what happens

    def pulse(self, event: RankPulse, rank: int | None) -> None:
        """Ranks keep step, so one of them shows it for all."""
        if rank != 0 or not event.step_seconds or self._tuner is None:
            return
        usual = self._slowdown.steps_took(event.step_seconds)
        if usual:
            self._tuner.steps_took(usual)
        self._decide()

    def snapshotted(self, held: HeldSnapshot) -> None:
        """A snapshot that was handed over to another keeper has no costs."""
        if not held.copy_seconds or self._tuner is None or not self._has_memory:
            return
        told = self._sets.setdefault((held.generation, held.step), {})
        told[held.rank] = held
        for old in list(self._sets)[:-_SETS_KEPT]:
            del self._sets[old]
        if len(told) == self._ranks:
            stall = max(each.stall_seconds for each in told.values())
            copy = max(each.copy_seconds for each in told.values())
            # What the copy takes beside the training is counted as if nothing went on meanwhile: at most it does.
            self._tuner.saved(
                "memory", stall_seconds=stall, durable_seconds=copy, interference_seconds=max(0.0, copy - stall)
            )
            self._decide()

    def room(self, free_bytes: int, save_bytes: int) -> None:
        """So much is free on the disk, and so much the newest save took. Older ones give way if it is full."""
        if self._tuner is not None:
            deletable = self._config.keep_last - self._config.keep_last_min
            self._tuner.room(free_bytes + deletable * save_bytes, save_bytes)
            self._decide()

    def _heard(self, entry: Mapping[str, Any]) -> None:
        self._take(entry)
        if entry["kind"] in ("commit", "failure", "first_step", "generation"):
            self._decide()

    def _take(self, entry: Mapping[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "generation" and self._tuner is None:
            self._begin(int(entry["ranks"]), int(entry.get("nodes", 1)))
        if self._history is None or self._tuner is None:
            return
        self._history.take(entry)
        if restart := self._restarts.take(entry):
            from_memory = restart.source == "memory" and self._has_memory
            self._tuner.restarted("memory" if from_memory else "durable", restart.seconds)
        if kind == "generation":
            self._generation, self._ranks = int(entry["generation"]), int(entry["ranks"])
            self._slowdown.ended()
        elif kind == "snapshot":
            self._slowdown.begun()
        elif kind == "commit":
            self._slowdown.ended()
            self._tuner.saved(
                "durable",
                stall_seconds=entry.get("stall_seconds", 0.0),
                durable_seconds=entry.get("copy_seconds", 0.0) + entry["commit_seconds"],  # since the boundary
                interference_seconds=max(0.0, entry.get("interference_seconds", 0.0)),
            )
        elif kind == "save_failed" and entry["final"]:
            self._slowdown.ended()
        elif kind == "cadence" and entry["interval_steps"] is not None:
            self._steps[entry["tier"]] = int(entry["interval_steps"])

    def _begin(self, ranks: int, nodes: int) -> None:
        config = self._config
        prior = prior_from_cluster(-(-ranks // _RANKS_PER_NODE), config.failures_per_node_day)
        self._tuner = Tuner(
            FailureRate(prior, ranks=ranks),
            limits=Limits(
                durable_overhead_max=config.save_overhead_max, memory_overhead_max=config.snapshot_overhead_max
            ),
            memory=self._has_memory,
            memory_misses=MISSES_REPLICATED if config.replicate_snapshots and nodes > 1 else MISSES_ALONE,
        )
        self._history = RunHistory(self._tuner)

    # ------------------------------------------------------------ what is decided

    def _decide(self) -> None:
        if self._tuner is None or self._history is None:
            return
        at = self._history.at(self._clock())
        for decision in self._tuner.decide(at):
            if self._tuned[decision.tier] and decision.interval_steps is not None:
                self._order(decision, at)

    def _order(self, decision: IntervalDecision, at: float) -> None:
        assert self._tuner is not None and decision.interval_steps is not None
        failpoint.hit("cadence.decide", tier=decision.tier, generation=self._generation)
        self._steps[decision.tier] = decision.interval_steps
        for bound in decision.bounds:
            if bound.name == "overhead" and bound.goodput_cost_ratio > _DEAR_CEILING:
                logger.warning(
                    "lastgood: RecoveryConfig.%s costs %.1f%% of the training time: more is lost at failures than "
                    "the saves would take; %.1f%% for saves would pay best",
                    "save_overhead_max" if decision.tier == "durable" else "snapshot_overhead_max",
                    100 * bound.goodput_cost_ratio,
                    100 * overhead_ratio(decision.inputs.cost, decision.best_seconds),
                )
        believed = {
            name: {
                "per_second": posterior.mean_per_second,
                "low_per_second": posterior.low_per_second,
                "high_per_second": posterior.high_per_second,
            }
            for name, posterior in (
                ("process", self._tuner.rates.posterior(at, "process")),
                ("node", self._tuner.rates.posterior(at, "node")),
            )
        }
        told = {name: value for name, value in asdict(decision).items() if name != "at"}
        self._ledger.append("cadence", generation=self._generation, run_seconds=at, **told, failures=believed)
        self._post_to_agents(SaveEvery(generation=self._generation, tier=decision.tier, steps=decision.interval_steps))
