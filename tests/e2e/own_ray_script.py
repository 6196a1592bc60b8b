"""A driver with a Ray of its own, that shares nothing with the tests' but the storage.

`python own_ray_script.py RAY_DIRECTORY STORAGE NAME STOP_AT PACE_SECONDS`. STOP_AT names a fault point at which its
coordinator stops in the middle of the save of step 30; "-" for none. Whoever starts it removes RAY_DIRECTORY: it may be
killed.
"""

import sys
from pathlib import Path

import cloudpickle
import harness
import loops
import ray

from workers.failpoint import Arm

cloudpickle.register_pickle_by_value(loops)

STEP = 30


def main(ray_directory: str, storage: Path, name: str, stop_at: str, pace_seconds: float) -> None:
    arms = [] if stop_at == "-" else [Arm(id="paused", point=stop_at, action="stop_rank", when={"step": STEP})]
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=ray_directory)
    try:
        harness.trainer(storage, name, loops.train_loop, config={"pace_seconds": pace_seconds}, failpoints=arms).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
