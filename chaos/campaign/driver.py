"""The driver of a campaign's run, in a process of its own, so that it can be killed and replaced.

`python -m chaos.campaign.driver SPEC.json`: see Spec. Exits with 0 when the run has finished.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.errors import CallerError, LastgoodError
from workers.failpoint import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run. address: of the Ray cluster. script: "file.py:function" of the user's loop, None for ours, of `model`.
    config: what the loop gets. arms: faults at named points. attackable: whether ranks obey orders."""

    address: str
    storage: str
    name: str
    script: str | None
    model: str
    config: dict[str, Any]
    ranks: int
    recovery: dict[str, Any]
    arms: tuple[Arm, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Spec":
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "arms": tuple(Arm(**arm) for arm in content["arms"])})


def split_script(script: str) -> tuple[Path, str]:
    """File and function of "train.py:train_loop"; CallerError if there is no such file."""
    file, _, function = script.rpartition(":")
    if not file or not function.isidentifier() or not Path(file).is_file():
        raise CallerError(f"--script is {script!r}; it has to be FILE.py:FUNCTION, of a file that is there")
    return Path(file).resolve(), function


def load_loop(script: str) -> Callable[..., None]:
    """The user's loop; what its module needs travels with it to Ray's workers."""
    import cloudpickle

    file, function = split_script(script)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise CallerError(f"{file} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CallerError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    loop = getattr(module, function, None)
    if not callable(loop):
        raise CallerError(f"{file} has no function {function}")
    cloudpickle.register_pickle_by_value(module)
    return loop  # type: ignore[no-any-return]


def main(spec: Spec) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig

    from chaos.faults.inside import obeying
    from orchestrator import RecoveryConfig, SupervisedTrainer

    ray.init(address=spec.address, log_to_driver=False)
    SupervisedTrainer(
        obeying(_loop(spec), Path(spec.storage) / spec.name),
        train_loop_config=spec.config,
        scaling_config=ScalingConfig(num_workers=spec.ranks),
        run_config=RunConfig(name=spec.name, storage_path=spec.storage),
        recovery=RecoveryConfig(**spec.recovery, failpoints=spec.arms),
    ).fit()


def _loop(spec: Spec) -> Callable[..., None]:
    if spec.script is not None:
        return load_loop(spec.script)
    if spec.model == "tiny":
        from chaos.campaign import tiny

        return tiny.train_loop
    from chaos.demo import job

    return job.train_loop


if __name__ == "__main__":
    try:
        main(Spec.read(Path(sys.argv[1])))
    except LastgoodError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
