"""Says loudly when saves have not come through for too long, and ends the run if it was told to.

The decisions are in decide/protection.py; this is the clock, the ledger and the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from orchestrator.config import RecoveryConfig
from orchestrator.decide.protection import Decision, ProtectedAgain, Protection, StopUnprotected, Unprotected
from orchestrator.observe.ledger import Ledger

logger = logging.getLogger("lastgood")


class ProtectionWatch:
    """`protected_at`: Unix time of the newest state that is safe. `over()`: whether the run has ended. `stop(message)`
    ends it."""

    def __init__(
        self,
        config: RecoveryConfig,
        ledger: Ledger,
        *,
        protected_at: float,
        over: Callable[[], bool],
        stop: Callable[[str], None],
    ) -> None:
        self._machine = Protection(
            limit_seconds=config.unprotected_seconds_max,
            stop=config.on_unprotected == "stop",
            protected_at=protected_at,
        )
        self._ledger = ledger
        self._over = over
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None

    def committed(self, snapshot_at: float) -> None:
        self._carry_out(self._machine.committed(snapshot_at))

    def save_failed(self, reason: str, *, final: bool) -> None:
        """A save that was due failed, stalls or was skipped; `final`: this one is not tried again."""
        self._carry_out(self._machine.save_failed(reason, at=time.time(), final=final))

    def _tick(self) -> None:
        self._carry_out(self._machine.tick(at=time.time()))

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        if self._over():
            return
        for decision in decisions:
            seconds = time.time() - decision.since
            match decision:
                case Unprotected():
                    self._ledger.append("unprotected", since=decision.since, seconds=seconds, reason=decision.reason)
                    logger.warning(
                        "lastgood: THE RUN IS UNPROTECTED: nothing was saved for %.0f s (%s)", seconds, decision.reason
                    )
                case ProtectedAgain():
                    self._ledger.append("protected_again", since=decision.since, seconds=seconds)
                    logger.warning("lastgood: the run is protected again, after %.0f s", seconds)
                case StopUnprotected():
                    self._stop(
                        f"nothing was saved for {seconds:.0f} s, and a last save did not come through either "
                        f"({decision.reason}); mend the storage and call fit() again, or raise "
                        f"RecoveryConfig.unprotected_seconds_max"
                    )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wakeup_at := self._machine.wakeup_at) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wakeup_at - time.time()), self._tick)
