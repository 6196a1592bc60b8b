"""Guarantees about how the run behaves: it comes back in time, acts on faults alone, and finishes."""

import statistics
from collections.abc import Iterator

from chaos.history import Entry, History
from chaos.judge.guarantee import Guarantee
from chaos.judge.terms import Terms
from chaos.verdict import Outcome, Verdict
from orchestrator.observe.restarts import Restarts

RECOVERY_IN_TIME = Guarantee(
    name="bounded recovery time",
    promise="after a failure all ranks train again within the time limit",
    broken_as=Outcome.UNRECOVERED,
)
NO_FALSE_ALARMS = Guarantee(
    name="false alarms zero",
    promise="nothing is ended, set aside or left out unless something was wrong with it",
)
LIVENESS = Guarantee(
    name="liveness",
    promise="once the faults stop, the run finishes all of its steps",
    broken_as=Outcome.UNRECOVERED,
)
AFTERMATH_SECONDS = 30.0
"""How long after a fault it may still end a generation: a silent agent is given 20 s, a rank that hangs two windows."""


def recovery_in_time(history: History, terms: Terms) -> Verdict:
    """Restarts that were completed, each from the last fault in it: kills during a recovery begin another one."""
    restarts = Restarts()
    seconds, violations = [], []
    failed_at: float | None = None
    for entry in history.ledger:
        if entry["kind"] == "failure" and not restarts.under_way:
            failed_at = float(entry["failed_at"])
        done = restarts.take(entry)
        if done is None or failed_at is None:
            continue
        end = failed_at + done.seconds
        last_fault = max((time for time in _fault_times(history) if failed_at <= time <= end), default=failed_at)
        seconds.append(end - last_fault)
        if seconds[-1] > terms.recovery_seconds_max:
            violations.append(
                f"generation {entry['generation']} trained {seconds[-1]:.1f} s after the last fault before it, and "
                f"{terms.recovery_seconds_max:g} s are allowed (ledger {entry['seq']})"
            )
    seen = f"{len(seconds)} restarts"
    if seconds:
        seen += f", median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
    return RECOVERY_IN_TIME.judged(
        violations,
        seen,
        restarts=len(seconds),
        recovery_seconds_median=statistics.median(seconds) if seconds else None,
        recovery_seconds_max=max(seconds, default=None),
    )


def _fault_times(history: History) -> Iterator[float]:
    """When faults struck, and when those that last were taken away."""
    for fault in history.faults:
        yield fault["at"]
        yield fault["until"]


def no_false_alarms(history: History, terms: Terms) -> Verdict:
    """Each failure, quarantine, dropped set in memory, odd rank and excluded node follows a fault that explains it."""
    violations, alarms = [], 0
    damaged_at = min((f["at"] for f in history.faults if f["context"].get("damage")), default=float("inf"))
    began_at = 0.0
    for entry in history.ledger:
        match entry["kind"]:
            case "generation":
                began_at = float(entry["at"])
            case "failure":
                alarms += 1
                noticed_at = float(entry["noticed_at"] or entry["at"])
                explained = _struck(history, noticed_at)
                if entry["cause"] == "agent_lost":
                    # That is known once Ray has put another in its place, which a busy machine takes long for.
                    since = began_at - AFTERMATH_SECONDS
                    explained = explained or any(since <= fault["at"] <= noticed_at for fault in history.faults)
                if entry["restore_failed"] is not None or entry["cause"] == "corruption":
                    explained = explained or damaged_at <= noticed_at
                if not explained:
                    violations.append(_alarm(entry, f"generation {entry['generation']} was ended ({entry['cause']})"))
            case "quarantine":
                alarms += 1
                name = entry["checkpoint"]
                gone = name not in {record.name for record in history.committed}
                if not history.touched(name, by=entry["at"]) and not gone and not history.problems(name):
                    violations.append(_alarm(entry, f"{name} was set aside, and every byte of it is as committed"))
            case "memory_dropped" | "node_excluded" as kind:
                alarms += 1
                if damaged_at > entry["at"] and not _struck(history, entry["at"]):
                    violations.append(_alarm(entry, kind.replace("_", " ")))
    return NO_FALSE_ALARMS.judged(
        violations, f"{alarms} alarms, each after one of {len(history.faults)} faults", alarms=alarms
    )


def _struck(history: History, at: float) -> bool:
    """Whether a fault was there at that time, or not long before."""
    return any(fault["at"] <= at <= fault["until"] + AFTERMATH_SECONDS for fault in history.faults)


def _alarm(entry: Entry, what: str) -> str:
    return f"{what}, and no fault explains it (ledger {entry['seq']})"


def liveness(history: History, terms: Terms) -> Verdict:
    """The ledger's last word is that the loop has returned on all ranks, after the steps it was asked for."""
    violations = []
    ends = [entry for entry in history.ledger if entry["kind"] in ("finished", "stopped")]
    last = ends[-1] if ends else None
    if last is None:
        newest = history.ledger[-1]["seq"] if history.ledger else 0
        violations.append(f"the run never ended: the ledger stops at {newest}")
    elif last["kind"] == "stopped":
        reason = str(last["reason"]).strip().splitlines()[-1]
        violations.append(f"the run was stopped: {reason} (ledger {last['seq']})")
    elif terms.steps is not None and last["step"] < terms.steps:
        violations.append(f"the run ended after step {last['step']} of {terms.steps} (ledger {last['seq']})")
    step = last["step"] if last is not None and last["kind"] == "finished" else None
    return LIVENESS.judged(violations, f"finished after step {step}, {len(history.faults)} faults", step=step)
