"""A driver of its own, to be killed: `python driver_script.py GCS_ADDRESS STORAGE NAME`."""

import sys
from pathlib import Path

import cloudpickle
import harness
import loops
import ray

cloudpickle.register_pickle_by_value(loops)

if __name__ == "__main__":
    address, storage, name = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    harness.trainer(Path(storage), name, loops.train_loop, config={"pace_seconds": 0.05}).fit()
