"""What an agent sees of its rank without asking it: how far it is, what it uses, where it stands, why it ended."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workers import last_words, processes
from workers.forks import ForkedRank
from workers.memory_watch import MemoryWatch
from workers.messages import DumpStacks, RankExited, RankMemory, RankPulse, StacksDumped
from workers.processes import ProcessId
from workers.rank_log import RankLog
from workers.stacks import dump_stacks

PULSE_SECONDS = 0.5


class RankObserver:
    """Follows one rank after the other. `rank`: the number that they all have; `tell` sends an event."""

    def __init__(
        self, *, agent: str, rank: int, run_dir: Path, tell: Callable[[RankPulse | RankMemory | StacksDumped], None]
    ) -> None:
        self._agent, self._rank, self._run_dir, self._tell = agent, rank, run_dir, tell
        self._memory = MemoryWatch()
        self._log = RankLog()
        self._pulse_due = 0.0

    def rank_begins(self) -> None:
        """What was printed up to now is not the next rank's."""
        self._log.rank_begins()

    def follow(self, rank: ForkedRank) -> None:
        if rank.process is not None:
            self._memory.follow(rank.process)

    def look(self, rank: ForkedRank) -> None:
        """Tell the rank's pulse twice a second and its memory once; to be called more often than that."""
        if rank.process is None:
            return
        now = time.monotonic()
        usage = processes.usage(rank.process.pid) if now >= self._pulse_due else None
        if usage is not None:
            # Paced by the last one, not by a fixed grid: a late agent must not send several at once.
            self._pulse_due = now + PULSE_SECONDS
            self._tell(self._pulse(rank, usage, now))
        seen = self._memory.look()
        if seen is not None:
            self._tell(RankMemory(agent=self._agent, generation=rank.generation or 0, memory=seen))

    def dump_stacks(self, rank: ForkedRank, order: DumpStacks) -> None:
        """Have its stacks written down and told of; returns at once."""
        if rank.process is None or rank.generation != order.generation:
            return
        last_words_fd = os.dup(rank.last_words_fd)  # the rank may be gone and forgotten before this is done
        # On a thread of its own: it takes a while, and the storage may be what hangs.
        threading.Thread(
            target=self._dump, args=(rank.process, last_words_fd, order), name="lastgood-stacks", daemon=True
        ).start()

    def exited(self, rank: ForkedRank, *, pid: int, code: int, at: float) -> RankExited:
        """The rank that is followed has ended, and all that it sent has been read."""
        generation = rank.generation or 0
        ordered = rank.kill_ordered and code == -signal.SIGKILL  # else it was dying when the order came
        if not ordered and rank.ordered_at is not None:
            at = min(at, rank.ordered_at)  # a busy machine may take seconds to tell of a death
        killed_by_kernel = not ordered and self._memory.killed_by_kernel(code)
        detail = last_words.detail(
            rank.last_words_fd, code, run_dir=self._run_dir, generation=generation, rank=self._rank
        )
        if killed_by_kernel:
            detail["killer"] = "kernel"
        if not ordered and self._memory.seen is not None:
            detail["memory"] = self._memory.seen.to_json()
        return RankExited(
            agent=self._agent,
            generation=generation,
            pid=pid,
            exit_code=code,
            at=at,
            ordered=ordered,
            step=rank.heartbeat.read().step,
            log=self._log.last_lines(),
            error=rank.error,
            out_of_memory=killed_by_kernel,
            detail=detail,
        )

    def _pulse(self, rank: ForkedRank, usage: processes.Usage, now: float) -> RankPulse:
        heartbeat = rank.heartbeat.read()
        step_seconds: tuple[float, ...] = ()
        if rank.stepped:
            step_seconds = rank.heartbeat.step_seconds(rank.told_step, heartbeat.step)
            rank.told_step = heartbeat.step
        return RankPulse(
            agent=self._agent,
            generation=rank.generation or 0,
            at=now,
            step=heartbeat.step,
            loss=None if math.isnan(heartbeat.loss) else heartbeat.loss,
            phase=heartbeat.phase,
            label=heartbeat.label,
            allowance_seconds=heartbeat.allowance_seconds,
            moves=heartbeat.moves,
            still_seconds=now - heartbeat.moved_at,
            step_seconds=step_seconds,
            stepped=rank.stepped,
            sequence=heartbeat.sequence,
            tick=heartbeat.tick,
            cpu_seconds=usage.cpu_seconds,
            state=usage.state,
        )

    def _dump(self, process: ProcessId, last_words_fd: int, order: DumpStacks) -> None:
        file = last_words.stacks_file(order.generation, self._rank, order.name)
        self._tell(
            dump_stacks(process, last_words_fd, self._run_dir, file, agent=self._agent, generation=order.generation)
        )
