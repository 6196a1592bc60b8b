"""Why agents are gone that cannot be asked."""

from orchestrator.decide.losses import Losses, WorkerLoss
from orchestrator.ray_losses import loss_of
from workers.memory_watch import MemorySeen

OOM = WorkerLoss(kind="oom", message="Ray's words")
LOST = WorkerLoss(kind="agent_lost", message="Ray's words")


def memory(group_rss_bytes: int) -> MemorySeen:
    return MemorySeen(
        at=1.0,
        rss_bytes=1,
        peak_bytes=2,
        group_rss_bytes=group_rss_bytes,
        group_peak_bytes=group_rss_bytes,
        available_bytes=4,
        limit_bytes=None,
    )


def test_the_agent_that_ray_names_comes_before_those_that_ray_replaced_with_it() -> None:
    losses = Losses()
    losses.lost("b", LOST)
    first, second = losses.explain({"a": 5.0, "b": 6.0})
    assert (first.agent, first.kind, first.at, first.detail) == ("b", "agent_lost", 6.0, {"ray": "Ray's words"})
    assert (second.agent, second.kind, second.at, second.detail) == ("a", "agent_lost", 6.0, {})


def test_without_rays_word_the_one_that_fell_silent_first_is_the_first() -> None:
    assert [(one.agent, one.at) for one in Losses().explain({"a": 6.0, "b": 5.0})] == [("b", 5.0), ("a", 6.0)]


def test_of_those_killed_for_memory_the_largest_is_the_first_with_what_it_used() -> None:
    losses = Losses()
    for agent, size in (("a", 10), ("b", 30), ("c", 20)):
        losses.uses_memory(agent, memory(size))
        losses.lost(agent, OOM)
    explained = losses.explain({"a": 1.0, "b": 3.0, "c": 2.0})
    assert [one.agent for one in explained] == ["b", "c", "a"]
    assert {one.at for one in explained} == {1.0}
    assert explained[0].kind == "oom"
    assert explained[0].detail["killer"] == "ray"
    assert explained[0].detail["memory"]["group_rss_bytes"] == 30


def test_rays_first_words_about_an_agent_count() -> None:
    losses = Losses()
    losses.lost("a", OOM)
    losses.lost("a", LOST)
    assert losses.explain({"a": 1.0})[0].kind == "oom"


def test_an_out_of_memory_error_is_recognised_inside_what_ray_train_wraps_it_in() -> None:
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    class Wrapped(Exception):
        def __init__(self, failure: Exception) -> None:
            super().__init__("a worker health check failed")
            self.health_check_failure = failure

    assert loss_of(Wrapped(OutOfMemoryError("full"))) == WorkerLoss(kind="oom", message="full")
    assert loss_of(OutOfMemoryError("full")).kind == "oom"
    assert loss_of(Wrapped(ActorDiedError())).kind == "agent_lost"
    assert loss_of(ValueError("x" * 10_000)).kind == "agent_lost"
    assert len(loss_of(ValueError("x" * 10_000)).message) == 4000
