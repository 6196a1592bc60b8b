"""Ledger entries, durations and amounts in words, for people who do not know the ledger's format. Pure."""

import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from orchestrator.cli.durations import show_duration
from orchestrator.doctor.sizes import show_bytes

CAUSES: Mapping[str, str] = {
    "exception": "an exception in the training loop",
    "exit": "the process ended itself",
    "signal": "killed by a signal",
    "oom": "out of memory",
    "agent_lost": "Ray lost the worker",
    "rank_lost": "the process vanished",
    "hang": "a hang",
    "loss": "a bad loss or gradient norm",
    "corruption": "ranks computed different bits",
    "drain": "a planned move",
    "controller": "Ray Train's controller ended",
    "unknown": "unknown",
    "restore_failed": "a restore that failed",
}
SOURCES: Mapping[str, str] = {"fresh": "the start", "memory": "memory", "checkpoint": "a checkpoint"}

_TITLE_MAX = 300
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")

Said = tuple[str, str, str]
"""Tone, title, detail."""


def visible(text: str) -> str:
    """What cannot be seen, steers a terminal or turns other text around becomes a replacement character."""
    return _UNSHOWN.sub("\ufffd", text)


def duration(seconds: float) -> str:
    """As `show_duration`; less than nothing is nothing, which clocks of two machines can make of a short time."""
    return show_duration(max(0.0, seconds))


def long_duration(seconds: float) -> str:
    """With two units from a minute on: "3 h 12 min"."""
    if not math.isfinite(seconds) or seconds < 60:
        return duration(seconds)
    minutes = round(seconds / 60)
    for size, big, small_size, small in ((1440, "d", 60, "h"), (60, "h", 1, "min")):
        if minutes >= size:
            rest = (minutes % size) // small_size
            return f"{minutes // size:,} {big}" + (f" {rest} {small}" if rest else "")
    rest_seconds = round(seconds) - 60 * int(round(seconds) // 60)
    return f"{round(seconds) // 60} min" + (f" {rest_seconds} s" if rest_seconds else "")


def amount(count: float) -> str:
    return show_bytes(count)


def percent(ratio: float) -> str:
    """One digit after the point, more where it matters: 99.97 %, 0.03 %, 50.0 %."""
    percent = 100 * ratio
    near = min(abs(percent), abs(100 - percent))
    digits = 1 if near >= 1 or near == 0 else 2
    return f"{percent:.{digits}f} %"


def steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def clock_time(at: float) -> str:
    """UTC, as everywhere in lastgood."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def day_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def cause(kind: str) -> str:
    return CAUSES.get(kind, kind)


def who(rank: int) -> str:
    return f"Rank {rank}" if rank >= 0 else "No single rank"


def failure(entry: Mapping[str, Any]) -> str:
    """What struck: "rank 1: killed by a signal (SIGKILL)"."""
    detail = entry.get("detail") or {}
    code = entry.get("exit_code")
    how = detail.get("signal") or (_signal(code) if code is not None and code < 0 else None)
    if how is None and code:
        how = f"exit code {code}"
    return f"{who(entry['rank'])}: {cause(entry['cause'])}{f' ({how})' if how else ''}"


def commits(steps_in_a_row: Sequence[int], last: Mapping[str, Any]) -> tuple[str, str]:
    """Title and detail of one commit or several in a row."""
    size = amount(last["bytes"]) if "bytes" in last else ""
    took = f"safe {duration(last['commit_seconds'])} after its copy" if "commit_seconds" in last else ""
    detail = ", ".join(part for part in (size, took) if part)
    if len(steps_in_a_row) == 1:
        return f"Step {steps_in_a_row[0]:,} committed", detail
    span = f"Steps {steps_in_a_row[0]:,} to {steps_in_a_row[-1]:,} committed"
    return f"{span}, {many(len(steps_in_a_row), 'save')}", f"the last: {detail}" if detail else ""


def say(entry: Mapping[str, Any]) -> Said | None:
    """What an entry tells a person; None for those that only machines read, or that lack what would be told."""
    saying = _SAYINGS.get(entry["kind"])
    try:
        tone, title, detail = saying(entry) if saying else ("", "", "")
    except (KeyError, TypeError, ValueError):
        return None  # of another version of the format
    return (tone, cut(title, _TITLE_MAX), cut(detail)) if title else None


def cut(value: object, most: int = 2000) -> str:
    """Long texts are cut: a page is no log."""
    whole = str(value)
    return whole if len(whole) <= most else f"{whole[:most]} ... ({len(whole) - most:,} characters more in the ledger)"


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _coordinator(e: Mapping[str, Any]) -> Said:
    return ("plain", "The coordinator is back", "") if e.get("resumed") else ("plain", "A driver started", "")


def _generation(e: Mapping[str, Any]) -> Said:
    number, ranks = e["generation"], many(e["ranks"], "rank")
    source = e.get("source", "fresh")
    if source == "fresh":
        return "plain", f"Generation {number} starts fresh with {ranks}", ""
    where = f"step {e['restored_step']:,}, from {SOURCES.get(source, source)}"
    return "plain", f"Generation {number} goes on from {where}", f"{ranks}"


def _failure(e: Mapping[str, Any]) -> Said:
    told = [f"after step {max(0, e['step']):,}"]
    if e.get("error"):
        told.append(str(e["error"]))
    if e.get("restore_failed"):
        told.append(f"restoring failed: {e['restore_failed']}")
    if e.get("echoes"):
        told.append(f"{many(len(e['echoes']), 'other rank')} went down with it")
    return "bad", failure(e), "; ".join(told)


def _corruption(e: Mapping[str, Any]) -> Said:
    odd = f"rank {', '.join(map(str, e['odd']))} differs" if e["odd"] else "nobody can tell which is right"
    return (
        "bad",
        f"Step {e['step']:,} is not committed: ranks differ",
        f"{odd}; {', '.join(map(str, e['tensors'][:3]))}",
    )


def _notice(e: Mapping[str, Any]) -> Said:
    ranks = ", ".join(map(str, e["ranks"]))
    return "warn", f"A notice: ranks {ranks} will be taken away", f"{e['reason']}, node {e['node'][:8]}"


_SAYINGS: Mapping[str, Callable[[Mapping[str, Any]], Said]] = {
    "coordinator": _coordinator,
    "generation": _generation,
    "failure": _failure,
    "persist_failed": lambda e: ("warn", f"Rank {e['rank']} could not write step {e['step']:,}", str(e["error"])),
    "save_failed": lambda e: (
        "bad" if e["final"] else "warn",
        f"The save of step {e['step']:,} failed{'' if e['final'] else ', it is tried again'}",
        str(e["reason"]),
    ),
    "save_stalled": lambda e: ("warn", f"The save of step {e['step']:,} stalls", f"for {duration(e['seconds'])}"),
    "unprotected": lambda e: ("bad", f"UNPROTECTED: nothing saved for {duration(e['seconds'])}", str(e["reason"])),
    "protected_again": lambda e: ("good", "Protected again", f"after {duration(e['seconds'])}"),
    "corruption": _corruption,
    "quarantine": lambda e: ("warn", f"Set aside: {e['checkpoint']}", str(e["reason"])),
    "memory_dropped": lambda e: ("warn", f"Snapshots of step {e['step']:,} dropped", str(e["reason"])),
    "probation": lambda e: ("warn", f"On probation: {e['checkpoint']}", str(e["reason"])),
    "passed_over": lambda e: ("warn", f"Passed over: {e['checkpoint']}", str(e["reason"])),
    "suspected": lambda e: (
        "warn",
        f"Rank {', '.join(map(str, e['ranks']))} may hang",
        f"still for {duration(e['quiet_seconds'])}, the limit is {duration(e['limit_seconds'])}",
    ),
    "cleared": lambda e: ("plain", "It moves again", f"after {duration(e['quiet_seconds'])}"),
    "silent": lambda e: ("warn", f"Nothing is heard of rank {e['rank']}", f"for {duration(e['seconds'])}"),
    "straggler": lambda e: (
        "warn",
        f"Rank {e['rank']} is slow",
        f"the others wait for it {percent(e['cost_fraction'])} of the time",
    ),
    "skip": lambda e: (
        "warn",
        f"{many(len(e['batches']), 'batch', 'batches')} left out from now on",
        "after a bad loss",
    ),
    "notice": _notice,
    "node_lost": lambda e: ("bad", f"Node {e['node'][:8]} is gone", f"it had ranks {', '.join(map(str, e['ranks']))}"),
    "node_excluded": lambda e: (
        "warn",
        f"Node {e['node'][:8]} fails again and again",
        "it is left out from now on" if e["left_out"] else "the run cannot do without it",
    ),
    "nodes_taken_back": lambda e: ("warn", "Nodes that were left out are used again", ""),
    "controller": lambda e: ("warn", "Ray Train's controller ended", str(e["error"])),
    "finished": lambda e: ("good", f"Finished after step {e['step']:,}", ""),
    "fenced": lambda e: ("warn", "Another driver has taken the run over", str(e["reason"])),
    "stopped": lambda e: ("bad", "Stopped", _last_line(e["reason"])),
}


def _last_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[-1] if lines else ""
