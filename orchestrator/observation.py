"""What there is to see of a run, kept up to date in its coordinator: from the ledger, from pulses, from its storage.

It writes `progress` into the ledger, and answers on HTTP. It decides nothing, and nothing that fails here may hurt the
run: events are taken in with a few operations each, all else is done on threads of its own when somebody asks.
"""

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, ParamSpec

from orchestrator import ray_metrics
from orchestrator.decide.failure_rate import RatePosterior
from orchestrator.observe import discovery, health
from orchestrator.observe.accounting import PROGRESS_SECONDS
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.observe.live import Live
from orchestrator.observe.metrics import ExporterFacts, View, metrics_route
from orchestrator.observe.server import Response, Route, Server
from orchestrator.observe.summary import Summary
from orchestrator.observe.tally import Tally
from orchestrator.outcome import CoordinatorConfig
from workers.keeper_messages import HeldSnapshot
from workers.messages import RankPulse

logger = logging.getLogger("lastgood")

_WRITE_SECONDS = 0.75 * PROGRESS_SECONDS
_LOOK_SECONDS = 5.0
_RATE_SECONDS = 10.0

P = ParamSpec("P")


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """What goes wrong in it is logged: the run goes on unobserved."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("lastgood: the run could not be observed")

    return guarded


class Observation:
    """`failure_rate()`: what is believed of it now. `copied_step()`: the newest step with copies on other nodes.
    `routes`: more paths to answer, beside /metrics and /healthz."""

    def __init__(
        self,
        config: CoordinatorConfig,
        ledger: Ledger,
        *,
        failure_rate: Callable[[], RatePosterior | None],
        copied_step: Callable[[], int | None],
        routes: Mapping[str, Route] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._failure_rate = failure_rate
        self._copied_step = copied_step
        self._routes = dict(routes or {})
        self._clock = clock
        self.lock = threading.RLock()
        self.summary = Summary()
        self.tally = Tally()
        self.live = Live()
        self._info = {
            "run_id": config.run,
            "run_dir": str(config.run_dir),
            "driver": config.driver,
            "version": version("lastgood"),
        }
        self._exporter = ExporterFacts()
        self._server: Server | None = None
        self._rate: tuple[float, RatePosterior | None] | None = None
        self._storage: tuple[int, int] | None = None
        self._written_at = 0.0
        self._memory_stalls: dict[tuple[int, int], float] = {}
        self._patience = health.Patience(start_seconds_max=config.recovery.start_seconds_max, since=clock())
        self._had_port = 0
        before = read_ledger(ledger.path)
        for entry in before:
            self._take(entry)
        if (exporter := discovery.last_exporter(before, config.driver)) is not None:
            self._had_port = exporter["port"]
        ledger.listen(self._take)

    # ------------------------------------------------------------ what happens

    @_harmless
    def pulse(self, rank: int | None, event: RankPulse) -> None:
        if rank is None:
            return
        now = self._clock()
        with self.lock:
            self.live.pulse(rank, event, now)
            if rank != 0 or not event.stepped or event.generation != self.summary.generation:
                return
            lost = self.summary.accounting.regaining
            due = now - self._written_at >= _WRITE_SECONDS or (lost is not None and event.step >= lost)
            if not due or self.summary.accounting.state != "training":
                return
            self._written_at = now
            stall_seconds = sum(self._memory_stalls.values())
            self._memory_stalls.clear()
            took = self.live.step_seconds()
        self._ledger.append(
            "progress",
            generation=event.generation,
            step=event.step,
            at_step=now,
            step_seconds=took[1] if took else None,
            stall_seconds=stall_seconds,
        )

    @_harmless
    def uses_memory(self, rank: int | None, memory_bytes: int) -> None:
        if rank is not None:
            with self.lock:
                self.live.uses_memory(rank, memory_bytes)

    @_harmless
    def snapshotted(self, held: HeldSnapshot) -> None:
        """Of those that are to be written, the ledger's `snapshot` says what they cost."""
        if not held.durable and held.stall_seconds:
            key = (held.generation, held.step)
            with self.lock:
                self._memory_stalls[key] = max(self._memory_stalls.get(key, 0.0), held.stall_seconds)

    @_harmless
    def waits(self, waited_for: Mapping[int, float]) -> None:
        """By rank, the part of the time in which the others wait for it."""
        with self.lock:
            self.live.waited_for = waited_for

    @_harmless
    def _take(self, entry: Mapping[str, Any]) -> None:
        with self.lock:
            self.summary.add(dict(entry))
            self.tally.add(entry)
            self.live.begin(self.summary.generation)

    # ------------------------------------------------------------ what is shown

    def view(self) -> View:
        """As of now. What it refers to goes on changing: to be used while `lock` is held."""
        now = self._clock()
        return View(
            now=now,
            run=self._config.run_dir.name,
            info=self._info,
            summary=self.summary,
            tally=self.tally,
            account=self.summary.accounting.at(now),
            live=self.live,
            rate=self._believed(now),
            healthy=not self.problems(now),
            snapshot_step=self._copied_step(),
            storage_bytes=self._storage,
            exporter=self._exporter,
        )

    def problems(self, now: float | None = None) -> list[str]:
        """What is wrong with the run, in words."""
        with self.lock:
            return health.problems(self.summary, self.live, self._patience, self._clock() if now is None else now)

    def _believed(self, now: float) -> RatePosterior | None:
        if self._rate is None or now - self._rate[0] > _RATE_SECONDS:
            self._rate = (now, self._failure_rate())
        return self._rate[1]

    def _healthz(self) -> Response:
        problems = self.problems()
        body = json.dumps({"healthy": not problems, "problems": problems}).encode() + b"\n"
        return Response(body=body, content_type="application/json", status=503 if problems else 200)

    # ------------------------------------------------------------ the exporter

    @_harmless
    def start(self) -> None:
        """Answer on HTTP, and report through Ray. What does not work is logged."""
        recovery = self._config.recovery
        for look in (self._look_at_storage, self._report_through_ray):
            threading.Thread(target=look, name="lastgood-observation", daemon=True).start()
        if recovery.metrics_port is None:
            return
        answer = metrics_route(self.view, self._exporter)

        def metrics() -> Response:
            with self.lock:
                self._exporter.errors = self._server.errors if self._server else 0
                self._exporter.refused = self._server.refused if self._server else 0
                return answer()

        routes = {**self._routes, "/metrics": metrics, "/healthz": self._healthz}
        port = recovery.metrics_port or self._had_port
        try:
            self._server = Server(routes, host=recovery.metrics_host, port=port)
            self._server.start()
        except (OSError, RuntimeError) as error:
            logger.warning("lastgood: no metrics: nothing can be listened at on %s: %s", recovery.metrics_host, error)
            self._announced(None, str(error))
            return
        if self._server.fallback is not None and recovery.metrics_port:
            logger.warning(
                "lastgood: RecoveryConfig.metrics_port %d: %s; metrics are at port %d",
                port,
                self._server.fallback,
                self._server.port,
            )
        else:
            logger.info("lastgood: metrics are at http://%s/metrics", self._server.target)
        self._announced(self._server, self._server.fallback)

    def _announced(self, server: Server | None, problem: str | None) -> None:
        self._ledger.append(
            "exporter",
            driver=self._config.driver,
            host=self._config.recovery.metrics_host,
            port=server.port if server else 0,
            wanted_port=self._config.recovery.metrics_port,
            problem=problem,
        )
        if server is not None:
            try:
                discovery.announce(self._config.run_dir, server.target, self._config.driver)
            except OSError as error:
                logger.warning("lastgood: Prometheus cannot be told where the metrics are: %s", error)

    def _look_at_storage(self) -> None:
        """Every few seconds; storage that stalls holds up nothing else."""
        while True:
            try:
                stats = os.statvfs(self._config.run_dir)
                self._storage = (stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)
            except OSError:
                self._storage = None
            time.sleep(_LOOK_SECONDS)

    def _report_through_ray(self) -> None:
        reporter, failed = ray_metrics.Reporter(), False
        while True:
            try:
                with self.lock:
                    readings = reporter.of(self.view())
                reporter.report(readings)
                failed = False
            except Exception:
                if not failed:
                    logger.exception("lastgood: metrics could not be reported through Ray")
                failed = True
            time.sleep(_LOOK_SECONDS)
