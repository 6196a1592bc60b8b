"""The network between a rank and the others: cut, or so bad that many packets are lost.

Packets of their TCP connections are dropped in the kernel's firewall, by address and port: between processes of one
machine as well, so that a campaign on a single machine can do it, and nothing else is touched. The rules belong to a
process of nft and go with it, also when the campaign is killed.
"""

import contextlib
import os
import random
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from itertools import count

import psutil

from chaos.faults.fault import Fault, Injected, Target
from chaos.faults.processes import find_rank

_RULES_SECONDS_MAX = 5.0
_MAPPED = "::ffff:"
_tables = count()

Way = tuple[str, int, str, int]
"""Address and port of the sender, address and port of the receiver."""


def ways_between(ours: Iterable[int], theirs: Iterable[int]) -> set[Way]:
    """Both directions of the established TCP connections between these processes and those, all of this machine."""
    back = {_back(way) for pid in theirs for way in _outward(pid)}
    forth = {way for pid in ours for way in _outward(pid)} & back
    return forth | {_back(way) for way in forth}


def _outward(pid: int) -> set[Way]:
    with contextlib.suppress(psutil.Error):
        return {
            (link.laddr.ip.removeprefix(_MAPPED), link.laddr.port, link.raddr.ip.removeprefix(_MAPPED), link.raddr.port)
            for link in psutil.Process(pid).net_connections("tcp")
            if link.status == psutil.CONN_ESTABLISHED
        }
    return set()


def _back(way: Way) -> Way:
    return way[2], way[3], way[0], way[1]


def lose(ways: Collection[Way], *, percent: int) -> Callable[[], None]:
    """From now on so many of the packets on these ways are lost. Returns what ends it; RuntimeError if the kernel does
    not take the rules."""
    table = f"inet lastgood_chaos_{os.getpid()}_{next(_tables)}"
    verdict = "drop" if percent == 100 else f"numgen random mod 100 < {percent} drop"
    rules = (f"add rule {table} lost {_match(way)} {verdict}" for way in sorted(ways))
    nft = subprocess.Popen(
        ["nft", "--interactive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def end() -> None:
        nft.communicate()

    assert nft.stdin is not None
    assert nft.stdout is not None
    for line in (
        f"add table {table} {{ flags owner; }}",
        f"add chain {table} lost {{ type filter hook input priority 0; }}",
        *rules,
    ):
        nft.stdin.write(f"{line}\n")
    nft.stdin.flush()
    deadline = time.monotonic() + _RULES_SECONDS_MAX
    while _rules_in(table) < len(ways):
        complains = select.select([nft.stdout], [], [], 0.01)[0]
        if complains or time.monotonic() > deadline:
            said, _ = nft.communicate()
            raise RuntimeError(f"the kernel's firewall did not take the rules: {said.strip()[:200]}")
    return end


def _match(way: Way) -> str:
    source, source_port, target, target_port = way
    family = "ip6" if ":" in source else "ip"
    return f"{family} saddr {source} tcp sport {source_port} {family} daddr {target} tcp dport {target_port}"


def _rules_in(table: str) -> int:
    done = subprocess.run(["nft", "list", "table", *table.split()], capture_output=True, text=True, check=False)
    return sum(line.endswith("drop") for line in done.stdout.splitlines())


def _losing(percent: int) -> Callable[[Target, random.Random], Injected | None]:
    def inject(target: Target, rng: random.Random) -> Injected | None:
        found, status = find_rank(target, rng), target.status()
        if found is None or not status:
            return None
        pid, context = found
        node = next((one["node_id"] for one in status["ranks"] if one["pid"] == pid), None)
        keepers = {one["node_id"]: one["pid"] for one in status["keepers"]}
        ours = {pid, keepers.pop(node, pid)}
        theirs = {one["pid"] for one in status["ranks"] if one["pid"] is not None} | set(keepers.values())
        ways = ways_between(ours, theirs - ours)
        if not ways:
            return None
        return Injected(
            context={**context, "lost_percent": percent, "connections": len(ways) // 2},
            release=lose(ways, percent=percent),
        )

    return inject


def _available() -> str | None:
    if shutil.which("nft") is None:
        return "nftables (nft) is not installed"
    if os.geteuid() != 0:
        return "packets are dropped by the kernel's firewall, which takes root"
    try:
        lose([("127.0.0.1", 1, "127.0.0.1", 2)], percent=100)()
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


_NEEDS = "two ranks on this machine, root, nftables"
NETWORK_FAULTS = (
    Fault(
        name="cut_network",
        description="nothing passes between a rank, with its node's keeper, and the others for a while",
        needs=_NEEDS,
        inject=_losing(100),
        available=_available,
    ),
    Fault(
        name="slow_network",
        description="a third of the packets between a rank, with its node's keeper, and the others is lost for a while,"
        " and each sent again after 0.2 s and more",
        needs=_NEEDS,
        inject=_losing(33),
        available=_available,
    ),
)
