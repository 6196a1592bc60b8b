"""The process groups of a run's ranks on one node, recorded so that somebody can end them when everyone else is dead.

The record lies in a node-local directory and names each group by its leader's pid and start time. A new driver of the
same run kills the groups that earlier drivers recorded, then waits until the last process that inherited their locks
is gone.
"""

import json
import os
import time
from pathlib import Path

from workers import processes
from workers.processes import ProcessId

_POLL_SECONDS = 0.05


class GroupRecord:
    def __init__(self, run: str, driver: str, node: str) -> None:
        self._dir = processes.node_dir(run)
        self._driver = driver
        self._path = self._dir / f"{driver}-{node}.groups"  # several of Ray's nodes may share a machine
        self._groups: dict[int, tuple[ProcessId, int]] = {}
        for leader, generation in _read(self._path):
            self._groups[leader.pid] = (leader, generation)

    def record(self, leader_pid: int, generation: int) -> None:
        leader = processes.identify(leader_pid)
        if leader is not None:
            self._groups[leader_pid] = (leader, generation)
            self._write()

    def kill_up_to(self, generation: int | None) -> None:
        """Kill what is left of the groups of that generation and older ones (None: of all), and forget them."""
        for pid, (leader, recorded) in list(self._groups.items()):
            if generation is None or recorded <= generation:
                processes.kill_leftover_group(leader)
                del self._groups[pid]
        processes.remove_temporary_dirs(self._dir)
        self._write()

    def end_predecessors(self, timeout_seconds: float) -> list[int]:
        """End what earlier drivers left on this node; the pids of those that would not go in time.

        Only ranks that nobody looks after any more are killed: an agent that lives still serves its driver, which Ray
        has either killed, so that the agent is about to go, or which is at work, and is not to be disturbed.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            locks = [path for path in self._dir.glob("*.lock") if path.stem != self._driver]
            holders = {pid for path in locks for pid in processes.lock_holders(path)}
            records = [path for path in self._dir.glob("*.groups") if not path.stem.startswith(self._driver)]
            leaders = [leader for path in records for leader, _ in _read(path)]
            if holders <= {member.pid for leader in leaders for member in processes.group_members(leader.pid)}:
                for leader in leaders:
                    processes.kill_leftover_group(leader)
                if not holders:
                    processes.remove_temporary_dirs(self._dir)
                    for path in records:
                        path.unlink(missing_ok=True)
                    return []
            if time.monotonic() > deadline:
                return sorted(holders)
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        """Remove this driver's records; the directory too once it is empty."""
        self._path.unlink(missing_ok=True)
        (self._dir / f"{self._driver}.lock").unlink(missing_ok=True)
        processes.remove_temporary_dirs(self._dir)
        processes.remove_node_dir(self._dir)

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        lines = [
            json.dumps([leader.pid, leader.start_ticks, generation]) for leader, generation in self._groups.values()
        ]
        temporary.write_text("\n".join(lines), encoding="utf-8")
        os.replace(temporary, self._path)


def _read(path: Path) -> list[tuple[ProcessId, int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [
        (ProcessId(pid=pid, start_ticks=ticks), generation) for pid, ticks, generation in map(json.loads, lines) if pid
    ]
