"""What goes wrong around the run: Ray's own processes, nodes, the clock, a second driver."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from chaos.faults.fault import Fault, Injected, Target

_CONTROLLER = "ray::TrainController.run"
_DRAIN_SECONDS = 60


def _kill_controller(target: Target, rng: random.Random) -> Injected | None:
    """Ray Train's controller of this run: a worker beside the run's coordinator, below the same raylet."""
    entry = target.newest("coordinator")
    if entry is None:
        return None
    with contextlib.suppress(psutil.Error):
        raylet = psutil.Process(entry["pid"]).parent()
        for process in raylet.children() if raylet else ():
            if process.cmdline()[:1] == [_CONTROLLER]:
                process.kill()
                return Injected(context={"victim_pid": process.pid, "signal": "SIGKILL"})
    return None


def _other_node(target: Target, rng: random.Random) -> dict[str, Any] | None:
    """A node that ranks run on and that neither the head nor the driver is on."""
    import ray

    used = {rank["node_id"] for rank in target.status().get("ranks", ())}
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [
        node
        for node in known
        if node["Alive"] and node["NodeID"] in used and "node:__internal_head__" not in node["Resources"]
    ]
    return rng.choice(sorted(nodes, key=lambda node: str(node["NodeID"]))) if nodes else None


def _kill_raylet(target: Target, rng: random.Random) -> Injected | None:
    node = _other_node(target, rng)
    if node is None:
        return None
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command and Path(command[0]).name == "raylet" and f"--node_id={node['NodeID']}" in command:
                process.kill()
                return Injected(context={"node": node["NodeID"], "victim_pid": process.pid})
    return None


def _drain(target: Target, rng: random.Random) -> Injected | None:
    import ray

    node = _other_node(target, rng)
    if node is None:
        return None
    options = {
        "address": ray.get_runtime_context().gcs_address,
        "node-id": node["NodeID"],
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason-message": "a chaos campaign",
        "deadline-remaining-seconds": str(_DRAIN_SECONDS),
    }
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return Injected(context={"node": node["NodeID"]}, effect_seconds=_DRAIN_SECONDS)


def _more_than_one_node() -> str | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None  # it depends on the cluster, which is not known yet
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return None if len(nodes) > 1 else "this cluster has one node, which the driver is on; give one with --address"


def _kill_driver(target: Target, rng: random.Random) -> Injected | None:
    if target.driver_pid is None or target.start_driver is None:
        return None
    try:
        os.kill(target.driver_pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Injected(context={"victim_pid": target.driver_pid, "driver_pid": target.start_driver()})


def _second_driver(target: Target, rng: random.Random) -> Injected | None:
    if target.driver_pid is None or target.start_driver is None:
        return None
    return Injected(context={"first_pid": target.driver_pid, "driver_pid": target.start_driver()})


def _clock() -> str | None:
    return "the clock is the whole machine's; it needs a machine, or a time namespace, for the run alone"


def _unavailable(target: Target, rng: random.Random) -> Injected | None:
    return None


CLUSTER_FAULTS = (
    Fault(name="kill_controller", description="SIGKILL to Ray Train's controller", inject=_kill_controller),
    Fault(
        name="kill_raylet",
        description="SIGKILL to the raylet of a node with ranks, and so the loss of the node",
        needs="a cluster of several nodes (--address), this machine hosting them",
        inject=_kill_raylet,
        available=_more_than_one_node,
    ),
    Fault(
        name="drain_node",
        description="a drain notice for a node with ranks",
        needs="a cluster of several nodes (--address)",
        inject=_drain,
        available=_more_than_one_node,
    ),
    Fault(
        name="kill_driver",
        description="SIGKILL to the driver; another one takes over",
        inject=_kill_driver,
    ),
    Fault(
        name="second_driver",
        description="a second fit() of the same directory while the first one runs",
        inject=_second_driver,
    ),
    Fault(
        name="clock_jump",
        description="a node's clock jumps",
        needs="a machine or a time namespace for the run alone",
        inject=_unavailable,
        available=_clock,
    ),
)
