"""What a campaign does, as its YAML file says. Pure: text in, a checked plan out.

docs/chaos.md describes the fields. Plans that come with lastgood are in chaos/plans/, and are named without `.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from chaos.campaign.fields import Fields
from chaos.faults.registry import FAULTS
from chaos.points import POINTS, Fault
from orchestrator.config import RecoveryConfig
from workers.errors import CallerError
from workers.failpoint import Action

_STORAGE_FAULTS = {"enospc": Fault.ENOSPC, "eio": Fault.EIO, "torn_write": Fault.TORN}
MODELS = ("tiny", "demo")
MOMENTS = ("any", "save", "recovery")
ARMED_POINTS = (
    "snapshot.begin",
    "snapshot.copy",
    "snapshot.complete",
    "persist.create",
    "persist.block",
    "persist.fsync",
    "persist.rename",
    "persist.dir_fsync",
    "persist.readback",
    "persist.receipt",
    "commit.begin",
    "commit.write",
    "commit.fsync",
    "commit.rename",
    "commit.dir_fsync",
    "commit.done",
    "retention.trash",
    "retention.unlink",
    "generation.create",
    "generation.created",
    "rendezvous.init",
    "rendezvous.done",
    "restore.begin",
    "restore.read",
    "restore.apply",
    "restore.done",
    "step.end",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training that is attacked. model: of the job that comes with lastgood. config: for a loop of the user's own,
    beside "steps" and "seed"."""

    ranks: int
    steps: int
    model: str
    loader_workers: int
    pace_seconds: float
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How long the run trains undisturbed between faults, in seconds: uniform between two numbers, exponential about a
    mean, or the gaps of a trace, times `scale`, drawn at random."""

    uniform: tuple[float, float] | None = None
    mean: float | None = None
    trace: tuple[float, ...] | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """count: after so many the campaign stops. mix, moments: weights. burst_chance: that another one follows at once,
    burst_max in a row at most. from_step, until_step: none before, none from there on. without_progress_max: so many
    without a new step between them, then the run is given time. hold_seconds: how long those last that last."""

    count: int
    mix: Mapping[str, float]
    moments: Mapping[str, float]
    gap: Gap
    burst_chance: float
    burst_max: int
    from_step: int
    until_step: int
    without_progress_max: int
    hold_seconds: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """Faults at named points inside lastgood's own protocols, spread over the run."""

    count: int = 0
    points: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """exact: whether an undisturbed run is made as well, and compared. timeout_seconds: how long the attacked run may
    take in all; finish_seconds: once the faults have stopped."""

    name: str
    title: str
    seed: int
    job: Job
    recovery: Mapping[str, Any]
    faults: Faults
    armed: Armed
    exact: bool
    watch_leaks: bool
    recovery_seconds_max: float
    timeout_seconds: float
    finish_seconds: float

    @property
    def mix_names(self) -> list[str]:
        """The faults that may come."""
        return [name for name, weight in self.faults.mix.items() if weight > 0 and self.faults.count]


def ready_plans() -> dict[str, str]:
    """The plans that come with lastgood: name to text."""
    folder = files("chaos.plans")
    found = {item.name: item for item in folder.iterdir() if item.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): found[name].read_text(encoding="utf-8") for name in sorted(found)}


def load_plan(source: str) -> Plan:
    """A ready plan by name, or a file; CallerError, naming the field, if it cannot work."""
    if source in (ready := ready_plans()):
        return parse_plan(ready[source], source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CallerError(
            f"{source} is neither a plan's file ({error}) nor one of the ready plans: {', '.join(ready)}"
        ) from None
    return parse_plan(text, source)


def parse_plan(text: str, name: str) -> Plan:
    """The plan that the YAML text describes."""
    try:
        content = yaml.load(text, Loader=_EachFieldOnce)
    except yaml.YAMLError as error:
        raise CallerError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    fields = Fields({} if content is None else content, "", of=name)
    job, recovery, exact = _job(fields.section("job")), _recovery(fields, name), fields.flag("exact", True)
    plan = Plan(
        name=Path(name).stem,
        title=fields.text("title", Path(name).stem),
        seed=fields.whole("seed", 0, least=0),
        job=job,
        recovery=recovery,
        faults=_faults(fields.section("faults"), job, recovery, exact=exact),
        armed=_armed(fields.section("armed")),
        exact=exact,
        watch_leaks=fields.flag("watch_leaks", False),
        recovery_seconds_max=fields.number("recovery_seconds_max", 120.0, least=0.1),
        timeout_seconds=fields.number("timeout_seconds", 900.0, least=1.0),
        finish_seconds=fields.number("finish_seconds", 300.0, least=1.0),
    )
    fields.close()
    return plan


class _EachFieldOnce(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a mapping that names a key twice: YAML itself keeps the last one, and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name} is there twice{node.start_mark}")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _job(fields: Fields) -> Job:
    job = Job(
        ranks=fields.whole("ranks", 2, least=1),
        steps=fields.whole("steps", 200, least=2),
        model=fields.choice("model", "tiny", MODELS),
        loader_workers=fields.whole("loader_workers", 0, least=0),
        pace_seconds=fields.number("pace_seconds", 0.0),
        config=fields.mapping("config"),
    )
    fields.close()
    return job


def _recovery(fields: Fields, name: str) -> dict[str, Any]:
    settings = {"cadence": 5, "keep_last": 3, **fields.mapping("recovery")}
    known = sorted(set(RecoveryConfig.__dataclass_fields__) - {"failpoints"})
    if unknown := ", ".join(sorted(set(settings) - set(known))):
        raise CallerError(f"{name}: recovery.{unknown} is no field of RecoveryConfig; there are {', '.join(known)}")
    try:
        RecoveryConfig(**settings)
    except CallerError as error:
        raise CallerError(f"{name}: recovery: {error}") from None
    return settings


def _faults(fields: Fields, job: Job, settings: Mapping[str, Any], *, exact: bool) -> Faults:
    hold = fields.numbers("hold_seconds", count=2) or (0.5, 2.0)
    faults = Faults(
        count=fields.whole("count", 10, least=0),
        mix=fields.weights("mix", tuple(FAULTS), {"kill_rank": 1.0}),
        moments=fields.weights("moments", MOMENTS, {"any": 1.0}),
        gap=_gap(fields.section("gap_seconds")),
        burst_chance=fields.number("burst_chance", 0.0, most=1.0),
        burst_max=fields.whole("burst_max", 2, least=1),
        from_step=fields.whole("from_step", 1, least=0),
        until_step=fields.whole("until_step", max(1, job.steps * 9 // 10), least=1),
        without_progress_max=fields.whole("without_progress_max", 4, least=1),
        hold_seconds=(hold[0], hold[1]),
    )
    if bad := sorted({"nan_loss", "nan_gradient"} & set(faults.mix)):
        if settings.get("on_bad_loss") != "rollback":
            raise fields.refuse("mix", bad, 'without them, unless recovery.on_bad_loss is "rollback"')
        if exact:
            raise fields.refuse("mix", bad, "without them, unless exact is false: batches are passed over")
    if faults.count and not faults.mix:
        raise fields.refuse("mix", {}, "a mapping with at least one fault, since count is not 0")
    if faults.until_step > job.steps:
        raise fields.refuse("until_step", faults.until_step, f"at most job.steps, {job.steps}")
    if faults.from_step >= faults.until_step:
        raise fields.refuse("from_step", faults.from_step, f"less than until_step, {faults.until_step}")
    fields.close()
    return faults


def _gap(fields: Fields) -> Gap:
    uniform, trace = fields.numbers("uniform", count=2), fields.numbers("trace")
    mean, scale = fields.number("mean", 0.0), fields.number("scale", 1.0)
    given = [name for name, value in (("uniform", uniform), ("mean", mean or None), ("trace", trace)) if value]
    if len(given) > 1:
        raise fields.refuse(given[1], "given beside another", "the only one of uniform, mean and trace")
    fields.close()
    if not given:
        return Gap(uniform=(0.2, 2.0))
    return Gap(uniform=(uniform[0], uniform[1]) if uniform else None, mean=mean or None, trace=trace, scale=scale)


def _armed(fields: Fields) -> Armed:
    armed = Armed(
        count=fields.whole("count", 0, least=0),
        points=fields.names("points", ARMED_POINTS, ("persist.block",)),
        actions=cast(tuple[Action, ...], fields.names("actions", get_args(Action), ("kill_rank",))),
    )
    for action in armed.actions if armed.count else ():
        fault = _STORAGE_FAULTS.get(action)
        if fault and not any(fault in one.faults for one in POINTS if one.name in armed.points):
            raise fields.refuse("actions", action, "without it, or with a point where it can strike: see chaos points")
    fields.close()
    return armed
