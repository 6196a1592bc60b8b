"""A rank's watcher: a thread that notes how many collectives the rank has begun.

It looks at moments that are the same on all ranks, so that what two ranks show under one tick can be compared: the one
with the lower number is the one that the others wait for. The moments are spread over their interval by a fixed hash,
for steps may take just as long as the interval. That the tick goes on at all shows that the process can run Python: it
stands still while the process is stopped, or while native code keeps the interpreter locked.
"""

import threading
import time
from typing import Any

import torch.distributed as dist

from workers.heartbeat import HeartbeatPage

TICK_SECONDS = 0.5


def start_watcher(page: HeartbeatPage) -> None:
    """Look until the process ends."""
    threading.Thread(target=_watch, args=(page,), name="lastgood-watcher", daemon=True).start()


def look_at(tick: int) -> float:
    """The Unix time of a tick's look: within the tick's interval, the same on all ranks."""
    spread = (tick * 0x9E3779B97F4A7C15 >> 32 & 0xFFFF) / 0x10000
    return (tick + spread) * TICK_SECONDS


def collectives_begun() -> int:
    """Over all process groups of this rank."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def next_look(now: float) -> tuple[int, float]:
    """The tick of the next look after this Unix time, and the seconds until then: less than two intervals, so that a
    clock that is set back or forth costs no more than that."""
    tick = int(now / TICK_SECONDS) + 1
    return tick, max(0.0, look_at(tick) - now)


def _watch(page: HeartbeatPage) -> None:
    while True:
        tick, seconds = next_look(time.time())
        time.sleep(seconds)
        page.observe(sequence=collectives_begun(), tick=tick)
