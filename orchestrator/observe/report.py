"""The report on a run that was stopped: for the person who has to mend it.

what failed    the first cause, where and when, what else went down with it
how often      the run's failures by cause and step
last lines     of the first rank to die
checkpoint     what another fit() would restore
what to try    by cause
"""

import logging
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workers.checkpoint.store import LocalStore

logger = logging.getLogger("lastgood")

_TABLE_ROWS_MAX = 12
_PLACES_MAX = 8
_ERROR_LOG_LINES_MAX = 15

_ADVICE: Mapping[str, str] = {
    "exception": "Correct the training loop where the traceback points, and call fit() again: it goes on from the "
    "checkpoint below.",
    "exit": "Something ended the process with an exit code: look for exit(), os._exit() or a launcher in the loop and "
    "in the libraries that it uses.",
    "signal": "A crash signal comes from native code: look at the stacks above and try the step with one rank; a KILL "
    "or TERM was sent by somebody: ask the operator, the batch system and the kernel log.",
    "oom": "Give the rank more memory, or use less: a smaller batch, fewer loader workers or less prefetching, fewer "
    "RecoveryConfig.snapshot_slots.",
    "agent_lost": "Ray lost the worker or its node: look at `ray status`, the node's health and its network.",
    "rank_lost": "The process vanished without a word, mostly with its node: look at the node's kernel log.",
    "hang": "The stacks say where each thread waits. If it only takes long, declare it as a phase with its timeout.",
    "loss": "Lower the learning rate or clip gradients; look at the data of the steps that the ledger names.",
    "corruption": "The named rank computed other bits than its peers: test that machine's memory and accelerator "
    "before it is used again.",
    "unknown": "No rank said why it ended: look at Ray's logs of the workers.",
    "restore_failed": "Checkpoints cannot be read as they were written: look at the storage, then run "
    "`lastgood checkpoints verify` on the run directory.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """`failure`: the ledger's entry. `ending`: how the first rank ended, in words. `log`: its last lines. `pid`: 0 if
    no process is known. `checkpoint`: what would be restored next, None if nothing is saved."""

    run_dir: str
    reason: str
    failure: Mapping[str, Any]
    ending: str
    traceback: str | None
    pid: int
    log: Sequence[str]
    checkpoint: str | None
    suspects: Mapping[str, str]

    def text(self, entries: Iterable[Mapping[str, Any]]) -> str:
        """The whole report; `entries` are the ledger's."""
        entries = list(entries)
        parts = [
            ("", f"The run in {self.run_dir} was stopped because {self.reason}."),
            ("what failed", "\n".join(self._what(entries))),
            ("traceback", self.traceback.rstrip() if self.traceback else ""),
            ("how often", "\n".join(_table(entries))),
            (f"last lines of rank {self.failure['rank']}", "\n".join(self.log) or "none were found; see Ray's logs"),
            ("checkpoint", "\n".join(self._checkpoint())),
            ("what to try", advice(self.failure)),
        ]
        return "\n\n".join(f"{f'## {title}{chr(10)}' if title else ''}{body}" for title, body in parts if body) + "\n"

    def error(self, path: str | None) -> str:
        """What fit() raises: the user's own traceback first; the last line is the verdict, and where to read more."""
        failure = self.failure
        who = f"rank {failure['rank']} ended with" if failure["rank"] >= 0 else "no single rank is to blame for"
        what = f"{who} {self.ending} after step {max(failure['step'], 0)}"
        report = f" The report: {path}" if path else ""
        lines = [
            *([self.traceback.rstrip(), ""] if self.traceback else self.log[-_ERROR_LOG_LINES_MAX:]),
            *self._places(),
            *self._checkpoint(),
            *([f"What to try: {tip}"] if (tip := advice(failure)) else []),
            f"The run was stopped because {self.reason}; first cause: {what}.{report}",
        ]
        return "\n".join(lines)

    def write(self, entries: Iterable[Mapping[str, Any]], driver: str) -> str | None:
        """Write the report into the run directory, under a new name; its path, None if the storage refuses.

        `entries` may be read from there as well.
        """
        name = f"report-g{self.failure['generation']:04d}-{driver}.txt"
        text = self.text(())
        try:
            text = self.text(entries)
            LocalStore(Path(self.run_dir)).write_atomic(name, text.encode())
        except OSError as error:
            logger.error("lastgood: the report could not be written (%s):\n%s", error, text)
            return None
        return str(Path(self.run_dir) / name)

    def _what(self, entries: Sequence[Mapping[str, Any]]) -> Iterable[str]:
        failure = self.failure
        rank = failure["rank"]
        node = next((e["node"] for e in reversed(entries) if e["kind"] == "agent" and e["rank"] == rank), "unknown")
        who = f"rank {rank} (pid {self.pid or 'unknown'}, node {node})" if rank >= 0 else "no single rank"
        yield f"first cause: {failure['cause']}: {who} ended with {self.ending}"
        yield f"where: generation {failure['generation']}, after step {max(failure['step'], 0)}"
        yield f"when: {datetime.fromtimestamp(failure['failed_at'], UTC).isoformat(timespec='milliseconds')}"
        for name, value in sorted(failure["detail"].items()):
            yield f"{name}: {value}"
        if failure["restore_failed"]:
            yield f"restore: {failure['restore_failed']}"
        for echo in failure["echoes"]:
            yield f"with it went rank {echo['rank']}: {echo['cause']}, {_code(echo['exit_code'])}"

    def _places(self) -> Iterable[str]:
        """Where ranks stood when they were taken to hang; those to blame first."""
        detail = self.failure["detail"]
        to_blame = {str(rank) for rank in detail.get("ranks", ())}
        places = sorted(detail.get("where", {}).items(), key=lambda place: place[0] not in to_blame)
        for rank, place in places[:_PLACES_MAX]:
            stacks = detail.get("stacks", {}).get(rank)
            yield f"Rank {rank} was at {place or 'an unknown place'}{f'; all its stacks: {stacks}' if stacks else ''}"

    def _checkpoint(self) -> Iterable[str]:
        if self.checkpoint:
            yield f"Another fit() would go on from {self.checkpoint}."
        else:
            yield "Nothing is saved: another fit() would begin from the start."
        for name, why in self.suspects.items():
            yield f"{name} is {why}."


def advice(failure: Mapping[str, Any]) -> str:
    """What to try, by the cause of a failure; a sentence or two."""
    return _ADVICE["restore_failed" if failure["restore_failed"] else failure["cause"]] if _known(failure) else ""


def _known(failure: Mapping[str, Any]) -> bool:
    return bool(failure["restore_failed"]) or failure["cause"] in _ADVICE


def _table(entries: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Failures by cause and step, most frequent first."""
    counts = Counter((e["cause"], e["rank"], max(e["step"], 0)) for e in entries if e["kind"] == "failure")
    for (cause, rank, step), count in counts.most_common(_TABLE_ROWS_MAX):
        yield f"{count:>4} x {cause} of rank {rank} after step {step}"
    if len(counts) > _TABLE_ROWS_MAX:
        yield f"and {len(counts) - _TABLE_ROWS_MAX} others; see the ledger"


def _code(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"
