"""Whether a run is well: protected, and getting on. Pure; what /healthz answers."""

from dataclasses import dataclass

from orchestrator.observe.accounting import Accounting
from orchestrator.observe.live import Live
from orchestrator.observe.summary import Summary

STILL_SECONDS_MIN = 60.0
STILL_STEPS = 20
FAILURES_WITHOUT_PROGRESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`start_seconds_max`: how long a start or a restart may take, as RecoveryConfig has it. `since`: Unix time from
    which the coordinator can tell."""

    start_seconds_max: float
    since: float


def problems(summary: Summary, live: Live, patience: Patience, now: float) -> list[str]:
    """What is wrong, in words; nothing for a run that is well, or has finished."""
    accounting: Accounting = summary.accounting
    state = accounting.state
    if state == "finished":
        return []
    if state == "stopped":
        reason = (summary.stop_reason or "another driver took it over").splitlines()
        return [f"the run was stopped: {reason[-1] if reason else ''}"]
    found = []
    if summary.unprotected_since is not None:
        found.append(f"unprotected: saves fail, and nothing was saved for {now - summary.unprotected_since:.0f} s")
    if (failures := accounting.failures_without_progress) >= FAILURES_WITHOUT_PROGRESS:
        found.append(f"no progress: {failures} failures since step {accounting.step} was done, which is not done again")
    still = now - max(patience.since, live.stepped_at or accounting.stepped_at or 0.0)
    if state == "training":
        step_seconds = live.step_seconds()
        limit = max(STILL_SECONDS_MIN, live.allowance_seconds, STILL_STEPS * step_seconds[-1] if step_seconds else 0.0)
    else:
        limit = patience.start_seconds_max
    if still > limit:
        found.append(f"no progress: no step was finished for {still:.0f} s, the run is {state}")
    return found
