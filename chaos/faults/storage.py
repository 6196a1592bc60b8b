"""Storage that refuses or stalls, and messages that are late or come twice.

These strike inside lastgood's own protocols, at fault points: they are armed before the run begins, each at a random
step. A plan names them under `armed`, as points and actions; here they are described.
"""

import random

from chaos.faults.fault import Fault, Injected, Target


def _armed_only(target: Target, rng: random.Random) -> Injected | None:
    raise AssertionError("armed faults strike by themselves")


_HOW = 'a plan\'s "armed": points {points}, actions {actions}'

ARMED_FAULTS = tuple(
    Fault(name=name, description=description, needs=_HOW.format(points=points, actions=actions), inject=_armed_only)
    for name, description, points, actions in (
        ("full_disk", "a write finds no room (ENOSPC)", "persist.* or commit.*", "enospc"),
        ("broken_disk", "a write fails (EIO)", "persist.* or commit.*", "eio"),
        ("stalled_disk", "a write, fsync or rename takes as long as the fault is held", "persist.*", "pause"),
        ("kill_mid_save", "a rank dies half way through its own save", "snapshot.* or persist.*", "kill_rank"),
        ("kill_keeper_mid_save", "a keeper dies half way through writing a shard", "persist.*", "kill_self"),
        ("kill_coordinator_mid_commit", "the coordinator dies while it commits", "commit.*", "kill_self"),
        ("delayed_receipt", "a keeper's receipt is late", "persist.receipt", "pause"),
        (
            "duplicated_receipts",
            "all receipts are in, the coordinator dies, and keepers tell its successor again",
            "commit.begin",
            "kill_self",
        ),
    )
)
