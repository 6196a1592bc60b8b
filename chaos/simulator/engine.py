"""Runs a job through its failures, from one event to the next: a failure, a restart, an interval that may change.

Invariants:
- Saves between two events are not walked through: where the run is, is found from sums (course.py). So the time that a
  simulation takes depends on failures and decisions, not on saves. What comes out is what walking would give.
- Every second of wall time is counted once, as useful or as one kind of badput.
- What is restored is decided by decide/ladder.py, whether and when it is tried again by decide/budget.py: the code of
  real runs. A failure in the middle of a restart begins it anew.
- A policy is asked at the ends of saves: the first one after the time at which it wants to be asked again.
- A save begins at the earliest when the one before can be restored, on average: an interval that is shorter waits.

Simplified: a save slows training down right after its stall, and not spread until it is durable. Where a run goes on
from memory, that state is made durable too, beside the training and without slowing it.
"""

import math
import random
from collections.abc import Iterator

import numpy as np

from chaos.simulator.course import Course, Position, Tier
from chaos.simulator.draws import Draws
from chaos.simulator.failures import Failure
from chaos.simulator.job import Job, Policy, SaveCosts
from chaos.simulator.outcome import Outcome
from chaos.simulator.rungs import Leg, Restored, Rungs
from orchestrator.decide.budget import FailureBudget, Stop
from orchestrator.decide.tuner import TierName

_NO_FAILURE = Failure(math.inf, "", "process", False)
_STEPS_MAX = 1e12


def simulate(job: Job, failures: Iterator[Failure], policy: Policy, seed: int) -> Outcome:
    """Run the job to its end. `failures` in the order of time; `seed` draws what saves and restores take."""
    return _Run(job, failures, policy, seed).to_the_end()


class _Run:
    def __init__(self, job: Job, failures: Iterator[Failure], policy: Policy, seed: int) -> None:
        rng = np.random.default_rng((seed, 0xC057))
        self._job, self._failures, self._policy = job, failures, policy
        self._durable = _tier("durable", job.durable, rng)
        self._memory = _tier("memory", job.memory, rng) if job.memory is not None else None
        self._rungs = Rungs(job.keep_last, job.damaged, random.Random(seed))
        self._budget = FailureBudget(job.max_failures, rng=random.Random(seed))
        self._next = next(failures, _NO_FAILURE)
        self._out = Outcome()
        self._now = self._work = self._down = 0.0

    @property
    def _over(self) -> bool:
        job = self._job
        return self._now >= job.horizon_seconds or self._work >= job.work_seconds or bool(self._out.stop_reason)

    @property
    def _up(self) -> float:
        return self._now - self._down

    def to_the_end(self) -> Outcome:
        out, job = self._out, self._job
        self._budget.generation_started(0)
        while not self._over:
            self._train()
            if self._now >= self._next.at:
                self._recover()
        if out.stop_reason and math.isfinite(job.horizon_seconds):
            out.badput_seconds["stopped"] += job.horizon_seconds - self._now
            self._now = job.horizon_seconds
        out.wall_seconds, out.useful_seconds = self._now, self._work
        for tier in filter(None, (self._durable, self._memory)):
            out.saves[tier.name] += tier.used
        out.bytes_written = out.saves["durable"] * job.state_bytes
        out.bytes_read = out.restores["durable"] * job.state_bytes
        return out

    # ------------------------------------------------------------ training

    def _train(self) -> None:
        """Until the next failure or the end."""
        until = min(self._next.at, self._job.horizon_seconds)
        since_durable = 0.0
        while self._now < until and self._work < self._job.work_seconds:
            self._take_intervals()
            since_durable = self._pass(until, since_durable)

    def _take_intervals(self) -> None:
        wanted = self._policy.intervals(self._up)
        durable, memory, job = self._durable, self._memory, self._job
        before = durable.steps, memory.steps if memory else 0
        durable.steps = self._steps(wanted.durable_seconds, job.durable)
        if memory is not None and job.memory is not None:
            every = wanted.memory_seconds if wanted.memory_seconds is not None else math.inf
            memory.steps = min(self._steps(every, job.memory), durable.steps)
        after = durable.steps, memory.steps if memory else 0
        self._out.decisions += before != after

    def _steps(self, seconds: float, costs: SaveCosts) -> int:
        """An interval in whole steps, not shorter than a save takes until it can be restored."""
        least = math.ceil((costs.durable.mean - costs.pause_seconds) / self._job.step_seconds - 1e-9)
        return max(1, least, round(min(seconds / self._job.step_seconds, _STEPS_MAX)))

    def _pass(self, until: float, since_durable: float) -> float:
        """Train on until that time, or until the policy is to be asked. Takes and gives how long was trained since the
        last durable save."""
        job, began, work = self._job, self._now, self._work
        course = Course(self._durable, self._memory, job.step_seconds, since_durable)
        seconds = until - began
        done_after = course.seconds_until(job.work_seconds - work) if math.isfinite(job.work_seconds) else math.inf
        end = min(seconds, done_after)
        position = None
        review_after = self._policy.review_at - self._up
        if review_after < end:
            position = course.next_end(course.after(max(0.0, review_after)))
        if position is None or position.seconds > end:
            position = course.after(end)
        self._rungs.trained(Leg(course, position, began, work, job.step_seconds))
        # Not by adding up, so that ends are met exactly.
        self._now = until if position.seconds == seconds else began + position.seconds
        self._work = job.work_seconds if position.seconds == done_after else work + course.work(position)
        self._count_saves(course, position)
        return course.since_durable(position)

    def _count_saves(self, course: Course, position: Position) -> None:
        badput = self._out.badput_seconds
        cut_short = course.saving(position)
        for tier, count in ((self._durable, position.whole), (self._memory, course.snapshots(position))):
            if tier is None:
                continue
            stalled = tier.stall.sum(tier.used, count)
            badput["stall"] += stalled
            badput["interference"] += tier.pause.sum(tier.used, count) - stalled
            tier.used += count
            if count:
                self._tell_costs(tier)
            if tier is cut_short:
                stalled = min(position.paused, tier.stall[tier.used])
                badput["stall"] += stalled
                badput["interference"] += position.paused - stalled
                tier.used += 1

    def _tell_costs(self, tier: Tier) -> None:
        """Of its newest save that is over."""
        stall, pause, ready = (draws[tier.used - 1] for draws in (tier.stall, tier.pause, tier.ready))
        self._policy.saved(tier.name, stall, ready, pause - stall)

    # ------------------------------------------------------------ failures

    def _recover(self) -> None:
        """From the failure that strikes now until training goes on, through those that strike meanwhile."""
        out, horizon = self._out, self._job.horizon_seconds
        step = int(self._work / self._job.step_seconds + 1e-9)
        while self._now >= self._next.at and not self._over:
            failure, self._next = self._next, next(self._failures, _NO_FAILURE)
            out.failures[failure.cause] += 1
            self._policy.failed(failure, self._up)
            self._rungs.failed(self._now)
            self._budget.committed(self._rungs.newest_durable_step)
            verdict = self._budget.failure(failure.cause, step)
            if isinstance(verdict, Stop):
                out.stop_reason = verdict.reason
                return
            restored = self._restore(failure)
            if restored is None:
                return
            step = restored.step
            tier = self._memory if restored.source == "memory" and self._memory else self._durable
            restart = tier.restart_seconds()
            seconds = verdict.delay_seconds + restart
            passed = min(seconds, self._next.at - self._now, horizon - self._now)
            waited = min(passed, verdict.delay_seconds)
            out.badput_seconds["waiting"] += waited
            out.badput_seconds["restart"] += passed - waited
            self._down += passed
            self._now = self._next.at if passed == self._next.at - self._now else self._now + passed
            if passed == seconds:
                self._policy.restarted(tier.name, restart)

    def _restore(self, failure: Failure) -> Restored | None:
        """Go back; None if the run has to stop."""
        durable_at = self._now + self._durable.ready[self._durable.used]
        restored = self._rungs.restore(failure.memory_survives, durable_at)
        if not isinstance(restored, Restored):
            self._out.stop_reason = restored.error("the run's directory").args[0]
            return None
        self._out.restores[restored.source] += 1
        self._out.saves["durable"] += restored.made_durable
        self._out.badput_seconds["lost"] += self._work - restored.work
        self._work = restored.work
        self._budget.generation_started(restored.step)
        return restored


def _tier(name: TierName, costs: SaveCosts, rng: np.random.Generator) -> Tier:
    stall, interference = costs.stall.pool(rng), costs.interference.pool(rng)
    durable, restart = costs.durable.pool(rng), costs.restart.pool(rng)
    return Tier(
        name,
        stall=Draws(stall.tolist()),
        pause=Draws((stall + interference).tolist()),
        ready=Draws(np.maximum(stall, durable).tolist()),
        restart=Draws(restart.tolist()),
    )
