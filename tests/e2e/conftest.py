"""One Ray cluster and one uninterrupted reference run for all end-to-end tests."""

import sys
from pathlib import Path

import cloudpickle
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import loops

# Ray's workers do not have the tests on their path.
cloudpickle.register_pickle_by_value(loops)


@pytest.fixture(scope="session")
def reference(ray_cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the training that nobody disturbed."""
    import harness

    storage = tmp_path_factory.mktemp("reference")
    return harness.trainer(storage, "reference", loops.train_loop).fit().run_dir
