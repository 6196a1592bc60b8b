"""One campaign: start the run, strike it as planned, stop, and demand that it finishes; then have it judged.

The run's driver is a child process. What is injected is recorded beside what armed fault points record, in `faults/` of
the run directory, with the time of the fault; the judge reads nothing else of what happened here.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.campaign.driver import Spec
from chaos.campaign.leak_watch import LeakWatch
from chaos.campaign.plan import Plan
from chaos.campaign.schedule import Pacer, Planned, arms
from chaos.campaign.watcher import LedgerTail, Observer
from chaos.faults.fault import Target
from chaos.faults.registry import FAULTS
from chaos.history import History
from chaos.judge.judge import judge
from chaos.judge.terms import Terms, write_terms
from chaos.verdict import Outcome, Verdict
from orchestrator.observe.ledger import LEDGER_FILE
from workers import failpoint
from workers.errors import EnvironmentProblem

_POLL_SECONDS = 0.01
_LOOK_SECONDS = 2.0
_STATUS_SECONDS = 0.25
_LAST_STEP_ONLY: Mapping[str, Any] = {"cadence": None, "snapshot_every_steps": None}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """plan with its seed; where; script: the user's loop, or None. `address` of the Ray cluster, to which this
    process is connected. `say` tells what happens."""

    plan: Plan
    seed: int
    storage: Path
    address: str
    script: str | None = None
    name: str = "attacked"
    say: Say = field(default=lambda line: None)

    @property
    def run_dir(self) -> Path:
        """Of the attacked run."""
        return self.storage / self.name


def run_campaign(campaign: Campaign) -> list[Verdict]:
    """Attack, and judge. Raises EnvironmentProblem if the run cannot even start."""
    plan = campaign.plan
    reference = None
    if plan.exact:
        campaign.say("first the same training undisturbed, to compare with")
        reference = campaign.storage / "reference"
        _train(campaign, "reference")
    run_dir = campaign.run_dir
    injected = _Attack(campaign, run_dir).carry_out()
    terms = Terms(
        reference=str(reference) if reference else None,
        steps=plan.job.steps,
        recovery_seconds_max=plan.recovery_seconds_max,
        keep_last=int(plan.recovery.get("keep_last", 3)),
        keep_last_min=int(plan.recovery.get("keep_last_min", 1)),
        exact=plan.exact,
    )
    write_terms(run_dir, terms)
    return [*skipped_faults(plan, injected, History(run_dir)), *judge(run_dir, terms)]


def skipped_faults(plan: Plan, injected: dict[str, int], history: History) -> list[Verdict]:
    """Whether all faults came that the plan wanted, and one verdict for each of the mix that never did."""
    wanted, came = plan.faults.count, sum(injected.values())
    detail = f"{came} of {wanted} faults: " + (
        ", ".join(f"{n} {name}" for name, n in sorted(injected.items())) or "none"
    )
    outcome = Outcome.HELD if came >= wanted else Outcome.SKIPPED
    armed, in_saves = len(history.faults) - came, len(history.faults_in_saves())
    detail += f"; {armed} of {plan.armed.count} at fault points; {in_saves} in all struck during a save"
    facts = {"injected": injected, "at_fault_points": armed, "during_saves": in_saves}
    found = [Verdict(name="faults injected", outcome=outcome, detail=detail, facts=facts)]
    for name in plan.mix_names:
        if injected.get(name, 0):
            continue
        needs = FAULTS[name].needs
        reason = FAULTS[name].available() or "its turn did not come" + (
            "" if needs == "nothing" else f"; needs {needs}"
        )
        found.append(Verdict(name=f"fault {name}", outcome=Outcome.SKIPPED, detail=reason))
    return found


def _spec(campaign: Campaign, name: str, *, attacked: bool) -> Spec:
    job = campaign.plan.job
    config: dict[str, Any] = {"steps": job.steps, "seed": campaign.seed}
    if campaign.script is not None:
        config |= job.config
    elif job.model == "tiny":
        # Undisturbed it need not leave time for faults, and computes the same.
        config |= {"loader_workers": job.loader_workers, "pace_seconds": job.pace_seconds if attacked else 0.0}
    else:
        config |= {"global_batch_size": 8 * job.ranks}
    return Spec(
        address=campaign.address,
        storage=str(campaign.storage),
        name=name,
        script=campaign.script,
        model=job.model,
        config=config,
        ranks=job.ranks,
        # Undisturbed, only the end is of interest.
        recovery={**campaign.plan.recovery, **({} if attacked else _LAST_STEP_ONLY)},
        arms=arms(campaign.plan, campaign.seed) if attacked else (),
    )


class _Driver:
    """The processes in which fit() runs: one, or one more while it takes over."""

    def __init__(self, campaign: Campaign, name: str, *, attacked: bool) -> None:
        self._spec = campaign.storage / f"{name}.spec.json"
        self.log = campaign.storage / f"{name}.log"
        _spec(campaign, name, attacked=attacked).write(self._spec)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> int:
        """Another driver; its pid."""
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "chaos.campaign.driver", str(self._spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._processes.append(process)
        return process.pid

    @property
    def pid(self) -> int:
        """Of the newest."""
        return self._processes[-1].pid

    def ended(self) -> int | None:
        """The newest one's exit code, None while it runs."""
        return self._processes[-1].poll()

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _train(campaign: Campaign, name: str) -> None:
    """The undisturbed run."""
    driver = _Driver(campaign, name, attacked=False)
    try:
        deadline = time.monotonic() + campaign.plan.timeout_seconds
        while (code := driver.ended()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if code != 0:
            why = "did not end in time" if code is None else f"ended with exit code {code}: {driver.last_words()}"
            raise EnvironmentProblem(f"the undisturbed run {why}; its log is {driver.log}")
    finally:
        driver.close()


class _Attack:
    """The attacked run and what is done to it."""

    def __init__(self, campaign: Campaign, run_dir: Path) -> None:
        self._campaign, self._plan, self._run_dir = campaign, campaign.plan, run_dir
        self._tail = LedgerTail(run_dir / LEDGER_FILE)
        self._observer = Observer()
        self._pacer = Pacer(campaign.plan.faults, campaign.seed)
        self._coordinator_pid: int | None = None
        self._lasting: list[tuple[float, Path, Callable[[], None]]] = []
        self._status: dict[str, Any] = {}
        self._status_at = self._looked_at = 0.0
        self._injected: dict[str, int] = {}
        self._unavailable: dict[str, str] = {}
        self._told: set[str] = set()

    def carry_out(self) -> dict[str, int]:
        """Runs to the end, or to a deadline; how often each fault was injected."""
        plan, say = self._plan, self._campaign.say
        for name in plan.mix_names:
            if reason := FAULTS[name].available():
                self._unavailable[name] = reason
                say(f"{name} is left out: {reason}")
        driver = _Driver(self._campaign, self._campaign.name, attacked=True)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        leaks = LeakWatch(self._run_dir) if plan.watch_leaks else None
        deadline = time.monotonic() + plan.timeout_seconds
        calm: float | None = None
        try:
            while driver.ended() is None:
                now = time.monotonic()
                for entry in self._tail.read():
                    self._observer.take(entry)
                    if entry["kind"] == "coordinator":
                        self._coordinator_pid = entry["pid"]
                self._refresh_status(now)
                trains = self._observer.seen(now).training  # before it does, all of it still grows
                if leaks is not None and trains and now - self._looked_at > _LOOK_SECONDS:
                    self._looked_at = now
                    leaks.look(self._status, self._coordinator_pid)
                self._release(now)
                planned = self._pacer.look(self._observer.seen(now))
                if planned is not None:
                    self._inject(planned, driver)
                if self._pacer.done and calm is None:
                    calm = now
                    say("no more faults; now it has to finish")
                if now > deadline or (calm is not None and now - calm > plan.finish_seconds):
                    say("it does not finish: giving up")
                    break
                time.sleep(_POLL_SECONDS)
            self._release(float("inf"))
            if driver.ended() not in (0, None):
                say(f"the run's driver ended with exit code {driver.ended()}: {driver.last_words()}")
        finally:
            self._release(float("inf"))
            driver.close()
        if not (self._run_dir / LEDGER_FILE).exists():
            raise EnvironmentProblem(f"the run did not start: {driver.last_words()}; its log is {driver.log}")
        if leaks is not None:
            leaks.end()
        return self._injected

    def _refresh_status(self, now: float) -> None:
        if now - self._status_at > _STATUS_SECONDS:
            self._status_at = now
            self._status = self._ask()
            if "step" in self._status:
                self._observer.at_step(self._status["step"])

    def _ask(self) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayError

        from orchestrator.driver import run_id
        from workers.link import NAMESPACE

        try:
            coordinator: Any = ray.get_actor(f"coordinator-{run_id(self._run_dir)}", namespace=NAMESPACE)
            status: dict[str, Any] = ray.get(coordinator.status.remote(), timeout=2)
            return status
        except (RayError, ValueError):
            return {}

    def _inject(self, planned: Planned, driver: _Driver) -> None:
        if planned.fault in self._unavailable:
            self._pacer.struck(time.monotonic())
            return
        target = Target(
            run_dir=self._run_dir,
            status=self._ask,
            driver_pid=driver.pid,
            start_driver=driver.start,
        )
        seen = self._observer.seen(time.monotonic())
        at = time.time()
        injected = FAULTS[planned.fault].inject(target, random.Random(planned.choice))
        if injected is None:
            return
        moment = "random moment" if planned.moment == "any" else planned.moment
        if seen.save is not None:
            moment = f"save of step {seen.save}"
        marker = self._run_dir / "faults" / f"{planned.number:04d}-{planned.fault}.json"
        marker.parent.mkdir(exist_ok=True)
        record = {
            "id": marker.stem,
            "point": moment,
            "action": planned.fault,
            "when": {"moment": planned.moment, "follows": planned.follows},
            "at": at,
            "until": time.time() + injected.effect_seconds + (planned.hold_seconds if injected.release else 0.0),
            "pid": os.getpid(),
            "context": {"step": seen.step, **injected.context},
        }
        marker.write_text(json.dumps(record), encoding="utf-8")
        if injected.release is not None:
            self._lasting.append((time.monotonic() + planned.hold_seconds, marker, injected.release))
        self._injected[planned.fault] = self._injected.get(planned.fault, 0) + 1
        self._campaign.say(
            f"{planned.number} of {self._plan.faults.count}: {planned.fault} at {moment}, step {seen.step}"
        )
        self._pacer.struck(time.monotonic())

    def _release(self, now: float) -> None:
        """End what has lasted long enough, and pauses at fault points as well."""
        for item in [item for item in self._lasting if item[0] <= now]:
            self._lasting.remove(item)
            _, marker, release = item
            with contextlib.suppress(OSError):
                release()
            record = json.loads(marker.read_text(encoding="utf-8"))
            marker.write_text(json.dumps({**record, "until": time.time()}), encoding="utf-8")
        if self._plan.armed.count:
            self._release_pauses(force=now == float("inf"))

    def _release_pauses(self, *, force: bool) -> None:
        for path in (self._run_dir / "faults").glob("armed-*.json"):
            if path.stem in self._told:
                continue
            with contextlib.suppress(ValueError):
                marker = json.loads(path.read_text(encoding="utf-8"))
                waits = marker["action"] == "pause" and not force
                if waits and time.time() - marker["at"] < self._plan.faults.hold_seconds[1]:
                    continue
                if marker["action"] == "pause":
                    failpoint.release(marker["id"], self._run_dir / "faults")
                self._told.add(path.stem)
                self._campaign.say(f"{marker['action']} at {marker['point']}, {marker['context']}")


def with_overrides(plan: Plan, *, kills: int | None, steps: int | None) -> Plan:
    """A shorter or longer one: faults and steps in the same proportion."""
    if kills is not None:
        factor = kills / max(1, plan.faults.count)
        steps = steps or max(20, int(plan.job.steps * factor))
        plan = replace(plan, faults=replace(plan.faults, count=kills))
    if steps is not None:
        until = max(1, plan.faults.until_step * steps // plan.job.steps)
        plan = replace(
            plan,
            job=replace(plan.job, steps=steps),
            faults=replace(plan.faults, until_step=max(until, plan.faults.from_step + 1)),
        )
    return plan
