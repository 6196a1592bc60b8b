"""The sequence of `ray.train.report` calls that all agents make alike.

One report is under way at a time: Ray's own barrier would queue them without limit otherwise. Metrics that come
meanwhile are merged, the newest value of each name winning. Ray takes one report in two seconds, and a run ends only
when it has taken them all: so of the commits that wait, only the newest few are kept; the ledger has every one. A
coordinator that was restarted goes on where the agents are; one that missed a report makes an empty one in its place,
since Ray counts the calls. Asking for draining nodes is a call of the same sequence, made while nothing else is under
way: Ray has one barrier for all its calls.
"""

from collections.abc import Callable
from typing import Any

from workers.messages import AgentJoined, AskDraining, Command, Report, Reported

WAITING_MAX = 4


class ReportSequence:
    def __init__(self, post: Callable[[str, Command], None]) -> None:
        self._post = post
        self._queued: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._commits: list[tuple[int, str | None]] = []
        self._metrics: dict[str, Any] = {}
        self._changed = False
        self._asked_last = 0
        self.last = 0

    def joined(self, event: AgentJoined, *, new_group: bool) -> None:
        """A new group of Ray's workers starts its own sequence; after the coordinator's restart the old one goes on."""
        if new_group:
            self._queued, self._done, self.last, self._asked_last = {}, {}, 0, 0
        self._queued[event.agent] = event.reports_queued
        self._done[event.agent] = event.reports_done
        self.last = max(self.last, event.reports_queued)
        self._asked_last = max(self._asked_last, event.asked_last)
        for agent, queued in self._queued.items():
            for number in range(queued + 1, self.last + 1):
                asked = number == self._asked_last  # of those that an agent may have missed, at most one is
                self._post(
                    agent,
                    AskDraining(number=number) if asked else Report(number=number, metrics={}, checkpoint=None),
                )
            self._queued[agent] = self.last

    def metrics(self, values: dict[str, Any]) -> None:
        self._metrics.update(values)
        self._changed = True
        self._next()

    def commit(self, step: int, path: str | None) -> None:
        self._commits = [*self._commits, (step, path)][-WAITING_MAX:]
        self._next()

    def done(self, event: Reported) -> None:
        if event.agent in self._done:
            self._done[event.agent] = max(event.number, self._done[event.agent])
            self._next()

    def ask_draining(self) -> None:
        """Ask Ray which nodes will be taken away, unless a call is under way; the answer comes with `Reported`."""
        if self._under_way() or not self._queued:
            return
        self.last += 1
        self._asked_last = self.last
        for agent in self._queued:
            self._queued[agent] = self.last
            self._post(agent, AskDraining(number=self.last))

    def flush(self) -> None:
        """At the run's end: send what is left at once."""
        while self._commits or self._changed:
            self._send()

    def _next(self) -> None:
        if not self._under_way() and (self._commits or self._changed):
            self._send()

    def _under_way(self) -> bool:
        return any(done < self.last for done in self._done.values())

    def _send(self) -> None:
        step, path = self._commits.pop(0) if self._commits else (None, None)
        metrics = dict(self._metrics)
        if step is not None:
            metrics["committed_step"] = step
        self._changed = False
        self.last += 1
        for agent in self._queued:
            self._queued[agent] = self.last
            self._post(agent, Report(number=self.last, metrics=metrics, checkpoint=path))
