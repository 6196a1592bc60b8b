"""A cluster of two nodes on one machine, one rank on each; a rank and the keeper of the other node are killed.

`python two_nodes_script.py STORAGE NAME`; a process of its own, since Ray allows one cluster a process.
"""

import sys
import tempfile
from pathlib import Path

import cloudpickle
import harness
import loops
import ray
from ray.cluster_utils import Cluster

cloudpickle.register_pickle_by_value(loops)


def main(storage: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lg-two-", ignore_cleanup_errors=True) as directory:
        cluster = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={"num_cpus": 1, "temp_dir": directory, "include_dashboard": False},
        )
        try:
            cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False)
            attack(storage, name)
        finally:
            ray.shutdown()
            cluster.shutdown()


def attack(storage: Path, name: str) -> None:
    run = harness.Run(harness.trainer(storage, name, loops.train_loop, config={"pace_seconds": 0.05}))
    status = run.status_when(lambda status: status["step"] >= 15)
    assert len({rank["node_id"] for rank in status["ranks"]}) == 2, "both ranks are on one node"
    assert len(status["keepers"]) == 2
    harness.kill(status["ranks"][1]["pid"])
    status = run.status_when(lambda status: status["generation"] == 2 and status["step"] >= 25)
    keeper = next(one for one in status["keepers"] if one["node_id"] == status["ranks"][0]["node_id"])
    harness.kill(keeper["pid"])
    result = run.result()
    print(f"finished step {result.step} in generation {result.generation}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
