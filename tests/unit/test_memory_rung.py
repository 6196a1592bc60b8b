"""The coordinator restores from memory, and from the checkpoint before when that is no good; without Ray."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.config import RecoveryConfig
from orchestrator.coordinator import Coordinator
from orchestrator.mailbox import Mailboxes
from orchestrator.nodes import NodeWatch
from orchestrator.observe.ledger import read_ledger
from orchestrator.outcome import CoordinatorConfig
from workers.checkpoint.manifest import ShardRecord, checkpoint_name, shard_file
from workers.keeper_messages import (
    EndGeneration,
    GenerationDrained,
    HeldSnapshot,
    KeeperJoined,
    PersistFailed,
    PersistOrder,
    ShardPersisted,
    Snapshotted,
)
from workers.messages import (
    AgentJoined,
    Command,
    RankExited,
    RankReady,
    RestoreFailed,
    RestoreOrder,
    SaveOutcome,
    StartRank,
)

WORLD = 2
DEADLINE_SECONDS = 20.0
T = TypeVar("T")


class Stage:
    """A coordinator whose members are the test."""

    def __init__(self, run_dir: Path, posted: list[tuple[str, Command]]) -> None:
        self.run_dir = run_dir
        self.posted = posted
        self.held: list[HeldSnapshot] = []
        self.coordinator = Coordinator(
            CoordinatorConfig(
                run="r",
                driver="d",
                run_dir=run_dir,
                recovery=RecoveryConfig(),
                needed={"CPU": 1.0},
                can_exclude=False,
            )
        )

    def put(self, *events: Any) -> None:
        for event in events:
            self.coordinator._put(event)

    async def wait_for(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return found
            await asyncio.sleep(0.005)
        raise AssertionError("it never happens")

    async def posted_to(self, member: str, kind: type[T], generation: int) -> T:
        def look() -> T | None:
            found = (one for to, one in self.posted if to == member and isinstance(one, kind))
            return next((one for one in found if getattr(one, "generation") == generation), None)  # noqa: B009

        return await self.wait_for(look)

    async def entry(self, kind: str, count: int = 1) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = [entry for entry in read_ledger(self.run_dir / "ledger.jsonl") if entry["kind"] == kind]
            return found[count - 1] if len(found) >= count else None

        return await self.wait_for(look)

    def begin(self, **agents: Any) -> None:
        """`agents`: what else they say of themselves."""
        for rank in range(WORLD):
            self.put(
                AgentJoined(
                    agent=f"a{rank}",
                    group="g",
                    rank=rank,
                    local_rank=rank,
                    world_size=WORLD,
                    node="n",
                    node_ip="127.0.0.1",
                    pid=1,
                    ready=True,
                    store_port=1,
                    **agents,
                )
            )
        self.put(KeeperJoined(keeper="k", node="n", pid=9, snapshots=(), receipts=()))

    def snapshot(self, step: int, *, durable: bool) -> None:
        for rank in range(WORLD):
            held = HeldSnapshot(rank=rank, generation=1, step=step, digest=f"{step}", durable=durable)
            self.held = [*(one for one in self.held if one.step == step), held]  # older ones are released
            self.put(Snapshotted(keeper="k", snapshot=held))

    async def save(self, step: int) -> None:
        self.snapshot(step, durable=True)
        order = await self.posted_to("k", PersistOrder, 1)
        directory = self.run_dir / "checkpoints" / order.checkpoint
        directory.mkdir(parents=True)
        for rank in range(WORLD):
            file = shard_file(rank, WORLD)
            (directory / file).write_bytes(b"x")
            shard = ShardRecord(file=file, rank=rank, bytes=1, digest="", verified_from="device", tensors=())
            times = {"snapshot_at": 1.0, "durable_seconds": 0.0, "verify_seconds": 0.0}
            self.put(ShardPersisted(rank=rank, generation=1, step=step, attempt=1, shard=shard, **times))
        await self.entry("commit")

    async def fail(self, generation: int) -> None:
        """Rank 0 dies, its peer is killed, and fresh ranks are ready."""
        await self.die(generation)
        self.put(*(RankReady(agent=f"a{rank}", store_port=1) for rank in range(WORLD)))

    async def die(self, generation: int) -> None:
        for rank in range(WORLD):
            self.put(
                RankExited(
                    agent=f"a{rank}", generation=generation, pid=2, exit_code=-9, at=float(rank), ordered=rank > 0
                )
            )
        await self.posted_to("k", EndGeneration, generation)
        self.put(GenerationDrained(keeper="k", generation=generation, held=tuple(self.held)))
        await self.entry("failure", generation)

    async def restored(self, generation: int) -> RestoreOrder | None:
        return (await self.posted_to("a0", StartRank, generation)).restore


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Stage]]:
    posted: list[tuple[str, Command]] = []

    async def no_nodes(watch: NodeWatch, put: Callable[[Any], None]) -> None:
        return

    monkeypatch.setattr(Mailboxes, "post", lambda mail, member, command: posted.append((member, command)))
    monkeypatch.setattr(NodeWatch, "run", no_nodes)
    for name in ("generations", "checkpoints"):
        (tmp_path / name).mkdir()
    yield lambda: Stage(tmp_path, posted)


def test_the_newest_set_is_restored_without_waiting_for_its_save_and_the_checkpoint_when_it_is_damaged(
    stage: Callable[[], Stage],
) -> None:
    async def story() -> None:
        run = stage()
        run.begin()
        assert await run.restored(1) is None
        await run.save(20)
        run.snapshot(26, durable=False)
        await run.fail(1)
        assert await run.restored(2) == RestoreOrder(
            source="memory", generation=1, step=26, checkpoint=None, places=(("", 0, (0, 1)),)
        )
        assert [one.step for _, one in run.posted if isinstance(one, PersistOrder)] == [20, 20, 26, 26]
        run.put(RestoreFailed(agent="a0", generation=2, reason="rank 0's snapshot is damaged"))
        failed = {"rank": 0, "generation": 1, "step": 26, "attempt": 1, "error": "other bytes", "transient": False}
        run.put(PersistFailed(keeper="k", **failed))
        await run.fail(2)
        dropped = await run.entry("memory_dropped")
        assert (dropped["generation"], dropped["step"]) == (1, 26)
        assert dropped["reason"] == "rank 0's snapshot is damaged"
        name = checkpoint_name(20, 1, 1)
        assert await run.restored(3) == RestoreOrder(source="checkpoint", generation=1, step=20, checkpoint=name)

    asyncio.run(story())


@pytest.mark.parametrize("judged", [False, True])
def test_a_coordinator_that_comes_back_after_the_failure_restores_what_the_keepers_tell(
    stage: Callable[[], Stage], judged: bool
) -> None:
    async def after() -> None:
        run = stage()
        run.posted.clear()
        held = tuple(
            HeldSnapshot(rank=rank, generation=1, step=26, digest="26", durable=False) for rank in range(WORLD)
        )
        run.put(KeeperJoined(keeper="k", node="n", pid=9, snapshots=held, receipts=()))
        exited = {"pid": 2, "exit_code": -9, "at": 5.0, "ordered": False}
        for rank in range(WORLD):
            agent = f"a{rank}"
            run.put(
                AgentJoined(
                    agent=agent,
                    group="g",
                    rank=rank,
                    local_rank=rank,
                    world_size=WORLD,
                    node="n",
                    node_ip="127.0.0.1",
                    pid=1,
                    ready=True,
                    store_port=1,
                    exited=RankExited(agent=agent, generation=1, **exited),
                )
            )
        if not judged:
            await run.posted_to("k", EndGeneration, 1)
            run.put(GenerationDrained(keeper="k", generation=1, held=held))
        assert await run.restored(2) == RestoreOrder(
            source="memory", generation=1, step=26, checkpoint=None, places=(("", 0, (0, 1)),)
        )
        assert [one.step for _, one in run.posted if isinstance(one, PersistOrder)][-2:] == [26, 26]

    async def before() -> None:
        run = stage()
        run.begin()
        await run.restored(1)
        await run.save(20)
        if judged:
            await run.die(1)

    asyncio.run(before())
    asyncio.run(after())


def test_ranks_that_wait_for_a_save_are_told_by_the_successor_of_a_coordinator_that_died_once_it_was_committed(
    stage: Callable[[], Stage],
) -> None:
    async def before() -> None:
        run = stage()
        run.begin()
        await run.restored(1)
        await run.save(20)

    async def after() -> None:
        run = stage()
        run.posted.clear()
        run.begin(generation=1)
        for rank in range(WORLD):
            told = await run.posted_to(f"a{rank}", SaveOutcome, 1)
            assert told == SaveOutcome(generation=1, step=20, committed=True, reason="")

    asyncio.run(before())
    asyncio.run(after())
