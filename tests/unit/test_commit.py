"""The save state machine: single situations in words, then a simulated cluster that does everything in any order."""

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.decide.commit import (
    ALL_STEPS,
    FAILURES_MAX,
    Abandon,
    Commit,
    CommitMachine,
    Corruption,
    Decision,
    Persist,
    Release,
    Skip,
)
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, eligible
from workers.checkpoint.manifest import ShardRecord, checkpoint_name, shard_file

WORLD = 2


def generation(number: int, parent: int | None = None, step: int = 0) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver="d",
        parent=None,
        parent_generation=parent,
        restored_step=step,
        source="fresh" if parent is None else "memory",
        reason="start",
        created_at=0.0,
        world_size=WORLD,
    )


def shard(rank: int, attempt: int = 1) -> ShardRecord:
    return ShardRecord(
        file=shard_file(rank, WORLD), rank=rank, bytes=1, digest=str(attempt), verified_from="device", tensors=()
    )


class Driven:
    """A machine in generation 1, and short ways to say what happens to it."""

    def __init__(self, *, rebuilding: bool = False) -> None:
        self.machine = CommitMachine(rebuilding=rebuilding)
        self.generations = [generation(1)]
        self.machine.generation_started(self.generations, at=0.0)

    def snapshot(self, step: int, gen: int = 1, ranks: tuple[int, ...] = (0, 1), **about: Any) -> list[Decision]:
        decisions: list[Decision] = []
        for rank in ranks:
            decisions += self.machine.snapshotted(rank, gen, step, at=0.0, **about)
        return decisions

    def kept(self, step: int, gen: int = 1, ranks: tuple[int, ...] = (0, 1), **about: Any) -> list[Decision]:
        """A snapshot that is not due to be written."""
        return self.snapshot(step, gen, ranks, durable=False, **about)

    def saved(self, step: int, gen: int = 1) -> None:
        self.snapshot(step, gen)
        self.persisted(step, gen=gen)
        self.committed(step, gen=gen)

    def restored(self, number: int, parent: int, step: int) -> list[Decision]:
        """Another generation begins, from what this one had reached."""
        self.generations.append(generation(number, parent=parent, step=step))
        return self.machine.generation_started(self.generations, at=0.0)

    def persisted(self, step: int, attempt: int = 1, gen: int = 1, ranks: tuple[int, ...] = (0, 1)) -> list[Decision]:
        decisions: list[Decision] = []
        for rank in ranks:
            decisions += self.machine.shard_persisted(rank, gen, step, attempt, shard(rank, attempt), at=0.0)
        return decisions

    def failed(self, step: int, attempt: int = 1, *, at: float = 0.0, transient: bool = True) -> list[Decision]:
        return self.machine.persist_failed(0, 1, step, attempt, error="disk", transient=transient, at=at)

    def committed(self, step: int, attempt: int = 1, gen: int = 1) -> list[Decision]:
        return self.machine.committed(gen, step, attempt, at=0.0)


def persist(step: int, attempt: int = 1, gen: int = 1, ranks: tuple[int, ...] = (0, 1)) -> Persist:
    return Persist(generation=gen, step=step, attempt=attempt, ranks=ranks)


def commit(step: int, attempt: int = 1, gen: int = 1) -> Commit:
    return Commit(generation=gen, step=step, attempt=attempt, shards=(shard(0, attempt), shard(1, attempt)))


def release(upto: int, *keep: int, gen: int = 1) -> Release:
    return Release(generation=gen, upto_step=upto, keep=keep)


def test_nothing_is_written_before_all_ranks_have_a_snapshot_and_nothing_committed_before_all_receipts() -> None:
    run = Driven()
    assert run.snapshot(20, ranks=(0,)) == []
    assert persist(20) in run.snapshot(20, ranks=(1,))
    assert run.persisted(20, ranks=(1,)) == []
    assert run.persisted(20, ranks=(0,)) == [commit(20)]


def test_events_that_come_twice_change_nothing() -> None:
    run = Driven()
    run.snapshot(20)
    assert [item for item in run.snapshot(20) if not isinstance(item, Release)] == []
    assert run.persisted(20, ranks=(0, 0)) == []
    assert run.persisted(20, ranks=(1,)) == [commit(20)]
    assert run.persisted(20) == []
    run.committed(20)
    assert run.committed(20) == []
    assert run.persisted(20) == []
    assert run.snapshot(20, ranks=(0,)) == [release(20, 20)]
    assert run.machine.idle


def test_a_committed_step_is_saved_once_more_as_the_next_attempt_if_the_ranks_mean_it() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20)
    run.committed(20)
    machine = run.machine
    assert [d for d in machine.snapshotted(0, 1, 20, at=0.0, again=True) if not isinstance(d, Release)] == []
    decisions = machine.snapshotted(1, 1, 20, at=0.0, again=True)
    assert [d for d in decisions if isinstance(d, Persist)] == [Persist(generation=1, step=20, attempt=2, ranks=(0, 1))]


def test_an_older_step_is_not_saved_once_more_even_if_asked() -> None:
    run = Driven()
    for step in (20, 40):
        run.snapshot(step)
        run.persisted(step)
        run.committed(step)
    for rank in (0, 1):
        decisions = run.machine.snapshotted(rank, 1, 20, at=0.0, again=True)
        assert all(isinstance(decision, Release) for decision in decisions)


def test_one_save_is_written_at_a_time_and_the_newest_complete_one_is_next() -> None:
    run = Driven()
    run.snapshot(20)
    assert run.snapshot(40) == [release(40, 20, 40)]
    skipped = run.snapshot(60)
    assert skipped == [
        Skip(generation=1, step=40, reason="the snapshot of step 60 is newer and complete"),
        release(60, 20, 60),
    ]
    run.persisted(20)
    assert run.committed(20) == [persist(60), release(60, 60)]


def test_the_newest_complete_snapshot_stays_in_memory_after_its_commit() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20)
    assert run.committed(20) == []
    assert release(40, 40) in run.snapshot(40)


def test_a_save_that_every_rank_skips_is_told_of_all_the_same() -> None:
    run = Driven()
    run.snapshot(10)
    for step in (20, 30):
        for rank in range(WORLD):
            decisions = run.machine.snapshot_skipped(rank, 1, step, reason="no free slot", at=0.0)
            assert Skip(generation=1, step=step, reason=f"rank {rank} made no snapshot: no free slot") in decisions


def test_a_rank_without_a_free_slot_skips_that_step_for_all_and_frees_the_others() -> None:
    run = Driven()
    run.snapshot(20)
    run.snapshot(40, ranks=(1,))
    decisions = run.machine.snapshot_skipped(0, 1, 40, reason="no free slot", at=0.0)
    assert decisions == [
        Skip(generation=1, step=40, reason="rank 0 made no snapshot: no free slot"),
        release(40, 20),
    ]


def test_a_rank_that_is_past_a_step_will_not_report_it_any_more() -> None:
    run = Driven()
    run.snapshot(20, ranks=(1,))
    assert run.snapshot(40, ranks=(0,)) == [
        Skip(generation=1, step=20, reason="rank 0 made no snapshot"),
        release(20),
    ]


def test_a_failed_attempt_is_followed_by_the_next_number_after_a_wait_that_grows_and_only_so_often() -> None:
    run = Driven()
    run.snapshot(20)
    assert run.failed(20) == [Abandon(generation=1, step=20, attempt=1, reason="rank 0: disk", final=False)]
    assert run.machine.wakeup_at == 1.0
    assert run.machine.tick(at=0.9) == []
    assert run.machine.tick(at=1.0) == [persist(20, attempt=2)]
    run.failed(20, attempt=2, at=10.0)
    assert run.machine.wakeup_at == 12.0
    assert run.machine.tick(at=12.0) == [persist(20, attempt=3)]
    last = run.failed(20, attempt=FAILURES_MAX, at=13.0)
    assert last == [Abandon(generation=1, step=20, attempt=3, reason="rank 0: disk", final=True)]
    assert run.machine.idle


def test_receipts_of_a_failed_attempt_never_complete_a_later_one() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20, ranks=(1,))
    run.failed(20)
    run.machine.tick(at=1.0)
    assert run.persisted(20, attempt=1) == []
    assert run.persisted(20, attempt=2, ranks=(0,)) == []
    assert run.persisted(20, attempt=2, ranks=(1,)) == [commit(20, attempt=2)]


def test_an_error_that_will_not_pass_gives_the_step_up_at_once() -> None:
    run = Driven()
    run.snapshot(20)
    assert run.failed(20, transient=False) == [
        Abandon(generation=1, step=20, attempt=1, reason="rank 0: disk", final=True)
    ]


def test_instead_of_trying_again_a_newer_snapshot_is_written() -> None:
    run = Driven()
    run.snapshot(20)
    run.snapshot(40)
    decisions = run.failed(20)
    assert [type(item) for item in decisions] == [Abandon, Abandon, Persist, Release]
    assert persist(40) in decisions


def test_a_save_of_a_dead_generation_is_finished_after_its_end() -> None:
    run = Driven()
    run.snapshot(20)
    assert run.machine.generation_ended(1, at=0.0) == [release(ALL_STEPS, 20)]
    run.machine.generation_started([generation(1), generation(2, 1, 20)], at=0.0)
    assert run.persisted(20) == [commit(20)]
    assert run.committed(20) == []


def test_a_save_that_the_next_generation_does_not_continue_from_is_given_up_and_its_memory_freed() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20)
    run.committed(20)
    run.snapshot(40)
    decisions = run.machine.generation_started([generation(1), generation(2, 1, 20)], at=0.0)
    assert [type(item) for item in decisions] == [Abandon, Release]
    assert decisions[1] == release(ALL_STEPS)
    assert run.persisted(40) == []


def test_a_late_snapshot_of_an_old_generation_is_answered_with_its_release() -> None:
    run = Driven()
    run.machine.generation_started([generation(1), generation(2, 1, 0)], at=0.0)
    assert run.snapshot(20, ranks=(0,)) == [release(ALL_STEPS)]


def test_a_generation_that_started_before_is_not_started_again() -> None:
    run = Driven()
    run.machine.generation_started([generation(1), generation(2)], at=0.0)
    assert run.machine.generation_started([generation(1)], at=0.0) == []
    assert persist(20, gen=2) in run.snapshot(20, gen=2)


def test_without_the_memory_of_a_keeper_only_what_it_has_written_can_be_committed() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20, ranks=(0,))
    assert [item for item in run.machine.keeper_lost([0], at=0.0) if not isinstance(item, Release)] == []
    assert run.persisted(20, ranks=(1,)) == [commit(20)]


def test_a_lost_keeper_ends_the_attempt_and_another_follows_when_its_ranks_hand_their_memory_over_again() -> None:
    run = Driven()
    run.snapshot(20)
    lost = run.machine.keeper_lost([0], at=0.0)
    assert lost[0] == Abandon(generation=1, step=20, attempt=1, reason="the keeper of rank 0 is lost", final=False)
    assert run.machine.idle
    assert persist(20, attempt=2) in run.snapshot(20, ranks=(0,))


def test_a_keeper_that_held_another_generations_snapshots_is_not_missed() -> None:
    run = Driven()
    run.snapshot(20)
    assert run.machine.keeper_lost([0], at=0.0, generation=2) == []
    assert isinstance(run.machine.keeper_lost([0], at=0.0, generation=1)[0], Abandon)


def test_a_save_that_a_lost_keeper_was_to_write_holds_up_no_later_one() -> None:
    run = Driven()
    run.snapshot(20)
    run.machine.generation_started([generation(1), generation(2, 1, 0)], at=0.0)
    run.machine.keeper_lost([0], at=0.0, generation=1)
    assert persist(30, gen=2) in run.snapshot(30, gen=2)


def test_a_shard_that_failed_after_another_keeper_was_lost_waits_for_that_keepers_memory() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20, ranks=(1,))
    run.machine.keeper_lost([1], at=0.0)
    assert [(type(item), getattr(item, "final", None)) for item in run.failed(20)] == [(Abandon, False)]
    assert run.machine.wakeup_at is None
    assert persist(20, attempt=2) in run.snapshot(20, ranks=(1,))


def test_memory_that_a_lost_keeper_leaves_useless_is_freed_when_its_rank_goes_on_in_another_generation() -> None:
    # Found by the simulated cluster: both slots of rank 1 stayed taken, and nothing was ever saved again.
    run = Driven()
    run.snapshot(1)
    run.snapshot(2)
    run.machine.generation_started([generation(1), generation(2, 1, 2)], at=0.0)
    run.machine.keeper_lost([0], at=0.0)
    decisions = run.snapshot(3, gen=2, ranks=(0,))
    assert [item.step for item in decisions if isinstance(item, Skip)] == [1, 2]
    assert release(ALL_STEPS, 2) in decisions


def test_a_manifest_that_could_not_be_written_is_tried_again_with_the_same_shards() -> None:
    run = Driven()
    run.snapshot(20)
    run.persisted(20)
    assert run.machine.commit_failed(1, 20, 1, error="disk", transient=True, at=5.0) == []
    assert run.machine.tick(at=6.0) == [commit(20)]
    given_up = run.machine.commit_failed(1, 20, 1, error="fenced", transient=False, at=7.0)
    assert given_up == [Abandon(generation=1, step=20, attempt=1, reason="fenced", final=True)]


def test_a_coordinator_that_comes_back_goes_on_with_what_was_being_written() -> None:
    run = Driven(rebuilding=True)
    assert run.committed(20) == []
    assert run.snapshot(20) == []
    for rank in (0, 1):
        assert run.machine.snapshotted(rank, 1, 40, attempt=2, at=0.0) == []
    assert run.snapshot(60) == []
    assert run.persisted(40, attempt=1) == []
    assert run.persisted(40, attempt=2, ranks=(1,)) == []
    assert run.machine.rebuilt(at=0.0) == [persist(40, attempt=2, ranks=(0,)), release(60, 40, 60)]
    assert run.persisted(40, attempt=2, ranks=(0,)) == [commit(40, attempt=2)]
    assert persist(60) in run.committed(40, attempt=2)


def test_a_coordinator_that_comes_back_commits_what_is_complete_on_disk_although_its_memory_is_gone() -> None:
    run = Driven(rebuilding=True)
    run.persisted(40)
    assert run.machine.rebuilt(at=0.0)[0] == commit(40)


def test_a_coordinator_that_comes_back_does_not_save_again_what_is_committed() -> None:
    run = Driven(rebuilding=True)
    run.committed(20)
    run.snapshot(20)
    run.persisted(20)
    assert run.machine.rebuilt(at=0.0) == [release(20, 20)]


# ---------------------------------------------------------------- what stays in memory


UNLIKE = {"sets": [{"holders": [0, 1], "layout": "l", "digests": {"w": [0, 8, "1"]}, "values": {}}]}
ALIKE = {"sets": [{"holders": [0, 1], "layout": "l", "digests": {"w": [0, 8, "0"]}, "values": {}}]}


def test_a_set_that_is_not_due_is_kept_and_not_written_until_a_newer_one_is_complete() -> None:
    run = Driven()
    assert run.kept(12) == [release(12, 12)]
    assert run.machine.in_memory == (1, 12)
    assert run.machine.idle
    assert run.kept(14, ranks=(0,)) == []
    assert run.machine.in_memory == (1, 12), "a set that is not complete"
    assert run.kept(14, ranks=(1,)) == [release(14, 14)]
    assert run.machine.in_memory == (1, 14)


def test_after_a_failure_the_newest_set_is_committed_once_while_the_next_generation_runs() -> None:
    run = Driven()
    run.saved(10)
    run.kept(12)
    ended = run.machine.generation_ended(1, at=0.0)
    assert ended == [persist(12), Release(generation=1, upto_step=ALL_STEPS, keep=(12,))]
    assert run.restored(2, parent=1, step=12) == []
    assert run.machine.in_memory == (1, 12), "the next generation is restoring it"
    assert run.persisted(12) == [commit(12)]
    run.committed(12)
    assert run.machine.in_memory == (1, 12)
    assert persist(12) not in run.machine.generation_ended(2, at=0.0), "it is committed already"


def test_a_failure_that_is_judged_by_a_coordinator_that_comes_back_has_the_set_committed_too() -> None:
    run = Driven(rebuilding=True)
    run.kept(12)
    assert run.machine.rebuilt(at=0.0) == [release(12, 12)]
    assert run.machine.in_memory == (1, 12)
    assert persist(12) in run.restored(2, parent=1, step=12)


def test_a_coordinator_that_comes_back_in_the_next_generation_has_the_set_committed() -> None:
    machine = CommitMachine(rebuilding=True)
    machine.generation_started([generation(1), generation(2, parent=1, step=12)], at=0.0)
    for rank in (0, 1):
        machine.snapshotted(rank, 1, 12, durable=False, at=0.0)
    assert persist(12) in machine.rebuilt(at=0.0)


def test_a_save_that_waits_does_not_give_way_to_a_set_that_is_not_due() -> None:
    run = Driven()
    run.snapshot(10)
    run.snapshot(20)
    assert run.kept(22) == [release(22, 10, 20, 22)]
    run.persisted(10)
    assert persist(20) in run.committed(10)


def test_after_a_failure_the_newest_set_takes_the_place_of_a_save_that_waits() -> None:
    run = Driven()
    run.snapshot(10)
    run.snapshot(20)
    run.kept(22)
    ended = run.machine.generation_ended(1, at=0.0)
    assert Skip(generation=1, step=20, reason="the snapshot of step 22 is newer and complete") in ended
    run.persisted(10)
    assert persist(22) in run.committed(10)


def test_sets_that_are_not_due_and_never_get_complete_are_no_event() -> None:
    run = Driven()
    run.kept(12, ranks=(0,))
    skipped = run.machine.snapshot_skipped(1, 1, 12, reason="no free slot", durable=False, at=0.0)
    assert skipped == [release(12)]
    run.kept(14, ranks=(0,))
    assert run.kept(16, ranks=(1,)) == [release(14)]


def test_a_set_that_is_snapshotted_once_more_to_be_written_is_complete_when_all_ranks_did() -> None:
    run = Driven()
    run.kept(12, digest="a")
    assert run.snapshot(12, ranks=(0,), digest="b") == []
    assert run.machine.in_memory is None, "one rank's is newer than the other's"
    assert run.kept(12, ranks=(0,), digest="b") == [], "told twice"
    assert run.snapshot(12, ranks=(1,), digest="b") == [persist(12)]
    assert run.machine.in_memory == (1, 12)


def test_a_rank_without_a_slot_for_a_set_that_is_not_due_does_not_stop_the_save_of_that_step() -> None:
    run = Driven()
    run.snapshot(12, ranks=(0,))
    assert run.machine.snapshot_skipped(1, 1, 12, reason="no free slot", durable=False, at=0.0) == []
    assert persist(12) in run.snapshot(12, ranks=(1,))


def test_a_set_of_which_replicas_differ_is_never_restorable() -> None:
    run = Driven()
    run.kept(12, said=ALIKE)
    run.kept(14, ranks=(0,), said=ALIKE)
    found = run.kept(14, ranks=(1,), said=UNLIKE)
    assert isinstance(found[0], Corruption)
    assert (found[0].step, found[0].attempt) == (14, 0)
    assert run.machine.in_memory is None, "nor is an earlier one of that generation"
    assert set(run.kept(16, said=ALIKE)) == {Release(generation=1, upto_step=ALL_STEPS, keep=())}


def test_a_set_of_a_lost_keeper_is_restorable_again_once_it_is_handed_over() -> None:
    run = Driven()
    run.snapshot(10, digest="a")
    run.persisted(10)
    run.committed(10)
    assert run.machine.in_memory == (1, 10)
    run.machine.keeper_lost([0], at=0.0)
    assert run.machine.in_memory is None
    assert run.snapshot(10, ranks=(0,), digest="a") == [release(10, 10)]
    assert run.machine.in_memory == (1, 10)


def test_a_set_that_did_not_verify_is_neither_restored_nor_written() -> None:
    run = Driven()
    run.kept(12)
    assert run.machine.memory_dropped(1, 12, reason="bad", at=0.0) == [release(12)]
    assert run.machine.in_memory is None
    assert run.machine.generation_ended(1, at=0.0) == [Release(generation=1, upto_step=ALL_STEPS, keep=())]


def test_a_set_that_is_off_the_lineage_is_given_up() -> None:
    run = Driven()
    run.saved(10)
    run.kept(12)
    run.machine.generation_ended(1, at=0.0)
    started = run.restored(2, parent=1, step=10)
    assert (
        Abandon(generation=1, step=12, attempt=1, reason="generation 2 does not continue from it", final=True)
        in started
    )
    assert run.machine.in_memory is None


Key = tuple[int, int]


class Cluster(RuleBasedStateMachine):
    """Ranks with three slots each, keepers, a disk and the machine. Each keeper's events arrive late but in order.

    Checked at every decision: that it may be made. Checked at the end: that saving still works.
    """

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = CommitMachine()
        self.generations = [generation(1)]
        self.step = 0
        self.slots: list[set[Key]] = [set() for _ in range(WORLD)]
        self.mail: list[deque[tuple[str, dict[str, Any]]]] = [deque() for _ in range(WORLD)]
        self.delivered: list[tuple[str, dict[str, Any]]] = []
        self.ordered: dict[Key, int] = {}  # highest attempt
        self.todo: list[tuple[int, Persist]] = []
        self.outcomes: dict[tuple[int, Key, int], bool] = {}
        self.written: set[tuple[int, Key, int]] = set()
        self.failed_attempts: set[tuple[Key, int]] = set()
        self.commits: list[Commit] = []
        self.disk: set[Key] = set()
        self.reported: dict[Key, set[int]] = {}
        self.unlike: set[Key] = set()  # of which the ranks do not hold alike what they must
        self.due: set[Key] = set()  # to be written
        self.over: set[int] = set()  # generations that have ended, as the machine knows
        self.corrupt: set[int] = set()  # generations of which the machine has found that

    # What the machine decides

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Persist):
                self.check_persist(decision)
            elif isinstance(decision, Commit):
                self.check_commit(decision)
            elif isinstance(decision, Corruption):
                assert (decision.generation, decision.step) in self.unlike, "a false alarm"
                self.corrupt.add(decision.generation)
            elif isinstance(decision, Abandon):
                key = (decision.generation, decision.step)
                self.failed_attempts.add((key, decision.attempt))
                self.commits = [c for c in self.commits if (c.generation, c.step) != key]
            elif isinstance(decision, Release):
                self.check_release(decision)
        assert len(self.machine.in_flight) <= 1

    def check_persist(self, order: Persist) -> None:
        key = (order.generation, order.step)
        assert self.counts(key), "writes what can never be restored"
        assert (key, order.attempt) not in self.failed_attempts, "orders a failed attempt again"
        assert key not in self.disk
        assert key in self.due or key[0] in self.over, "writes what was only to stay in memory"
        for rank in range(WORLD):
            assert key in self.slots[rank] or (rank, key, order.attempt) in self.written, "writes an incomplete set"
        self.ordered[key] = max(order.attempt, self.ordered.get(key, 0))
        self.todo += [(rank, order) for rank in order.ranks]

    def check_commit(self, order: Commit) -> None:
        key = (order.generation, order.step)
        assert [item.rank for item in order.shards] == list(range(WORLD))
        for rank in range(WORLD):
            assert (rank, key, order.attempt) in self.written, "commits what no keeper has written"
        assert {item.digest for item in order.shards} == {str(order.attempt)}, "mixes attempts"
        assert key not in self.unlike, "commits replicas that differ"
        assert key[0] not in self.corrupt, "commits what a generation with corrupt memory has left"
        self.commits.append(order)

    def check_release(self, order: Release) -> None:
        complete = self.complete()
        for rank in range(WORLD):
            for key in list(self.slots[rank]):
                if key[0] == order.generation and key[1] <= order.upto_step and key[1] not in order.keep:
                    assert key != max(complete, default=None), "releases the newest complete snapshot"
                    name = checkpoint_name(key[1], key[0], self.ordered.get(key, 0))
                    assert name not in self.machine.in_flight, "releases what is being written"
                    self.slots[rank].discard(key)
                    self.reported.get(key, set()).discard(rank)

    def counts(self, key: Key) -> bool:
        record = CheckpointRecord(name="", generation=key[0], step=key[1], attempt=1)
        return bool(eligible(self.generations, [record]))

    def complete(self) -> list[Key]:
        """The states on the lineage that lie in the memory of all ranks and may be used."""
        all_ranks = (key for key, ranks in self.reported.items() if len(ranks) == WORLD)
        return [key for key in all_ranks if self.counts(key) and key[0] not in self.corrupt]

    def said(self, rank: int, key: Key) -> dict[str, Any]:
        digest = str(rank) if key in self.unlike else "same"
        return {"sets": [{"holders": [0, 1], "layout": "l", "digests": {"w": [0, 8, digest]}, "values": {}}]}

    # What happens to it

    def post(self, rank: int, kind: str, /, **fields: Any) -> None:
        self.mail[rank].append((kind, fields))

    def deliver(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "snapshotted" and (fields["generation"], fields["step"]) in self.slots[fields["rank"]]:
            self.reported.setdefault((fields["generation"], fields["step"]), set()).add(fields["rank"])
        self.carry_out(getattr(self.machine, kind)(at=self.now, **fields))

    def snapshot_of(self, rank: int, key: Key) -> dict[str, Any]:
        about = {"rank": rank, "generation": key[0], "step": key[1]}
        return {**about, "durable": key in self.due, "said": self.said(rank, key)}

    @initialize()
    def start(self) -> None:
        self.carry_out(self.machine.generation_started(self.generations, at=self.now))

    @rule(
        ranks=st.sampled_from([(0, 1), (0, 1), (0, 1), (0,), (1,)]),
        alike=st.sampled_from([True, True, True, False]),
        durable=st.booleans(),
    )
    def a_step_is_saved(self, ranks: tuple[int, ...], alike: bool = True, durable: bool = True) -> None:
        self.step += 1
        key = (self.generations[-1].number, self.step)
        if not alike:
            self.unlike.add(key)
        if durable:
            self.due.add(key)
        for rank in ranks:
            about = self.snapshot_of(rank, key)
            # What is not due leaves a slot for what is.
            if len(self.slots[rank]) < self.SLOTS - (0 if durable else 1):
                self.slots[rank].add(key)
                self.post(rank, "snapshotted", **about)
            else:
                del about["said"]
                self.post(rank, "snapshot_skipped", **about, reason="no free slot")

    @precondition(lambda self: any(self.mail))
    @rule(data=st.data())
    def an_event_arrives(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in range(WORLD) if self.mail[rank]]))
        kind, fields = self.mail[rank].popleft()
        self.delivered.append((kind, fields))
        self.deliver(kind, fields)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def an_event_arrives_again(self, data: st.DataObject) -> None:
        kind, fields = data.draw(st.sampled_from(self.delivered))
        before = self.machine.in_flight
        self.carry_out(getattr(self.machine, kind)(at=self.now, **fields))
        assert self.machine.in_flight == before or self.machine.wakeup_at is None

    @precondition(lambda self: self.todo)
    @rule(index=st.integers(0, 5), works=st.sampled_from(["yes", "yes", "yes", "no", "never"]))
    def a_keeper_writes(self, index: int, works: str = "yes") -> None:
        rank, order = self.todo.pop(index % len(self.todo))
        key = (order.generation, order.step)
        about = {"rank": rank, "generation": order.generation, "step": order.step, "attempt": order.attempt}
        outcome = self.outcomes.get((rank, key, order.attempt))
        if outcome is None and key not in self.slots[rank]:
            name = checkpoint_name(order.step, order.generation, order.attempt)
            assert name not in self.machine.in_flight or any(self.mail), "the memory was released too early"
            outcome = False
        if outcome is None:
            outcome = self.outcomes[rank, key, order.attempt] = works == "yes"
        if outcome:
            self.written.add((rank, key, order.attempt))
            shard_persisted = {"shard": shard(rank, order.attempt), "said": self.said(rank, key)}
            self.post(rank, "shard_persisted", **shard_persisted, **about)
        else:
            self.post(rank, "persist_failed", error="disk", transient=works != "never", **about)

    @precondition(lambda self: self.commits)
    @rule(works=st.sampled_from(["yes", "yes", "no", "never"]))
    def a_manifest_is_written(self, works: str = "yes") -> None:
        order = self.commits.pop()
        about = {"generation": order.generation, "step": order.step, "attempt": order.attempt}
        if works == "yes":
            self.disk.add((order.generation, order.step))
            self.carry_out(self.machine.committed(**about, at=self.now))
        else:
            failed = self.machine.commit_failed(**about, error="disk", transient=works == "no", at=self.now)
            self.carry_out(failed)

    @rule()
    def time_passes(self) -> None:
        self.now += 5.0
        self.carry_out(self.machine.tick(at=self.now))

    @rule(rank=st.integers(0, WORLD - 1), rank_lives=st.booleans())
    def a_keeper_is_lost(self, rank: int, rank_lives: bool) -> None:
        held = sorted(self.slots[rank])
        self.slots[rank].clear()
        self.mail[rank].clear()
        self.delivered = [event for event in self.delivered if event[1]["rank"] != rank]
        self.todo = [(other, order) for other, order in self.todo if other != rank]
        self.outcomes = {key: outcome for key, outcome in self.outcomes.items() if key[0] != rank}
        for ranks in self.reported.values():
            ranks.discard(rank)
        self.carry_out(self.machine.keeper_lost([rank], at=self.now))
        if rank_lives:
            self.slots[rank].update(held)
            for key in held:
                self.due.add(key)  # for all that the keeper knows
                self.post(rank, "snapshotted", **self.snapshot_of(rank, key))

    @rule(data=st.data(), all_is_known=st.booleans())
    def a_generation_ends_and_another_starts(self, data: st.DataObject, all_is_known: bool) -> None:
        if all_is_known:
            while any(self.mail):
                rank = next(rank for rank in range(WORLD) if self.mail[rank])
                self.deliver(*self.mail[rank].popleft())
            self.over.add(self.generations[-1].number)
            self.carry_out(self.machine.generation_ended(self.generations[-1].number, at=self.now))
        states = sorted({*self.complete(), *(key for key in self.disk if self.counts(key))})
        self.another_starts(data.draw(st.none() | st.sampled_from(states)) if states else None)

    def another_starts(self, origin: Key | None) -> None:
        self.over.add(self.generations[-1].number)
        number = self.generations[-1].number + 1
        if origin is None:
            self.generations.append(generation(number))
        else:
            self.generations.append(generation(number, parent=origin[0], step=origin[1]))
        self.step = origin[1] if origin else 0
        self.carry_out(self.machine.generation_started(self.generations, at=self.now))

    @rule()
    def the_coordinator_is_killed_and_comes_back(self) -> None:
        self.commits.clear()
        self.corrupt.clear()  # it finds that again, if the receipts are still there
        for rank, held in enumerate(self.slots):
            # A keeper refuses to write what was released meanwhile, but this model has no order that is refused.
            mail = self.mail[rank]
            stale = [
                one for one in mail if one[0] == "snapshotted" and (one[1]["generation"], one[1]["step"]) not in held
            ]
            self.mail[rank] = deque(one for one in mail if one not in stale)
        self.failed_attempts.clear()  # it does not know of them; keepers refuse to write a file twice
        self.machine = CommitMachine(rebuilding=True)
        assert self.machine.generation_started(self.generations, at=self.now) == []
        for gen, step in self.disk:
            assert self.machine.committed(gen, step, self.ordered[gen, step], at=self.now) == []
        for rank in range(WORLD):
            for gen, step in self.slots[rank]:
                last = max(
                    (o.attempt for r, o in self.todo if r == rank and (o.generation, o.step) == (gen, step)), default=0
                )
                done = max((a for r, key, a in self.outcomes if r == rank and key == (gen, step)), default=0)
                about = self.snapshot_of(rank, (gen, step))
                self.machine.snapshotted(**about, attempt=max(last, done), at=self.now)
                self.reported.setdefault((gen, step), set()).add(rank)
            for owner, key, attempt in self.outcomes:
                if owner == rank and self.outcomes[owner, key, attempt]:
                    about = {"rank": rank, "generation": key[0], "step": key[1], "attempt": attempt}
                    said = self.said(rank, key)
                    self.machine.shard_persisted(**about, shard=shard(rank, attempt), said=said, at=self.now)
        self.carry_out(self.machine.rebuilt(at=self.now))

    @invariant()
    def a_rank_never_holds_more_than_its_slots(self) -> None:
        assert all(len(held) <= self.SLOTS for held in self.slots)

    @invariant()
    def what_is_restorable_is_the_newest_set_that_is_complete_and_alike(self) -> None:
        found = self.machine.in_memory
        assert found == max((key for key in self.complete() if key not in self.unlike), default=None)

    def teardown(self) -> None:
        """The faults stop: within a few steps a save of all ranks is committed, and then nothing is under way."""
        self.settle()
        if self.generations[-1].number in self.corrupt:
            self.another_starts(None)
        for _ in range(2 * self.SLOTS + 2):
            self.a_step_is_saved(ranks=(0, 1))
            self.settle()
        assert (self.generations[-1].number, self.step) in self.disk
        assert self.machine.idle
        self.a_step_is_saved(ranks=(0, 1), durable=False)
        self.settle()
        newest = (self.generations[-1].number, self.step)
        assert newest not in self.disk
        assert self.machine.in_memory == newest
        self.over.add(newest[0])
        self.carry_out(self.machine.generation_ended(newest[0], at=self.now))
        self.another_starts(newest)
        self.settle()
        assert newest in self.disk

    def settle(self) -> None:
        for _ in range(1000):
            if any(self.mail):
                rank = next(rank for rank in range(WORLD) if self.mail[rank])
                self.deliver(*self.mail[rank].popleft())
            elif self.todo:
                self.a_keeper_writes(index=0, works="yes")
            elif self.commits:
                self.a_manifest_is_written(works="yes")
            elif self.machine.wakeup_at is not None:
                self.time_passes()
            else:
                return
        raise AssertionError("it never comes to rest")


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
