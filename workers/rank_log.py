"""The last lines that a rank printed, for the report on why it died.

Ranks inherit their output from the agent, and Ray gives that a log file. So nothing has to pass through the agent,
which could slow a rank down or block it: when the rank is dead, its last lines are read from the end of the file.
Output that is no file (a terminal; a pipe, with Ray's log rotation) is not read.
"""

import os
import stat
from collections.abc import Sequence

LINES_MAX = 50
_BYTES_MAX = 16 * 1024
_LINE_CHARACTERS_MAX = 500
# Ray's own marks in its log files.
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


class RankLog:
    """The files behind `descriptors`, from where they ended when the rank began."""

    def __init__(self, descriptors: Sequence[int] = (1, 2)) -> None:
        self._descriptors = tuple(descriptors)
        self._ends: dict[int, int] = {}

    def rank_begins(self) -> None:
        """What was printed up to now is not the next rank's."""
        self._ends = {fd: status.st_size for fd in self._descriptors if (status := _file_status(fd)) is not None}

    def last_lines(self) -> tuple[str, ...]:
        """At most LINES_MAX lines, standard output's before standard error's; shared evenly if both have many."""
        parts = [part for fd, start in self._ends.items() if (part := _lines(fd, start))]
        share = LINES_MAX // max(1, len(parts))
        return tuple(line for part in parts for line in part[-max(share, LINES_MAX - _others(parts, part)) :])


def _others(parts: list[list[str]], part: list[str]) -> int:
    return sum(len(other) for other in parts if other is not part)


def _file_status(fd: int) -> os.stat_result | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _lines(fd: int, start: int) -> list[str]:
    """The last lines from `start` on; none if that cannot be told."""
    if _file_status(fd) is None:
        return []
    try:
        # Our descriptor may be for writing only; this opens the same file again, also after a rename.
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = max(start, end - _BYTES_MAX)
            file.seek(begin)
            lines = file.read(_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError:
        return []
    if begin > start:
        lines = lines[1:]  # cut in the middle
    return [line[:_LINE_CHARACTERS_MAX] for line in lines if not line.startswith(_MARKS)][-LINES_MAX:]
