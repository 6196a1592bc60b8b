"""Ranks on nodes of one CPU each, beside a head without any; nodes are taken away in different ways.

`python nodes_script.py STORAGE NAME STORY`; a process of its own, since Ray allows one cluster a process.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import harness
import loops
import ray
from ray.cluster_utils import Cluster

cloudpickle.register_pickle_by_value(loops)

PACE = {"pace_seconds": 0.05}


class Nodes:
    """The cluster, and which of its nodes is which."""

    def __init__(self, directory: str, count: int) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={"num_cpus": 0, "temp_dir": directory, "include_dashboard": False},
        )
        self.nodes = [self.add() for _ in range(count)]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1)

    def lose(self, node_id: str) -> None:
        """Kill the node's raylet and everything on it."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str, deadline_seconds: int) -> None:
        options = {
            "address": self.cluster.address,
            "node-id": node_id,
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "a test",
            "deadline-remaining-seconds": str(deadline_seconds),
        }
        command = [str(Path(sys.executable).parent / "ray"), "drain-node"]
        command += [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(command, check=True, capture_output=True)


def node_of(status: dict[str, Any], rank: int) -> str:
    node: str = status["ranks"][rank]["node_id"]
    return node


def drained(storage: Path, name: str, nodes: Nodes) -> None:
    trainer = harness.trainer(storage, name, loops.train_loop, config=PACE, cadence=None, max_failures=0)
    run = harness.Run(trainer)
    status = run.status_when(lambda status: status["step"] >= 13)
    nodes.drain(node_of(status, 1), 60)
    after = run.status_when(lambda status: status["generation"] == 2 and status["step"] >= 13)
    assert node_of(status, 1) not in {node_of(after, rank) for rank in (0, 1)}
    run.result()


def drained_without_a_spare(storage: Path, name: str, nodes: Nodes) -> None:
    config = {"pace_seconds": 0.25}
    run = harness.Run(harness.trainer(storage, name, loops.train_loop, config=config, max_failures=0))
    status = run.status_when(lambda status: status["step"] >= 3)
    nodes.drain(node_of(status, 1), 600)
    harness.wait_for(lambda: harness.entries(run.trainer.run_dir, "save_ordered") or None, 30)
    (order,) = harness.entries(run.trainer.run_dir, "save_ordered")
    run.status_when(lambda status: status["generation"] == 1 and status["step"] >= order["step"] + 8)
    nodes.add()
    after = run.status_when(lambda status: status["generation"] == 2 and status["step"] >= order["step"], 90)
    assert node_of(status, 1) not in {node_of(after, rank) for rank in (0, 1)}
    run.result()


def lost(storage: Path, name: str, nodes: Nodes) -> None:
    run = harness.Run(harness.trainer(storage, name, loops.train_loop, config=PACE))
    status = run.status_when(lambda status: status["step"] >= 25)
    nodes.lose(node_of(status, 1))
    if len(nodes.nodes) < 2:
        nodes.add()
    after = run.status_when(lambda status: status["generation"] == 2 and status["step"] >= 25, 90)
    assert node_of(status, 1) not in {node_of(after, rank) for rank in (0, 1)}
    run.result()


def lost_with_copies(storage: Path, name: str, nodes: Nodes) -> None:
    """Nothing is committed before: what the lost node had is only in another one's memory."""
    options = {"cadence": None, "snapshot_every_steps": 3}
    run = harness.Run(harness.trainer(storage, name, loops.train_loop, config=PACE, **options))
    status = run.status_when(lambda status: status["step"] >= 25 and (status["copied_step"] or 0) >= 20, 180)
    assert not harness.entries(run.trainer.run_dir, "commit")
    nodes.lose(node_of(status, 1))
    run.result()


def excluded(storage: Path, name: str, nodes: Nodes) -> None:
    run = harness.Run(harness.trainer(storage, name, loops.train_loop, config=PACE))
    bad = ""
    for generation in (1, 2, 3):
        status = run.status_when(lambda status, g=generation: status["generation"] == g and status["step"] >= 8 * g)
        bad = bad or node_of(status, 1)
        assert node_of(status, 1) == bad
        harness.kill(status["ranks"][1]["pid"])
    after = run.status_when(lambda status: status["generation"] == 4 and status["step"] >= 24, 90)
    assert bad not in {node_of(after, rank) for rank in (0, 1)}
    run.result()


STORIES = {
    "excluded": (3, excluded),
    "drained": (3, drained),
    "drained-without-a-spare": (2, drained_without_a_spare),
    "lost-with-a-spare": (3, lost),
    "lost-and-replaced": (2, lost),
    "lost-with-copies": (3, lost_with_copies),
}


def main(storage: Path, name: str, story: str) -> None:
    count, attack = STORIES[story]
    with tempfile.TemporaryDirectory(prefix="lg-nodes-", ignore_cleanup_errors=True) as directory:
        nodes = Nodes(directory, count)
        try:
            ray.init(address=nodes.cluster.address, log_to_driver=False)
            attack(storage, name, nodes)
        finally:
            ray.shutdown()
            nodes.cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
