"""What an agent finds out about the death of its rank: its last words, and whether the kernel killed it for memory."""

import signal
from pathlib import Path

from workers import last_words
from workers.forks import ForkedRank
from workers.memory_watch import MemoryWatch
from workers.messages import RankExited, RankMemory


class PostMortem:
    """Follows one rank after the other; `rank`: the number that they all have."""

    def __init__(self, *, agent: str, rank: int, run_dir: Path) -> None:
        self._agent, self._rank, self._run_dir = agent, rank, run_dir
        self._memory = MemoryWatch()

    def follow(self, rank: ForkedRank) -> None:
        if rank.process is not None:
            self._memory.follow(rank.process)

    def look(self, rank: ForkedRank) -> RankMemory | None:
        """What the rank that is followed uses, about once a second."""
        seen = self._memory.look()
        return None if seen is None else RankMemory(agent=self._agent, generation=rank.generation or 0, memory=seen)

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
            error=rank.error,
            out_of_memory=killed_by_kernel,
            detail=detail,
        )
