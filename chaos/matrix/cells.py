"""What the kill matrix consists of: who is attacked, at which point, with what, and in which story.

A cell that cannot exist (no storage is asked at that point, so it cannot fail there) is listed all the same, with the
reason: nobody has to guess what was left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chaos.points import POINTS, Fault, Point
from workers.failpoint import Action, Arm

WORLD_SIZES = (2, 3)
_FAILS_AT = 5
"""The step at which the run first fails, in stories that begin with a failure: one after a save."""
_ATTACKED_SAVE = 4
ONLY_SUPERVISED = {"cadence.decide": "intervals are decided from what real agents measure: --ray"}
"""Points that the fast form never passes, and why."""


class Scenario(StrEnum):
    """SAVE: the fault is the first thing that happens. The others begin with a failure one step after a save: MEMORY:
    a rank dies, and snapshots in memory are restored. STORAGE: all processes die, and a new driver restores a
    checkpoint. DAMAGE: so do they, and meanwhile the newest checkpoint is damaged."""

    SAVE = "in a save"
    MEMORY = "restoring from memory"
    STORAGE = "restoring from storage"
    DAMAGE = "restoring past a damaged checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`victim`: "rank 1", "keeper of rank 1" or "coordinator". `impossible`: why there is no such thing, else empty."""

    world_size: int
    victim: str
    point: str
    fault: Fault
    scenario: Scenario
    impossible: str = ""

    @property
    def name(self) -> str:
        return f"{self.world_size} ranks, {self.victim}, {self.point}, {self.fault}, {self.scenario}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where each rank runs: two of them on the first node, the others on the second."""
        return tuple("n1" if rank < 2 else "n2" for rank in range(self.world_size))

    @property
    def process(self) -> str:
        """The process that passes the point."""
        return next(point.process for point in POINTS if point.name == self.point)

    @property
    def keep_last(self) -> int:
        """How many checkpoints stay: all, so that each can be judged, unless deleting is what is attacked."""
        return 2 if self.point.startswith("retention.") else 50

    @property
    def kept_min(self) -> int:
        """How many of those may be counted on: on a full disk older ones give way."""
        return 1 if self.fault is Fault.ENOSPC else self.keep_last

    @property
    def victim_rank(self) -> int | None:
        """The rank that is named in `victim`."""
        return None if self.victim == "coordinator" else int(self.victim.rpartition(" ")[2])

    @property
    def fault_id(self) -> str:
        """What its record is called: "host" is the host's cue to kill a rank from outside."""
        return "host" if self.process == "coordinator" and self.victim != "coordinator" else "fault"

    def arms(self, *, first: bool) -> tuple[Arm, ...]:
        """The faults to arm in the `first` driver of the run, or in its successor."""
        main = Arm(id=self.fault_id, point=self.point, action=self._action(), when=self._when())
        if self.scenario is Scenario.SAVE:
            return (main,)
        if self.scenario is Scenario.MEMORY:
            when = {"rank": self.world_size - 1, "step": _FAILS_AT}
            return (Arm(id="first", point="step.end", action="kill_self", when=when), main)
        cue = Arm(id="driver", point="step.end", action="pause", when={"rank": 0, "step": _FAILS_AT})
        return (cue,) if first else (main,)

    def _action(self) -> Action:
        if self.fault is Fault.KILL:
            if self.fault_id == "host":
                return "pause"
            return "kill_rank" if self.process == "keeper" and self.victim.startswith("rank") else "kill_self"
        actions: dict[Fault, Action] = {Fault.ENOSPC: "enospc", Fault.EIO: "eio", Fault.TORN: "torn_write"}
        return actions[self.fault]

    def _when(self) -> dict[str, Any]:
        area, _, step = self.point.partition(".")
        when: dict[str, Any] = {}
        if self.process != "coordinator":
            when["rank"] = self.victim_rank
        if area in ("snapshot", "persist", "receipt", "commit"):
            when["step_min"] = _ATTACKED_SAVE
        elif area == "step":
            when["step"] = _FAILS_AT
        elif area == "ledger":
            when["event"] = "commit"
        elif area == "rendezvous" or (area == "generation" and step != "judge"):
            when["generation_min"] = 2
        elif self.point == "restore.choose" and self.scenario is Scenario.MEMORY:
            when["reason"] = "failure"
        if self.point == "snapshot.copy":
            when["index_fraction"] = 0.5
        return when


def all_cells(world_sizes: tuple[int, ...] = WORLD_SIZES, *, supervised: bool = False) -> list[Cell]:
    """Every cell, with those that are impossible in this form."""
    return [
        cell
        for world_size in world_sizes
        for point in POINTS
        for scenario in _scenarios(point)
        for fault in Fault
        for cell in _cells(world_size, point, scenario, fault, supervised)
    ]


def _scenarios(point: Point) -> tuple[Scenario, ...]:
    if point.area == "quarantine":
        return (Scenario.DAMAGE,)
    if point.area == "restore":
        return Scenario.MEMORY, Scenario.STORAGE
    return (Scenario.MEMORY,) if point.area in ("generation", "rendezvous") else (Scenario.SAVE,)


def _cells(world_size: int, point: Point, scenario: Scenario, fault: Fault, supervised: bool) -> Iterator[Cell]:
    impossible = "" if supervised else ONLY_SUPERVISED.get(point.name, "")
    if supervised and scenario in (Scenario.STORAGE, Scenario.DAMAGE):
        impossible = "the driver dies in it, and a supervised run has one: without --ray"
    if not impossible and fault not in point.faults:
        what = {Fault.TORN: "nothing is written there", Fault.ENOSPC: "nothing there needs space"}
        impossible = what.get(fault, "no storage is asked there")
    ranks = [f"rank {rank}" for rank in range(world_size)]
    own = {
        "rank": ranks,
        "keeper": [f"keeper of {rank}" for rank in ranks],
        "coordinator": ["coordinator"],
    }[point.process]
    # Ranks are also killed while another process is at a point of its own.
    others = ranks if fault is Fault.KILL and point.process != "rank" else []
    for victim in (*own, *others):
        yield Cell(
            world_size=world_size,
            victim=victim,
            point=point.name,
            fault=fault,
            scenario=scenario,
            impossible=impossible,
        )
