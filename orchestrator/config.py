"""How a run is to be protected."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from orchestrator.decide.bad_loss import Policy
from orchestrator.decide.budget import limits_problem
from orchestrator.decide.failure_rate import FAILURES_PER_NODE_DAY
from workers.checkpoint.place import url_problem
from workers.errors import CallerError
from workers.failpoint import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Raises CallerError, naming the field, for a value that cannot work.

    cadence: when checkpoints are saved: "auto" as often as pays, from the stall and the failure rate that the run has
    shown; a number: after every so many steps; None saves the last step only.
    save_overhead_max: the part of the training time that these saves may take with "auto", their stall and what slows
    steps meanwhile; 0 to 1, None for as much as pays.
    snapshot_every_steps: between saves, a snapshot after every so many steps that stays in memory, for the next
    generation to restore; "auto" takes them as often as pays; None: only saves are snapshotted.
    snapshot_overhead_max: the part of the training time that these copies may take with "auto"; 0 to 1, or None.
    failures_per_node_day: how many failures a day a node of eight ranks is believed to have, before the run has shown
    how often it fails.
    save_at_end: whether the last step is saved when the loop returns.
    keep_last: committed checkpoints that are kept, counted from the newest.
    keep_last_min: how many of them are kept also when the disk is full and the next save needs the room.
    max_failures: failures of one cause that the run survives between two checkpoints: a number for every cause, or a
    mapping, e.g. {"signal": 20, "hang": 2}; for other causes, or with None, a run that makes no progress is stopped.
    snapshot_slots: snapshots that each rank may hold in memory at once; each takes as much memory as its shard. Three:
    the newest, a newer one that is not complete on all ranks yet, and one for the next save. While a save is written it
    takes one more, so with three one newer snapshot is kept meanwhile, and with four they go on being taken. Two are
    enough if snapshot_every_steps is None.
    replicate_snapshots: with several nodes, whether each keeps copies of another one's snapshots, so that losing a node
    loses nothing that was copied; takes twice its ranks' shards of memory more.
    replication_bytes_per_second_max: how fast a node may send copies; None for as fast as it goes.
    memory_fraction_max: the part of a node's memory that may be in use with all snapshots in place; 0 to 1.
    verify_saves: whether each shard is read back and compared before its save counts; without, a checkpoint that the
    storage has damaged is noticed when it is restored, and passed over then.
    verify_bytes_per_second_max: how fast each rank's shard is read back, for storage that the training's data comes
    from as well; the save counts, and the next one begins, when that is done. None: as fast as the device gives.
    save_timeout_seconds: how long a save that the loop waits for may take.
    save_stalled_seconds: how long writing a save may take until the ledger says that it stalls; it goes on then.
    unprotected_seconds_max: how old the newest saved state may get while saves fail until the run says so loudly; None
    for any age.
    on_unprotected: "warn" goes on training then; "stop" ends the run if one more save does not come through.
    collective_timeout_seconds: after which a collective of the training's process group fails.
    hang_seconds_min: how long a rank may be still in training, at least, before it is suspected to hang; longer where
    steps take longer. None: ranks that hang are left alone.
    start_seconds_max: how long a rank may be still while it starts, restores or does its first step; less once the run
    has shown how long these take.
    sigterm_seconds: how long a process that was sent SIGTERM is still there; a save and the move elsewhere must fit.
    takeover_seconds: how long a new driver waits for the processes of an earlier one to end.
    on_bad_loss: what happens when a loss or gradient norm that the loop gives to `session.end_step` is bad. "stop" ends
    the run with an error; "rollback" goes back to the newest saved state and passes over the batches of that step.
    loss_spike_factor: a loss or gradient norm above this factor times the median of the last 50 counts as bad; with
    None only one that is not finite does.
    total_steps: how many steps the run will have done at its end, if that is known: the status page tells from it when
    that will be. Nothing depends on it.
    record_samples: whether the ids of consumed samples are written to the run directory.
    check_replicas: whether what ranks must hold alike is compared at each save, up to 256 MiB of it, in turns; a loop
    that lets replicas drift, as local SGD does, needs False.
    metrics_port: where the coordinator answers /metrics, /healthz and, for people, /; 0: any port that is free, which
    `lastgood status` prints. If it is taken, another one is chosen, and the log says so. None: nowhere.
    metrics_host: the address to listen at. By default only this machine reaches it; "0.0.0.0" opens it, without any
    authentication, to the network.
    checkpoint_storage: object storage for checkpoints, e.g. "s3://bucket/prefix": they go below the run's name there,
    and the run directory keeps the ledger and what else is not needed to go on. None: they go into the run directory.
    workers.checkpoint.place describes such URLs. Commits are reported to Ray without a checkpoint then.
    preload: modules that ranks find imported; importing them must start no thread and open no CUDA.
    volatile: identity fields that may differ between the saved and the resumed run, e.g. "config.steps".
    failpoints: faults to inject; for chaos tests.
    """

    cadence: int | Literal["auto"] | None = "auto"
    save_overhead_max: float | None = 0.01
    snapshot_every_steps: int | Literal["auto"] | None = "auto"
    snapshot_overhead_max: float | None = 0.02
    failures_per_node_day: float = FAILURES_PER_NODE_DAY
    save_at_end: bool = True
    keep_last: int = 3
    keep_last_min: int = 1
    max_failures: int | Mapping[str, int] | None = None
    snapshot_slots: int = 3
    replicate_snapshots: bool = True
    replication_bytes_per_second_max: float | None = None
    memory_fraction_max: float = 0.9
    verify_saves: bool = True
    verify_bytes_per_second_max: float | None = None
    save_timeout_seconds: float = 600.0
    save_stalled_seconds: float = 60.0
    unprotected_seconds_max: float | None = None
    on_unprotected: Literal["warn", "stop"] = "warn"
    collective_timeout_seconds: float = 600.0
    hang_seconds_min: float | None = 2.0
    start_seconds_max: float = 600.0
    sigterm_seconds: float = 25.0
    takeover_seconds: float = 30.0
    on_bad_loss: Policy = "stop"
    loss_spike_factor: float | None = None
    total_steps: int | None = None
    record_samples: bool = True
    check_replicas: bool = True
    metrics_port: int | None = 0
    metrics_host: str = "127.0.0.1"
    checkpoint_storage: str | None = None
    preload: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    failpoints: tuple[Arm, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cadence", "snapshot_every_steps"):
            if getattr(self, name) not in (None, "auto"):
                self._require_whole(name, 1, 'a number of steps, at least 1, "auto" or None')
        for name in ("save_overhead_max", "snapshot_overhead_max"):
            part = getattr(self, name)
            self._require(
                name,
                part is None or (isinstance(part, int | float) and not isinstance(part, bool) and 0 < part <= 1),
                "a number above 0 and at most 1, or None",
            )
        if self.total_steps is not None:
            self._require_whole("total_steps", 1, "a whole number, at least 1, or None")
        self._require_whole("keep_last", 1, "a whole number, at least 1")
        self._require_whole("keep_last_min", 1, "a whole number, at least 1")
        self._require("keep_last_min", self.keep_last_min <= self.keep_last, f"at most keep_last, {self.keep_last}")
        limits = limits_problem(self.max_failures)
        self._require("max_failures", not limits, limits)
        self._require_whole(
            "snapshot_slots", 2, "a whole number, at least 2: one snapshot is written while the other is kept"
        )
        for name in ("save_at_end", "verify_saves", "record_samples", "check_replicas", "replicate_snapshots"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        fraction = self.memory_fraction_max
        self._require(
            "memory_fraction_max",
            isinstance(fraction, int | float) and 0 < fraction <= 1,
            "a number above 0 and at most 1",
        )
        for name in (
            "save_timeout_seconds",
            "save_stalled_seconds",
            "collective_timeout_seconds",
            "start_seconds_max",
            "sigterm_seconds",
            "takeover_seconds",
            "failures_per_node_day",
            *(("hang_seconds_min",) if self.hang_seconds_min is not None else ()),
        ):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            self._require(name, is_number and 0 < seconds < math.inf, "a number above 0")
        for name, unit in (
            ("unprotected_seconds_max", "seconds"),
            ("verify_bytes_per_second_max", "bytes a second"),
            ("replication_bytes_per_second_max", "bytes a second"),
        ):
            limit = getattr(self, name)
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            self._require(
                name, limit is None or (is_number and 0 < limit < math.inf), f"a number of {unit} above 0, or None"
            )
        wrong = "" if self.checkpoint_storage is None else url_problem(self.checkpoint_storage)
        self._require("checkpoint_storage", not wrong, f"{wrong}, or None")
        self._require("on_unprotected", self.on_unprotected in ("warn", "stop"), '"warn" or "stop"')
        self._require("on_bad_loss", self.on_bad_loss in get_args(Policy), '"stop" or "rollback"')
        factor = self.loss_spike_factor
        self._require(
            "loss_spike_factor",
            factor is None or (isinstance(factor, int | float) and 1 < factor < math.inf),
            "a number above 1, or None",
        )
        port = self.metrics_port
        self._require(
            "metrics_port",
            port is None or (isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535),
            "a port number from 0, for any that is free, to 65535, or None",
        )
        host = self.metrics_host
        self._require(
            "metrics_host",
            isinstance(host, str) and host != "" and not any(sign in host for sign in " /@"),
            'a name or address of this machine, e.g. "127.0.0.1", or "0.0.0.0" for all',
        )
        for name in ("preload", "volatile"):
            value = getattr(self, name)
            self._require(
                name,
                isinstance(value, tuple) and all(isinstance(item, str) for item in value),
                f"a tuple of strings, e.g. ({'my_package.model' if name == 'preload' else 'config.steps'!r},)",
            )

        self._require(
            "failpoints",
            isinstance(self.failpoints, tuple) and all(isinstance(item, Arm) for item in self.failpoints),
            "a tuple of workers.failpoint.Arm",
        )

    def _require_whole(self, name: str, least: int, wanted: str) -> None:
        value = getattr(self, name)
        self._require(name, isinstance(value, int) and not isinstance(value, bool) and value >= least, wanted)

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise CallerError(f"RecoveryConfig.{name} is {getattr(self, name)!r}; it has to be {wanted}")
