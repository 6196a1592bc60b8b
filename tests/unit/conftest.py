"""A session with the processes around it replaced; see fakes.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads would only wait for each other over tensors this small
    rig = Rig(tmp_path / "run")
    rig.run_dir.mkdir()
    yield rig
    rig.close()
    torch.set_num_threads(threads)
