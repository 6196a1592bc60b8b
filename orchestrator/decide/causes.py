"""Why generations end, and what each kind of cause says about the run itself. Pure."""

import signal

CAUSES = (
    "exception",
    "exit",
    "signal",
    "oom",
    "agent_lost",
    "rank_lost",
    "hang",
    "loss",
    "corruption",
    "drain",
    "controller",
    "unknown",
    "restore_failed",
)
"""All kinds of causes; each has a budget of its own, and `RecoveryConfig.max_failures` may name it."""

UNCHARGED = frozenset({"drain", "controller"})
"""Causes that cost nothing: it was announced and nothing failed, or decide/rounds.py has a budget for it."""

MACHINE_CAUSES = frozenset({"signal", "hang", "agent_lost", "oom", "corruption"})
"""Causes that may lie in the machine that the first rank ran on."""

LOOP_CAUSES = frozenset({"exception", "exit"})
"""Causes that lie in the training loop: it raised, or ended its process."""

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP}
)
_REPEATABLE = LOOP_CAUSES | {"hang", "loss", "corruption"}


def repeatable(cause: str, exit_code: int | None) -> bool:
    """Whether the code or the restored state may be to blame, so that an exact restore may do the same again.

    Not so for lost machines and processes, for memory that ran out, and for signals that somebody sent.
    """
    if cause == "signal":
        return exit_code is not None and -exit_code in _CRASH_SIGNALS
    return cause in _REPEATABLE
