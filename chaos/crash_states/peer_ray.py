"""Ray Train's own index of checkpoints, written by its own code, to be traced: python peer_ray.py DIRECTORY.

Looking at how Ray writes is the one place where its internals are used, in a process of its own; nothing else relies on
them.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

EXPERIMENT = "run"


def manager(root: Path) -> Any:
    """Ray's manager of the checkpoints in `root`, with what its index says."""
    from ray.train import CheckpointConfig
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
    from ray.train.v2._internal.execution.storage import StorageContext

    storage = StorageContext(storage_path=str(root), experiment_dir_name=EXPERIMENT)
    return CheckpointManager(checkpoint_config=CheckpointConfig(), storage_context=storage)


async def register(root: Path) -> None:
    """Two checkpoints, one after the other. Their directories are made durable: they are not what is looked at."""
    from ray.train import Checkpoint
    from ray.train.v2._internal.execution.training_report import _TrainingReport

    from chaos.crash_states.peer_dcp import mark

    folder = root / EXPERIMENT
    folder.mkdir(exist_ok=True)
    sync(root)
    kept = manager(root)
    for number in (1, 2):
        path = folder / f"checkpoint_{number}"
        path.mkdir()
        sync(folder)
        mark(root, "begins", str(number))
        report = _TrainingReport(checkpoint=Checkpoint(str(path)), metrics={"step": number}, validation=False)
        kept.register_checkpoint(report)
        mark(root, "saved", str(number))


def sync(folder: Path) -> None:
    """Make its names durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(register(Path(sys.argv[1])))
