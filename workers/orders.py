"""What a rank is told when its generation starts: plain values that travel as JSON."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workers.failpoint import Arm
from workers.messages import RestoreOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The part of the run's configuration that ranks need; the same in every generation.

    `checkpoint_storage`: see workers.checkpoint.place. `save_every_steps`: after how many steps a checkpoint is saved,
    if that is fixed. `code`: names the version of the user's code, a part of the run's identity.
    `replicate_snapshots`: other nodes keep copies of snapshots. `skips_bad_batches`: after a bad loss the run goes on
    without the batches that it came from. `loss_spike_factor`: see workers.loss_guard.
    """

    run: str
    run_dir: Path
    checkpoint_storage: str | None
    save_every_steps: int | None
    save_at_end: bool
    snapshot_slots: int
    memory_fraction_max: float
    save_timeout_seconds: float
    collective_timeout_seconds: float
    record_samples: bool
    check_replicas: bool
    replicate_snapshots: bool = False
    skips_bad_batches: bool = False
    loss_spike_factor: float | None = None
    code: str | None = None
    volatile: tuple[str, ...] = ()
    failpoints: tuple[Arm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrders(LoopSettings):
    """`skip`: the global batches that are to be passed over, as (epoch, batch). `snapshot_every_steps`: after how many
    steps a snapshot is taken that stays in memory; None for none but saves. `tuned_save_every_steps`: after how many
    steps a checkpoint is saved, if that is not fixed. Both may change, by a notice."""

    generation: int
    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    threads: int
    store_host: str
    store_port: int
    keeper_address: str
    restore: RestoreOrder | None = field(default=None)
    snapshot_every_steps: int | None = None
    tuned_save_every_steps: int | None = None
    skip: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "run_dir": str(self.run_dir)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RankOrders":
        return cls(
            **{
                **values,
                "run_dir": Path(values["run_dir"]),
                "volatile": tuple(values["volatile"]),
                "failpoints": tuple(Arm(**arm) for arm in values["failpoints"]),
                "skip": tuple((epoch, batch) for epoch, batch in values["skip"]),
                "restore": _restore_order(values["restore"]) if values["restore"] else None,
            }
        )


def _restore_order(values: dict[str, Any]) -> RestoreOrder:
    places = tuple((host, port, tuple(ranks)) for host, port, ranks in values["places"])
    return RestoreOrder(**{**values, "places": places})
