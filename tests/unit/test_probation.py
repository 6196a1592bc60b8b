"""When a checkpoint is suspected of what follows it, and what the run does then."""

import random
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.budget import FailureBudget, Retry
from orchestrator.decide.ladder import FromMemory, Restore, choose
from orchestrator.decide.lineage import CheckpointRecord, GenerationRecord, MemorySet, eligible
from orchestrator.decide.probation import Probation
from workers.checkpoint.manifest import checkpoint_name

FRESH_UNTIL = 50
EVERY = 10


def generation(number: int, parent: CheckpointRecord | None) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        driver="d",
        parent=parent.name if parent else None,
        parent_generation=parent.generation if parent else None,
        restored_step=parent.step if parent else 0,
        source="checkpoint" if parent else "fresh",
        reason="",
        created_at=0.0,
        world_size=1,
    )


def checkpoint(step: int, number: int) -> CheckpointRecord:
    return CheckpointRecord(name=checkpoint_name(step, number, 1), generation=number, step=step, attempt=1)


class Story:
    """A run that has saved up to step 50 in its first generation; failures restart it as the coordinator would."""

    def __init__(self) -> None:
        self.probation = Probation()
        self.budget = FailureBudget(None, rng=random.Random(0))
        self.checkpoints: list[CheckpointRecord] = []
        self.generations = [generation(1, None)]
        self.probation.generation_started(None)
        self.restored: list[int] = []
        self.suspected: list[str] = []
        self.stopped = ""
        self.save_up_to(FRESH_UNTIL)

    def save_up_to(self, step: int) -> None:
        number = self.generations[-1].number
        first = self.generations[-1].restored_step + EVERY
        for saved in range(first - first % EVERY, step + 1, EVERY):
            if checkpoint(saved, number) not in self.checkpoints:
                self.checkpoints.append(checkpoint(saved, number))
                self.probation.committed(self.checkpoints[-1].name, saved)
                self.budget.committed(saved)

    def fails(self, cause: str, step: int, exit_code: int | None = None) -> None:
        if suspect := self.probation.failure(cause, step, exit_code):
            self.suspected.append(suspect)
        verdict = self.budget.failure(cause, step, exit_code)
        if not isinstance(verdict, Retry):
            self.stopped = verdict.reason
            return
        choice = choose(
            generations=self.generations,
            checkpoints=self.checkpoints,
            rejected={},
            suspects=self.probation.suspects,
        )
        assert isinstance(choice, Restore), "never afresh beside a checkpoint"
        parent = next(one for one in self.checkpoints if one.name == choice.name)
        self.generations.append(generation(self.generations[-1].number + 1, parent))
        self.restored.append(parent.step)
        self.probation.generation_started(parent.name)
        self.budget.generation_started(parent.step)


def test_a_checkpoint_that_cannot_be_trained_from_is_passed_over_for_the_one_before_and_never_comes_back() -> None:
    story = Story()
    story.fails("exception", 50)
    story.fails("exception", 50)
    assert story.restored == [50, 40]
    assert story.suspected == [checkpoint(50, 1).name]
    story.save_up_to(60)  # the older one was good
    assert story.probation.suspects == {}
    assert checkpoint(50, 1).name not in {one.name for one in eligible(story.generations, story.checkpoints)}
    story.fails("exception", 65)
    assert story.restored == [50, 40, 60]


def test_a_bug_at_one_step_is_tried_once_from_an_older_checkpoint_and_then_stopped() -> None:
    story = Story()
    for _ in range(3):
        story.fails("exception", 57)
    assert story.restored == [50, 40]
    assert story.stopped == "the training loop failed 3 times in a row after step 57"


@pytest.mark.parametrize(("cause", "tries"), [("exception", 2), ("exit", 2), ("hang", 4), ("loss", 4)])
def test_a_hang_has_to_come_more_often_than_an_exception_to_raise_a_suspicion(cause: str, tries: int) -> None:
    story = Story()
    for _ in range(tries):
        assert not story.suspected
        story.fails(cause, 57)
    assert story.suspected == [checkpoint(50, 1).name]


@pytest.mark.parametrize(
    ("cause", "exit_code"), [("agent_lost", None), ("rank_lost", None), ("oom", -9), ("signal", -signal.SIGKILL)]
)
def test_what_comes_from_the_machines_raises_no_suspicion(cause: str, exit_code: int | None) -> None:
    story = Story()
    for _ in range(5):
        story.fails(cause, 57, exit_code)
    assert story.restored == [50] * 5


def test_getting_further_is_no_ground_for_suspicion() -> None:
    story = Story()
    for step in range(51, 60):
        story.fails("exception", step)
    assert set(story.restored) == {50}


def test_a_save_that_is_finished_after_the_suspicion_is_passed_over_with_what_it_came_out_of() -> None:
    story = Story()
    story.fails("exception", 57)
    story.probation.failure("exception", 57)
    late = checkpoint(55, 2)
    story.probation.committed(late.name, 55)
    choice = choose(
        generations=story.generations,
        checkpoints=[*story.checkpoints, late],
        rejected={},
        suspects=story.probation.suspects,
    )
    assert isinstance(choice, Restore)
    assert choice.step == 40
    assert dict(choice.passed)[late.name] == f"came out of {checkpoint(50, 1).name}, which is on probation"


def test_a_state_on_probation_is_passed_over_in_memory_and_in_the_checkpoint_that_it_became() -> None:
    story = Story()
    memory = MemorySet(generation=1, step=57, where={0: "k"})
    began = replace(generation(2, None), parent_generation=1, restored_step=57, source="memory")
    suspects = {memory.name: "on probation"}
    newer = MemorySet(generation=2, step=59, where={0: "k"})
    for held in (memory, newer, None):
        choice = choose(
            generations=[*story.generations, began],
            checkpoints=[*story.checkpoints, checkpoint(57, 1)],
            rejected={},
            suspects=suspects,
            memory=held,
        )
        assert isinstance(choice, Restore)
        assert choice.step == 50
        assert dict(choice.passed)[checkpoint(57, 1).name] == "on probation"
    passed_over = choose(
        generations=[*story.generations, began],
        checkpoints=story.checkpoints,
        rejected={},
        suspects={checkpoint(57, 1).name: "on probation"},
        memory=newer,
    )
    assert isinstance(passed_over, Restore)
    assert dict(passed_over.passed) == {newer.name: f"came out of {checkpoint(57, 1).name}, which is on probation"}
    gone_back = replace(generation(3, checkpoint(50, 1)))
    again = choose(
        generations=[*story.generations, began, gone_back],
        checkpoints=story.checkpoints,
        rejected={},
        suspects=suspects,
        memory=MemorySet(generation=3, step=60, where={0: "k"}),
    )
    assert isinstance(again, FromMemory), "what did not come out of it is not suspected"


def test_a_run_that_fails_after_a_state_in_memory_suspects_that_by_its_name() -> None:
    probation = Probation()
    probation.generation_started("memory of step 57, generation 1")
    assert probation.failure("exception", 60) is None
    assert probation.failure("exception", 60) == "memory of step 57, generation 1"


def test_the_last_checkpoint_is_restored_also_on_probation() -> None:
    only = checkpoint(50, 1)
    choice = choose(
        generations=[generation(1, None)], checkpoints=[only], rejected={}, suspects={only.name: "on probation"}
    )
    assert choice == Restore(name=only.name, generation=1, step=50)


def test_a_run_that_fails_anywhere_goes_back_as_far_as_the_oldest_and_then_stops() -> None:
    story = Story()
    for number in range(40):
        if story.stopped:
            break
        story.fails("exception", story.generations[-1].restored_step + (0, 3, 1)[number % 3])
    assert story.stopped
    assert min(story.restored) >= EVERY


@given(
    st.lists(
        st.tuples(st.sampled_from(["exception", "hang", "signal", "agent_lost", "loss"]), st.integers(0, 70)),
        max_size=60,
    )
)
def test_whatever_fails_a_restore_goes_back_no_further_than_the_oldest_checkpoint(
    failures: list[tuple[str, int]],
) -> None:
    story = Story()
    for cause, step in failures:
        if story.stopped:
            break
        restored = story.generations[-1].restored_step
        story.fails(cause, max(step, restored), -11 if cause == "signal" else None)
    assert all(step >= EVERY for step in story.restored)
