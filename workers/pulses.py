"""What an agent tells of its running rank, twice a second: the heartbeat page and the kernel's view of the process."""

import math
import time

from workers import processes
from workers.forks import ForkedRank
from workers.messages import RankPulse

PULSE_SECONDS = 0.5


class PulseTaker:
    """Takes a rank's pulse when one is due."""

    def __init__(self) -> None:
        self._due = 0.0

    def take(self, agent: str, rank: ForkedRank) -> RankPulse | None:
        """None if it is too early, or the rank is gone."""
        now = time.monotonic()
        if now < self._due or rank.process is None:
            return None
        usage = processes.usage(rank.process.pid)
        if usage is None:
            return None
        # Paced by the last one, not by a fixed grid: a late agent must not send several at once.
        self._due = now + PULSE_SECONDS
        heartbeat = rank.heartbeat.read()
        return RankPulse(
            agent=agent,
            generation=rank.generation or 0,
            at=now,
            step=heartbeat.step,
            loss=None if math.isnan(heartbeat.loss) else heartbeat.loss,
            phase=heartbeat.phase,
            label=heartbeat.label,
            allowance_seconds=heartbeat.allowance_seconds,
            moves=heartbeat.moves,
            step_seconds=heartbeat.step_seconds,
            stepped=rank.stepped,
            sequence=heartbeat.sequence,
            tick=heartbeat.tick,
            cpu_seconds=usage.cpu_seconds,
            state=usage.state,
        )
