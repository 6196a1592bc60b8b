"""Ledgers of runs as the pages show them: healthy, recovering, unprotected, finished, stopped; written as entries."""

from typing import Any

T0 = 1_796_042_000.0
HOSTILE = (
    '<script>window.owned = 1</script><img src=x onerror="window.owned=2">\'"`&lt;</title></style></p>'
    "\u202eright to left\x07\ud800 \u2066 {{7*7}} ${alert(1)} end"
)
STEP_SECONDS = 2.0
NODES = ("8830cc1aecc468d1af4bf1e25b475ce2", "7e236c851620a714fd8ff0a0079c6d19")


class Story:
    """Writes entries as a coordinator would. Steps take 2 s, saves are made every 50 steps, ranks sit on two nodes."""

    def __init__(self, ranks: int = 4, *, total_steps: int | None = 1000) -> None:
        self.entries: list[dict[str, Any]] = []
        self.now = T0
        self.ranks = ranks
        self.generation = 0
        self.step = 0
        self.saved = 0
        self.add("coordinator", driver="d1", resumed=False, pid=1, total_steps=total_steps)
        for rank in range(ranks):
            self.add("agent", agent=f"a{rank}", rank=rank, pid=100 + rank, node=NODES[rank % 2])
        self.now += 12
        self.begin("start")

    def add(self, kind: str, **fields: Any) -> None:
        entry = {"v": 1, "seq": len(self.entries) + 1, "at": fields.pop("at", self.now), "kind": kind, **fields}
        self.entries.append(entry)

    def begin(self, reason: str, *, source: str = "fresh", restored: int = 0, takes: float = 6.0) -> None:
        self.generation += 1
        self.step = restored
        self.add(
            "generation",
            generation=self.generation,
            driver="d1",
            reason=reason,
            restored_step=restored,
            source=source,
            checkpoint=f"step-{restored:09}-g0001-a01" if restored else None,
            parent_generation=self.generation - 1 or None,
            ranks=self.ranks,
            nodes=2,
            from_copies=[],
            skip=[],
        )
        self.now += takes
        for rank in range(self.ranks):
            self.add(
                "restored",
                generation=self.generation,
                rank=rank,
                source=source,
                step=restored,
                seconds=1.5,
                checkpoint=f"step-{restored:09}-g0001-a01" if source == "checkpoint" else None,
            )
        self.now += STEP_SECONDS
        self.step += 1
        for rank in range(self.ranks):
            self.add("first_step", generation=self.generation, rank=rank, step=self.step, at_step=self.now)

    def train(self, steps: int, *, save_every: int = 50) -> None:
        for _ in range(steps):
            self.now += STEP_SECONDS
            self.step += 1
            if self.step % save_every == 0:
                self.commit()

    def commit(self) -> None:
        self.now += 0.3
        self.saved = self.step
        self.add("snapshot", generation=self.generation, step=self.step, attempt=1, copy_seconds=0.5, stall_seconds=0.3)
        self.add(
            "commit",
            at=self.now + 3,
            generation=self.generation,
            step=self.step,
            attempt=1,
            checkpoint=f"step-{self.step:09}-g{self.generation:04}-a01",
            bytes=48_000_000_000,
            verified_from=["device"],
            snapshot_at=self.now + 0.2,
            copy_seconds=0.5,
            stall_seconds=0.3,
            durable_seconds=1.8,
            verify_seconds=0.9,
            commit_seconds=2.8,
            interference_seconds=0.4,
        )

    def cadence(self) -> None:
        for tier, every, steps, bounds in (("durable", 100.0, 50, ["overhead"]), ("memory", 20.0, 10, [])):
            self.add(
                "cadence",
                generation=self.generation,
                tier=tier,
                interval_seconds=every,
                interval_steps=steps,
                best_seconds=every / 2,
                bounds=[{"name": name, "interval_seconds": every, "goodput_cost_ratio": 0.002} for name in bounds],
                goodput_ratio=0.991,
                goodput_ratio_half=0.985,
                goodput_ratio_double=0.988,
                inputs={
                    "cost": {"stall_seconds": 0.3, "durable_seconds": 3.3, "interference_seconds": 0.4},
                    "failures_per_second": 1 / 4800,
                    "restart_seconds": 8.0,
                    "step_seconds": STEP_SECONDS,
                },
                failures={},
                run_seconds=self.now - T0,
            )

    def fail(self, rank: int = 1, cause: str = "signal", *, error: str | None = None) -> None:
        code = {"signal": -9, "hang": None}.get(cause, 1)
        self.add(
            "failure",
            at=self.now + 0.4,
            generation=self.generation,
            rank=rank,
            cause=cause,
            exit_code=code,
            failed_at=self.now,
            noticed_at=self.now + 0.1,
            step=self.step,
            error=error,
            echoes=[{"rank": 0, "cause": "exception", "exit_code": 1, "at": self.now + 0.1}] if rank else [],
            detail={"signal": "SIGKILL"} if cause == "signal" else {},
            restore_failed=None,
        )
        self.now += 0.5

    def stop(self, reason: str) -> None:
        self.add("stopped", driver="d1", reason=reason, error_type="TrainingFailed", report=None)

    def finish(self) -> None:
        self.add("finished", generation=self.generation, step=self.step, protected=True)


def healthy(ranks: int = 4) -> Story:
    story = Story(ranks)
    story.train(120)
    story.cadence()
    story.fail()
    story.begin("failure", source="memory", restored=110)
    story.train(230)
    story.fail(2, "hang")
    story.begin("failure", source="checkpoint", restored=story.saved, takes=20)
    story.train(80)
    return story


def recovering() -> Story:
    story = healthy()
    story.fail(3, "exception", error="RuntimeError: CUDA error: device-side assert triggered")
    return story


def unprotected() -> Story:
    story = healthy()
    story.add(
        "persist_failed",
        generation=story.generation,
        step=400,
        attempt=1,
        rank=2,
        error="No space left on device",
        transient=False,
        no_space=True,
    )
    story.add(
        "save_failed", generation=story.generation, step=400, attempt=1, reason="No space left on device", final=True
    )
    story.now += 300
    story.add("unprotected", since=story.now - 400, seconds=400.0, reason="[Errno 28] No space left on device")
    return story


def finished() -> Story:
    story = healthy()
    story.train(1000 - story.step)
    story.finish()
    return story


def stopped(error: str = HOSTILE) -> Story:
    story = healthy()
    for _ in range(3):
        story.fail(1, "exception", error=error)
        story.begin("failure", source="checkpoint", restored=story.saved, takes=9)
    story.fail(1, "exception", error=error)
    story.add("quarantine", checkpoint=error, reason=error)
    story.stop(f"The run was stopped because {error}\nno progress over 4 restarts; first cause: {error}")
    return story


STORIES = {
    "healthy": healthy,
    "recovering": recovering,
    "unprotected": unprotected,
    "finished": finished,
    "stopped": stopped,
}


def live(story: Story, *, silent: int | None = None) -> dict[str, Any]:
    """What a coordinator adds."""
    return {
        "state": "running",
        "generation": story.generation,
        "step": story.step,
        "loss": 2.3456789,
        "copied_step": story.step - 5,
        "ranks": [
            {
                "rank": rank,
                "pid": 2000 + rank,
                "agent_pid": 100 + rank,
                "node_id": NODES[rank % 2],
                "step": story.step,
                "heard_at": story.now - (75.0 if rank == silent else 0.4),
            }
            for rank in range(story.ranks)
        ],
        "keepers": [],
    }
