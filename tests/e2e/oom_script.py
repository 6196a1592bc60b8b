"""Ray's memory monitor kills everything of the run on one of two nodes; `python oom_script.py STORAGE NAME`.

The monitor of the node with the driver is off, and the other one's threshold is a little above what is used now, so
that the machine itself never runs short. A process of its own, since Ray allows one cluster a process.
"""

import os
import sys
import tempfile
from pathlib import Path

import cloudpickle
import death_loops
import harness
import loops
import psutil
import ray
from ray.cluster_utils import Cluster

cloudpickle.register_pickle_by_value(loops)
cloudpickle.register_pickle_by_value(death_loops)

ROOM_BYTES = 6 << 30  # for the run itself, and for what is then too much


def main(storage: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lg-oom-", ignore_cleanup_errors=True) as directory:
        os.environ.update({"RAY_memory_monitor_refresh_ms": "0"})
        cluster = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={"num_cpus": 0, "temp_dir": directory, "include_dashboard": False},
        )
        try:
            memory = psutil.virtual_memory()
            threshold = (memory.total - memory.available + ROOM_BYTES) / memory.total
            os.environ.update(
                {"RAY_memory_monitor_refresh_ms": "100", "RAY_memory_usage_threshold": f"{threshold:.4f}"}
            )
            cluster.add_node(num_cpus=2)
            ray.init(address=cluster.address, log_to_driver=False)
            config = {"misdeed_step": 25, "marker": str(storage / "greedy")}
            result = harness.trainer(storage, name, death_loops.hoarding_loop, config=config).fit()
            print(f"finished step {result.step} in generation {result.generation}")
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
