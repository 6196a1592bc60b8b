"""A driver of its own, to be killed: `python poisoned_driver_script.py GCS_ADDRESS STORAGE NAME CONFIG RECOVERY`."""

import json
import sys
from pathlib import Path

import cloudpickle
import harness
import loops
import poisoned_loop
import ray

cloudpickle.register_pickle_by_value(loops)
cloudpickle.register_pickle_by_value(poisoned_loop)

if __name__ == "__main__":
    address, storage, name, config, recovery = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    slowly = json.loads(config) | {"pace_seconds": 0.05}
    harness.trainer(Path(storage), name, poisoned_loop.train_loop, config=slowly, **json.loads(recovery)).fit()
