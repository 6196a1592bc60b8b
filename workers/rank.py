"""A rank: the process that runs the user's loop, forked from the zygote for one generation.

It first warms up and waits as a standby; its orders tell it which generation it belongs to and what to restore. It
never cleans up after a failure: it says what happened and exits, and its process group is killed. What the warm-up
did to the random number generators is undone, since every rank starts from the same parent.
"""

import inspect
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from workers import failpoint, last_words, ray_guard, termination
from workers.errors import CheckpointDamaged
from workers.heartbeat import HeartbeatPage
from workers.orders import RankOrders
from workers.session import Session, run_as_current
from workers.watcher import start_watcher
from workers.wire import MESSAGE_BYTES_MAX, Channel

_STORE_TIMEOUT = timedelta(seconds=60)
_TEXT_BYTES_MAX = MESSAGE_BYTES_MAX // 4


def main(agent: Channel, heartbeat_fd: int, payload_fd: int, last_words_fd: int) -> NoReturn:
    """Standby, then one generation; ends the process."""
    last_words.speak_into(last_words_fd)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    termination.tell_on_sigterm(agent)
    code = 1
    try:
        code = _run(agent, HeartbeatPage(heartbeat_fd), payload_fd)
    except BaseException as error:
        _tell_error(agent, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(agent: Channel, page: HeartbeatPage, payload_fd: int) -> int:
    _warm_up()
    store = _listening_store()
    agent.send("ready", store_port=store.port)
    message = agent.receive()
    if message is None:
        return 0  # the agent is gone, or it does not need this standby
    orders = RankOrders.from_json(message[0]["orders"])
    page.beat(phase="starting", step=0)
    failpoint.arm(orders.failpoints, orders.run_dir / "faults")
    torch.set_num_threads(orders.threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join_ranks(orders, store, device, page)
    start_watcher(page)
    ray_guard.install()
    loop, config = _load_payload(payload_fd)
    session = Session(orders, agent=agent, page=page, device=device, config=config)
    page.beat(phase="building")
    with run_as_current(session):
        loop(config) if inspect.signature(loop).parameters else loop()
        session.finish()
    return 0


def _warm_up() -> None:
    """Touch autograd and an optimizer once: their first use takes a quarter of a second."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    random.setstate(python_state)
    torch.set_rng_state(torch_state)


def _listening_store() -> TCPStore:
    """A store that peers can join, on a free port. Rank 0's is used; the others cost one idle thread each."""
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def _join_ranks(orders: RankOrders, own_store: TCPStore, device: torch.device, page: HeartbeatPage) -> None:
    page.beat(phase="rendezvous")
    failpoint.hit("rendezvous.init", rank=orders.rank, generation=orders.generation, rank_pid=os.getpid())
    store = own_store
    if orders.rank != 0:
        store = TCPStore(orders.store_host, orders.store_port, is_master=False, timeout=_STORE_TIMEOUT)
    failpoint.hit("rendezvous.group", rank=orders.rank, generation=orders.generation, rank_pid=os.getpid())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"generation-{orders.generation}", store),
        rank=orders.rank,
        world_size=orders.world_size,
        timeout=timedelta(seconds=orders.collective_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    failpoint.hit("rendezvous.done", rank=orders.rank, generation=orders.generation, rank_pid=os.getpid())


def _load_payload(fd: int) -> tuple[Any, Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb") as stream:
        return cloudpickle.load(stream)  # type: ignore[no-any-return]


def _tell_error(agent: Channel, error: BaseException) -> None:
    at = time.time()
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    try:
        if isinstance(error, CheckpointDamaged):
            agent.send("restore_failed", reason=str(error)[:_TEXT_BYTES_MAX])
        agent.send(
            "error",
            type=type(error).__name__,
            message=str(error)[:_TEXT_BYTES_MAX],
            traceback=text[-_TEXT_BYTES_MAX:],
            at=at,
            exit_code=getattr(type(error), "exit_code", 1),
        )
    except OSError:
        return
