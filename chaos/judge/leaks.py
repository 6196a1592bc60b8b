"""Whether many restarts leave something behind, judged from what a campaign observed while the run was on.

`observations.jsonl` has one JSON object a line: `at` (Unix seconds), `processes` (a list of `role`, `pid`,
`rss_bytes`, `descriptors` and `memfds` of the run's lasting processes) and `descendants` (how many processes they and
their children are); a last one, with `after` true, has `left` (processes of the run that are still there after its
end), `shm_left_bytes` (what /dev/shm has more of than before the run) and `files_left` (what the run's processes left
in the run's temporary directory on the node).
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from chaos.history import History
from chaos.judge.guarantee import Guarantee
from chaos.judge.terms import Terms
from chaos.verdict import Verdict

OBSERVATIONS_FILE = "observations.jsonl"
NO_LEAKS = Guarantee(
    name="no leaks",
    promise="restarts leave no process, no open or temporary file, no shared memory and no growing process behind",
)
_AGES_MIN = 6
"""Looks at one process until growth means anything."""
_SETTLING = 2
"""The first looks at a process: it is still handed what it is to hold."""
_RSS_GROWTH_BYTES_MAX = 48 << 20
_DESCRIPTORS_GROWTH_MAX = 16
_MEMFDS_GROWTH_MAX = 8
_PROCESSES_GROWTH_MAX = 6
_SHM_LEFT_BYTES_MAX = 1 << 20


def no_leaks(history: History, terms: Terms) -> Verdict:
    """Compares the first third of all looks with the last: whole run, and each process for as long as it lived."""
    looks = _read(history)
    if looks is None:
        return NO_LEAKS.skipped("nobody watched the run's processes; a campaign with `watch_leaks` does")
    during = [look for look in looks if not look.get("after")]
    ends = [look for look in looks if look.get("after")]
    violations = [*_growth_of_run(during), *_growth_of_processes(during)]
    for end in ends:
        if end["left"]:
            violations.append(f"processes {end['left']} are still there after the end ({OBSERVATIONS_FILE}, last line)")
        if end["shm_left_bytes"] > _SHM_LEFT_BYTES_MAX:
            size = f"{end['shm_left_bytes'] / 2**20:.1f} MiB"
            violations.append(f"/dev/shm has {size} more than before the run ({OBSERVATIONS_FILE}, last line)")
        if end.get("files_left"):
            violations.append(f"temporary files {end['files_left']} are left ({OBSERVATIONS_FILE}, last line)")
    rss = [sum(process["rss_bytes"] for process in look["processes"]) for look in during]
    return NO_LEAKS.judged(
        violations,
        f"{len(during)} looks"
        + (f", {_early(rss) / 2**20:.0f} MiB early and {_late(rss) / 2**20:.0f} MiB late" if len(rss) >= 3 else ""),
        looks=len(during),
        looked_after_end=bool(ends),
    )


def _growth_of_run(looks: Sequence[dict[str, Any]]) -> list[str]:
    if len(looks) < _AGES_MIN:
        return []
    counts = [look["descendants"] for look in looks]
    early, late = _early(counts), _late(counts)
    if late > early + _PROCESSES_GROWTH_MAX:
        return [f"the run had {early:.0f} processes at first and {late:.0f} at last"]
    return []


def _growth_of_processes(looks: Sequence[dict[str, Any]]) -> list[str]:
    by_pid: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for look in looks:
        for process in look["processes"]:
            by_pid[process["role"], process["pid"]].append(process)
    found = []
    for (role, pid), whole in by_pid.items():
        # A keeper holds nothing until ranks have made their slots: long, where Ray's workers are replaced.
        first = next((number for number, look in enumerate(whole) if look["memfds"]), 0)
        history = whole[first + _SETTLING :]
        if len(history) < _AGES_MIN:
            continue
        for what, most, unit in (
            ("rss_bytes", _RSS_GROWTH_BYTES_MAX, "bytes of memory"),
            ("descriptors", _DESCRIPTORS_GROWTH_MAX, "open files"),
            ("memfds", _MEMFDS_GROWTH_MAX, "memory files"),
        ):
            values = [process[what] for process in history]
            if _late(values) > _early(values) + most:
                found.append(f"{role} (pid {pid}) went from {_early(values):.0f} to {_late(values):.0f} {unit}")
    return found


def _early(values: Sequence[float]) -> float:
    return statistics.median(values[: max(1, len(values) // 3)])


def _late(values: Sequence[float]) -> float:
    return statistics.median(values[-max(1, len(values) // 3) :])


def _read(history: History) -> list[dict[str, Any]] | None:
    try:
        lines = (history.run_dir / OBSERVATIONS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    return [json.loads(line) for line in lines]
