"""`ray.train` calls inside the supervised loop: each raises at once and names its replacement.

The loop does not run in Ray's worker but in a rank beside it, where Ray's calls would hang, start a second cluster or
answer for the wrong process. The functions are replaced when `ray.train` is imported, before or after this module: a
loop that was pickled by value looks them up then, and a module that imports their names gets the replacements.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from workers.errors import CallerError

_REPLACEMENTS = {
    "report": "session.report(metrics); checkpoints are saved by session.end_step() and session.save_now()",
    "get_checkpoint": "session.restore(), which continues from the newest verified checkpoint",
    "get_context": "session.rank, session.world_size, session.device",
    "get_dataset_shard": "session.data_loader(dataset, ...), or track a loader that has state_dict/load_state_dict",
    "get_all_reported_checkpoints": "`lastgood checkpoints list RUN_DIR`",
    "get_preemption_info": "nothing: preemption notices are answered by the supervisor",
}
_TORCH_REPLACEMENTS = {
    "prepare_model": "fully_shard(model) or DistributedDataParallel(model); the process group is already set up",
    "prepare_data_loader": "session.data_loader(dataset, ...)",
    "get_device": "session.device",
    "get_devices": "session.device",
    "backward": "loss.backward()",
    "accelerate": "torch.autocast and session.track(scaler=...)",
    "enable_reproducibility": "torch.manual_seed(...) in the loop",
}
_GUARDED = {"ray.train": _REPLACEMENTS, "ray.train.torch": _TORCH_REPLACEMENTS}


def install() -> None:
    """Guard `ray.train` in this process, now or as soon as it is imported."""
    # A stray ray.get() in the loop must fail too, not start a cluster of its own.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    for name in _GUARDED:
        if name in sys.modules:
            _guard(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _guard(module: ModuleType) -> None:
    for function, replacement in _GUARDED[module.__name__].items():
        if hasattr(module, function):
            setattr(module, function, _refuse(f"{module.__name__}.{function}", replacement))


def _refuse(call: str, replacement: str) -> Callable[..., NoReturn]:
    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise CallerError(f"{call}() cannot work inside a supervised loop; use {replacement}")

    return refused


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _GUARDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _guard_once_loaded(spec.loader)
        return spec


def _guard_once_loaded(loader: importlib.abc.Loader) -> None:
    """Not a loader around the loader: that would hide the module's source and resources."""
    load = loader.exec_module

    def load_and_guard(module: ModuleType) -> None:
        load(module)
        _guard(module)

    loader.exec_module = load_and_guard  # type: ignore[method-assign]
