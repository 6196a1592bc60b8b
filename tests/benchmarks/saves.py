"""What a save costs: lastgood beside other ways to save, and beside floors, of the same state in one run.

    python tests/benchmarks/saves.py [--rounds 5] [--state-mib 512] [--only lastgood,floor-copy] [--json [FILE]]
    python tests/benchmarks/saves.py --saves 200        (instead: whether memory stays flat over so many saves)

Two ranks train an FSDP2 model with AdamW through gloo, one thread each. The arms of a sitting are all there at once,
and wait while one is measured: round by round, so that noise hits all alike. Peers and floors share a pair of ranks of
plain torch; each way to run lastgood is a supervised run of its own, on one local Ray. Others than the default way have
a second sitting, with floors of its own, since memory has no room for all. Peers come with pip install --editable
'.[bench]'.

Columns, medians and (least..most) over the rounds:
stall         the loop stands still
durable       until all bytes are on the device, if the arm fsyncs; until it says that it is done, if not
verified      until all were read back, compared and committed
slow-down     what the steps in flight take beyond the median of those right before
overhead      stall and slow-down
memory        the most that all ranks and helpers used in the first save, which counts for nothing else, beyond the most
              in the steps before it; the proportional set size, so shared pages count once
cold          a restore into the model and optimizer that are there, with the files dropped from the page cache before
              (fsync, then posix_fadvise DONTNEED)
warm          the same from the page cache
from memory   the same by fresh ranks that follow a killed one, from the snapshots that the keeper held
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import saves_table
from saves_floors import floors, floors_again
from saves_lastgood import SLOTS, WAYS, LastgoodGroup
from saves_peers import peers
from saves_ranks import Group, PlainGroup, RanksFailed, pss_bytes, with_peak
from saves_table import Results

RANKS = 2
RESTORE_ROUNDS = 3
RESTARTED = "lastgood"
RESTARTS = 3
STEPS_WEIGHED = 8
READ_BYTES = 8 << 20
PLAIN = {arm.name: arm for arm in (*peers(), *floors(), *floors_again())}
SITTINGS = (
    ["lastgood", *(arm.name for arm in (*peers(), *floors()))],
    ["lastgood-unverified", "lastgood-synchronous", *(arm.name for arm in floors_again())],
)


class Bench:
    """The arms that still run, their ranks, and what was found."""

    def __init__(self, scratch: Path, directory: Path, state_mib: int, arms: list[str]) -> None:
        """`scratch`: for sockets, whose paths are short. `directory`: for what is saved."""
        self._scratch = scratch
        self._directory = directory
        self._state_mib = state_mib
        self._groups: dict[str, Group] = {}
        self._saved: dict[str, Path] = {}
        self._warm: set[str] = set()
        self.results: dict[str, Results] = {}
        self.state_bytes = 0
        for name in arms:
            self.results[name] = Results(name, PLAIN[name].fsyncs if name in PLAIN else True)

    def running(self, sitting: list[str], rotation: int = 0) -> list[str]:
        """Each round begins with another one, so that none always follows the same."""
        names = [name for name in sitting if name in self.results and self.results[name].problem is None]
        start = rotation % max(1, len(names))
        return names[start:] + names[:start]

    def attempt(self, name: str, action: Callable[[str], None]) -> None:
        """One measurement; an arm that fails is left out from then on, and ranks that it broke are replaced."""
        try:
            action(name)
        except RanksFailed as failure:
            self.results[name].problem = str(failure)
            print(f"{name}: {failure}", file=sys.stderr)
            if failure.broken and (group := self._groups.pop(self._group_name(name), None)) is not None:
                group.close()
                self._warm -= {other for other in self._warm if self._group_name(other) == self._group_name(name)}

    def first_save(self, name: str) -> None:
        group = self._group(name)
        group.ranks.ask(do="prepare", arm=name)
        pids = group.pids()
        before = with_peak(pids, lambda: group.ranks.ask(do="train", arm=name, steps=STEPS_WEIGHED))
        peak = with_peak(pids, lambda: self._save(name))
        self.results[name].values["memory"] = [peak - before]
        self._warm.add(name)

    def timed_save(self, name: str) -> None:
        if name not in self._warm:  # its ranks are new
            self.first_save(name)
        flight = self._save(name)
        result, group = self.results[name], self._group(name)
        for column in ("stall", "slowdown", "total", "baseline"):
            result.add(column, flight[column])
        if isinstance(group, LastgoodGroup):
            entry = group.committed(flight["began_at"])
            verify_seconds = entry["verify_seconds"] or 0.0
            result.add("durable", entry["at"] - verify_seconds - flight["began_at"])
            if group.verifies:
                result.add("verified", entry["at"] - flight["began_at"])
        else:
            result.add("durable", flight["ended"])

    def restore(self, name: str) -> None:
        if name not in self._warm:
            self.first_save(name)
        ranks, directory = self._group(name).ranks, self._saved[name]
        kinds = PLAIN[name].restores if name in PLAIN else ("cold", "warm")
        for kind in kinds:
            prepare_cache(directory, kind)
            seconds = ranks.ask(do="restore", arm=name, directory=str(directory))
            self.results[name].add(f"restore_{kind}", max(seconds))

    def restart(self, name: str) -> None:
        group = self._group(name)
        assert isinstance(group, LastgoodGroup)
        self._save(name)
        seconds = group.restart()
        if seconds is not None:
            self.results[name].add("restore_memory", seconds)

    def save_and_weigh(self, name: str) -> None:
        self._save(name)
        self.results[name].add("memory_held", pss_bytes(self._group(name).pids()))

    def memory_bytes(self) -> int:
        return sum(pss_bytes(group.pids()) for group in self._groups.values())

    def close(self) -> None:
        """End all ranks, and delete what they saved."""
        while self._groups:
            self._groups.popitem()[1].close()
        while self._saved:
            shutil.rmtree(self._saved.popitem()[1], ignore_errors=True)
        self._warm.clear()

    def _save(self, name: str) -> dict[str, float]:
        group = self._group(name)
        self.state_bytes = group.ranks.state_bytes
        if not isinstance(group, LastgoodGroup):  # lastgood deletes its own
            shutil.rmtree(self._saved.pop(name, self._directory / "none"), ignore_errors=True)
            self._saved[name] = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._directory))
        os.sync()
        answers = group.ranks.ask(do="save", arm=name, directory=str(self._saved.get(name, "")))
        flight = saves_table.slowest(answers)
        if isinstance(group, LastgoodGroup):
            self._saved[name] = group.run_dir / "checkpoints" / group.committed(flight["began_at"])["checkpoint"]
        return flight

    def _group(self, name: str) -> Group:
        key = self._group_name(name)
        if key not in self._groups:
            print(f"starting ranks for {key}", file=sys.stderr)
            if key in WAYS:
                self._groups[key] = LastgoodGroup(key, self._scratch, self._directory, self._state_mib, RANKS)
            else:
                self._groups[key] = PlainGroup(self._scratch, self._state_mib, RANKS)
        return self._groups[key]

    def _group_name(self, name: str) -> str:
        return name if name in WAYS else "plain"


def prepare_cache(directory: Path, kind: str) -> None:
    """Have the files below in the page cache, or not at all."""
    for file in (path for path in directory.rglob("*") if path.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            if kind == "cold":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, READ_BYTES):
                    pass
        finally:
            os.close(fd)


def sit(bench: Bench, sitting: list[str], rounds: int) -> None:
    for name in bench.running(sitting):
        bench.attempt(name, bench.first_save)
    print(f"all of these together use {bench.memory_bytes() / saves_table.MIB:,.0f} MiB", file=sys.stderr)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name in bench.running(sitting, number):
            bench.attempt(name, bench.timed_save)
    for number in range(min(rounds, RESTORE_ROUNDS)):
        print(f"restores {number + 1} of {min(rounds, RESTORE_ROUNDS)}", file=sys.stderr)
        for name in bench.running(sitting, number):
            bench.attempt(name, bench.restore)
    for _ in range(min(rounds, RESTARTS)):
        for name in bench.running([name for name in sitting if name == RESTARTED]):
            bench.attempt(name, bench.restart)


def compare(bench: Bench, rounds: int) -> list[saves_table.Goal]:
    for sitting in SITTINGS:
        sit(bench, sitting, rounds)
        bench.close()
    return saves_table.goals(bench.results, slots_bytes=RANKS * SLOTS * bench.state_bytes, ranks=RANKS)


def stay_flat(bench: Bench, saves: int) -> list[saves_table.Goal]:
    bench.attempt("lastgood", bench.first_save)
    for _ in range(saves):
        if bench.running(["lastgood"]):
            bench.attempt("lastgood", bench.save_and_weigh)
    held = bench.results["lastgood"].values.get("memory_held", [])
    return [saves_table.flat_goal(held, ranks=RANKS)] if len(held) == saves else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state-mib", type=int, default=512, help="of each rank's parameters and moments, about")
    parser.add_argument("--only", help="arms, separated by commas")
    parser.add_argument("--saves", type=int, help="only look whether memory stays flat over so many saves")
    parser.add_argument("--directory", help="where to save; needs 1.2 x the state of both ranks for each arm")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="to standard output without a file")
    args = parser.parse_args()
    if args.rounds < 1 or (args.saves is not None and args.saves < 2):
        parser.error("--rounds has to be at least 1, and --saves at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that ranks and files are removed
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to standard output too
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *(path for path in sys.path if path)])
    known = [name for sitting in SITTINGS for name in sitting]
    arms = ["lastgood"] if args.saves else args.only.split(",") if args.only else known
    if unknown := set(arms) - set(known):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    with (
        tempfile.TemporaryDirectory(prefix="lg-bench-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryDirectory(prefix="lg-saves-", dir=args.directory, ignore_cleanup_errors=True) as directory,
    ):
        if WAYS.keys() & set(arms):
            cpus = RANKS * len(WAYS)  # by name: ranks that wait use none
            ray.init("local", num_cpus=cpus, _temp_dir=f"{scratch}/ray", include_dashboard=False, log_to_driver=False)
        with contextlib.closing(Bench(Path(scratch), Path(directory), args.state_mib, arms)) as bench:
            found = stay_flat(bench, args.saves) if args.saves else compare(bench, args.rounds)
        ray.shutdown()
    settings: dict[str, Any] = {"rounds": args.rounds, "ranks": RANKS, "state_bytes_a_rank": bench.state_bytes}
    if args.json:
        text = json.dumps(saves_table.as_json(bench.results, found, settings))
        if args.json == "-":
            print(text, file=out)
            return
        Path(args.json).write_text(text, encoding="utf-8")
    step = saves_table.cell([value for one in bench.results.values() for value in one.values.get("baseline", [])])
    print(f"{RANKS} ranks, {bench.state_bytes / saves_table.MIB:.0f} MiB of state each, steps of {step} s\n", file=out)
    print(saves_table.table(bench.results), file=out)
    print(f"\n{saves_table.goals_table(found)}", file=out)


if __name__ == "__main__":
    main()
