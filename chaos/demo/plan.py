"""What the demo does to a run: a pure function of the seed, so that the same seed attacks in the same way."""

import random
from dataclasses import dataclass

from workers.failpoint import Arm

HALF_WRITTEN_BY_KEEPER = "persist.block"
HALF_COPIED_BY_RANK = "snapshot.copy"

# The places in the save of one rank's shard. The two above are passed once for each block or tensor: there the kill
# comes half way.
SAVE_POINTS = (
    "snapshot.begin",
    HALF_COPIED_BY_RANK,
    "snapshot.complete",
    "persist.create",
    HALF_WRITTEN_BY_KEEPER,
    "persist.fsync",
    "persist.rename",
    "persist.dir_fsync",
    "persist.readback",
    "persist.receipt",
)
RANDOM_MOMENT = "random moment"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKill:
    """Kill `rank` once the run has finished `step` steps, after that fraction of one more step."""

    rank: int
    step: int
    step_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackPlan:
    """Kills inside saves (armed fault points), and one from outside at a random moment."""

    inside_saves: tuple[Arm, ...]
    random_kill: RandomKill

    @property
    def kills(self) -> int:
        """How many ranks die in all."""
        return len(self.inside_saves) + 1


def plan_attack(*, seed: int, steps: int, workers: int, kill_at: str | None = None) -> AttackPlan:
    """Plan the kills: inside a save at 40% of the run, at a random moment around 60%, inside another save at 75%.

    With `kill_at`, only that fault point is used, once.
    """
    rng = random.Random(seed)
    points = [HALF_WRITTEN_BY_KEEPER, HALF_COPIED_BY_RANK]
    rng.shuffle(points)
    victims = [1, rng.randrange(workers)]
    if kill_at is not None:
        points, victims = [kill_at], victims[:1]
    arms = tuple(
        Arm(
            id=f"kill-{number}-{point}",
            point=point,
            action="kill_rank",
            when={"rank": victim, "step_min": int(steps * share)} | _half_way(point),
        )
        for number, point, victim, share in zip((1, 3), points, victims, (0.4, 0.75), strict=False)
    )
    return AttackPlan(
        inside_saves=arms,
        random_kill=RandomKill(
            rank=rng.choice([rank for rank in range(workers) if rank != victims[0]]),
            step=rng.randint(int(steps * 0.55), int(steps * 0.65)),
            step_fraction=rng.random(),
        ),
    )


def _half_way(point: str) -> dict[str, float]:
    return {"index_fraction": 0.5} if point in (HALF_WRITTEN_BY_KEEPER, HALF_COPIED_BY_RANK) else {}
