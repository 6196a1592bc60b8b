"""The coordinator, with nothing around it but what members say: a node is lost, and another one has copies."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RecoveryConfig
from orchestrator.coordinator import Coordinator
from orchestrator.observe.ledger import read_ledger
from orchestrator.outcome import CoordinatorConfig
from workers.checkpoint.manifest import ShardRecord, shard_file
from workers.keeper_messages import (
    CopyOrder,
    EndGeneration,
    GenerationDrained,
    HeldSnapshot,
    KeeperJoined,
    PersistOrder,
    ReleaseOrder,
    ShardCopied,
    ShardPersisted,
    Snapshotted,
)
from workers.messages import AgentJoined, Event, KillRank, RankExited, RankStarted, StartRank
from workers.processes import ProcessId

DEADLINE_SECONDS = 20.0
HOST = "10.0.0.1"


class Members:
    """Speaks for all agents and keepers; nodes are letters, and so are their keepers."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("generations", "checkpoints"):
            (run_dir / name).mkdir(parents=True)
        self.nodes = {node: {"CPU": 1.0} for node in "abc"}
        monkeypatch.setattr("orchestrator.nodes._alive", lambda: dict(self.nodes))
        monkeypatch.setattr("orchestrator.nodes._LOOK_SECONDS", 0.01)
        self.run_dir = run_dir
        self.coordinator = Coordinator(
            CoordinatorConfig(
                run="r", driver="d", run_dir=run_dir, recovery=RecoveryConfig(), needed={"CPU": 2.0}, can_exclude=True
            )
        )
        self.told: dict[str, int] = {}
        self.seen: dict[str, int] = {}

    async def agent(self, rank: int, node: str, group: str) -> None:
        name = f"d/agent-{group}{rank}"
        joined = AgentJoined(
            agent=name,
            group=group,
            rank=rank,
            local_rank=0,
            world_size=2,
            node=node,
            node_ip=HOST,
            pid=1,
            ready=True,
            store_port=1234,
        )
        await self.coordinator.join(name, "p", joined, 0)

    async def keeper(self, node: str) -> None:
        name = f"d/keeper-{node}"
        joined = KeeperJoined(keeper=name, node=node, pid=1, snapshots=(), receipts=(), host=HOST, port=ord(node))
        await self.coordinator.join(name, "p", joined, 0)

    async def tell(self, member: str, event: Event) -> None:
        self.told[member] = self.told.get(member, 0) + 1
        assert await self.coordinator.tell(member, [(self.told[member], event)]) == "member"

    async def command(self, member: str, kind: type[Any]) -> Any:
        """The next command of a kind; those before it are passed over."""

        def look() -> Any:
            for number, command in self.coordinator._mail._boxes[member].commands:
                if number > self.seen.get(member, 0) and isinstance(command, kind):
                    self.seen[member] = number
                    return command
            return None

        return await self.until(look)

    async def until(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := look()):
            assert time.monotonic() < deadline, f"it did not happen: {self.coordinator._life.outcome}"
            await asyncio.sleep(0.005)
        return found

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in read_ledger(self.run_dir / "ledger.jsonl") if entry["kind"] == kind]


def held(rank: int, step: int, *, durable: bool = False) -> HeldSnapshot:
    return HeldSnapshot(rank=rank, generation=1, step=step, digest=f"{rank}-{step}", durable=durable)


async def story(members: Members) -> None:
    for rank, node in ((0, "a"), (1, "b")):
        await members.agent(rank, node, "one")
    for node in "abc":
        await members.keeper(node)
    for rank in (0, 1):
        agent = f"d/agent-one{rank}"
        assert (await members.command(agent, StartRank)).restore is None
        await members.tell(agent, RankStarted(agent=agent, generation=1, process=ProcessId(pid=7, start_ticks=1)))

    # A set is complete and is copied; of the next one only the shard of rank 0 is.
    for step in (10, 12):
        for rank, node in ((0, "a"), (1, "b")):
            await members.tell(f"d/keeper-{node}", Snapshotted(keeper=f"d/keeper-{node}", snapshot=held(rank, step)))
        for rank, node, to in ((0, "a", "b"), (1, "b", "a")):
            order = await members.command(f"d/keeper-{node}", CopyOrder)
            assert (order.ranks, order.step, order.host, order.port) == ((rank,), step, HOST, ord(to))
            if (rank, step) != (1, 12):
                copied = ShardCopied(keeper="", rank=rank, generation=1, step=step, bytes=1, seconds=0.1)
                await members.tell(f"d/keeper-{node}", copied)
    posted = [command for _, command in members.coordinator._mail._boxes["d/keeper-a"].commands]
    released = [command for command in posted if isinstance(command, ReleaseOrder)]
    assert (released[-1].keep, released[-1].spare) == ((12,), (10,))

    # Node b is lost, with the agent and the keeper on it.
    del members.nodes["b"]
    await members.command("d/agent-one0", KillRank)
    await members.tell(
        "d/agent-one0",
        RankExited(agent="d/agent-one0", generation=1, pid=7, exit_code=-9, at=time.time(), ordered=True),
    )
    await members.command("d/keeper-a", EndGeneration)
    mine = (held(0, 10), held(0, 12), held(1, 10))
    await members.tell("d/keeper-a", GenerationDrained(keeper="d/keeper-a", generation=1, held=mine))
    await members.tell("d/keeper-c", GenerationDrained(keeper="d/keeper-c", generation=1))
    for rank, node in ((0, "a"), (1, "c")):
        await members.agent(rank, node, "two")

    # All that the next ranks need is with the keeper of node a, which also writes both shards.
    for rank in (0, 1):
        restore = (await members.command(f"d/agent-two{rank}", StartRank)).restore
        assert (restore.source, restore.generation, restore.step, restore.checkpoint) == ("memory", 1, 10, None)
        assert restore.places == ((HOST, ord("a"), (0, 1)),)
    orders = [await members.command("d/keeper-a", PersistOrder) for _ in range(2)]
    assert {(order.rank, order.generation, order.step) for order in orders} == {(0, 1, 10), (1, 1, 10)}
    for order in orders:
        directory = members.run_dir / "checkpoints" / order.checkpoint
        directory.mkdir(exist_ok=True)
        (directory / shard_file(order.rank, 2)).write_bytes(b"x")
        shard = ShardRecord(
            file=shard_file(order.rank, 2), rank=order.rank, bytes=1, digest="", verified_from="device", tensors=()
        )
        await members.tell(
            "d/keeper-a",
            ShardPersisted(
                rank=order.rank,
                generation=1,
                step=10,
                attempt=order.attempt,
                shard=shard,
                snapshot_at=1.0,
                durable_seconds=0.1,
                verify_seconds=0.1,
            ),
        )
    await members.until(lambda: members.entries("commit"))


def test_the_run_goes_on_from_the_newest_set_that_is_whole_without_the_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell_it() -> Members:
        members = Members(tmp_path / "run", monkeypatch)
        await story(members)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return members

    members = asyncio.run(tell_it())
    _, second = members.entries("generation")
    assert (second["source"], second["restored_step"], second["from_copies"]) == ("memory", 10, [1])
    assert [entry["step"] for entry in members.entries("replicated")] == [10]
    (commit,) = members.entries("commit")
    assert (commit["generation"], commit["step"]) == (1, 10)
