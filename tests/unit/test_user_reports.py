"""Failures that users of training frameworks met and that no other test has; docs/cases.md lists them all."""

import os
import pickle
import random
import re
import tempfile
from pathlib import Path

import torch
from checkpoint_samples import make_manifest, same_bytes, whole, write_shard_of
from hypothesis import given
from hypothesis import strategies as st
from test_commit import Driven

from orchestrator import driver
from orchestrator.decide.budget import FailureBudget, Retry, Stop
from orchestrator.decide.probation import Probation
from orchestrator.observe.ledger import Ledger
from orchestrator.recovery import judge, replay
from workers.checkpoint import image
from workers.checkpoint.manifest import MANIFEST_FILE, checkpoint_dir
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState

SAVES = 200


def test_what_is_written_later_is_the_state_at_the_moment_of_the_snapshot(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    at_the_boundary = weight.clone()
    state = CapturedState(tensors=[whole("model.weight", weight)], document={"rank": 0})
    layout = image.plan(state.tensors, state.document)
    slot = Slot.create(layout.image_bytes)
    slot.begin(rank=0, generation=7, step=120)
    slot.complete(layout.write(slot.image, state.tensors, state.document))
    weight.add_(1)  # training goes on before a byte is written
    store = LocalStore(tmp_path)
    name = make_manifest(()).name
    manifest = make_manifest((write_shard_of(store, name, slot),))
    store.write_atomic(f"{checkpoint_dir(name)}/{MANIFEST_FILE}", manifest.to_bytes())
    restored = CheckpointReader(store, name, 0).fetch("model.weight", offsets=(0,), shape=(1000,))
    assert same_bytes(restored, at_the_boundary)
    assert not same_bytes(restored, weight)
    slot.close()


def test_deciding_on_saves_remembers_none_that_is_over() -> None:
    driven = Driven()
    sizes = {}
    for step in range(1_000, 1_000 + SAVES):  # numbers of equal length
        driven.snapshot(step)
        driven.persisted(step)
        driven.committed(step)
        sizes[step] = len(pickle.dumps(driven.machine))
    assert sizes[1_000 + SAVES - 1] == sizes[1_010]


def test_failures_before_the_coordinators_restart_still_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)

    def failed(driver_id: str) -> None:
        ledger.append("coordinator", driver=driver_id, resumed=False)
        ledger.append("generation", restored_step=0, source="fresh", checkpoint=None)
        ledger.append("failure", generation=1, cause="signal", step=5, exit_code=-9, restore_failed=None)

    def next_verdict(driver_id: str) -> Retry | Stop:
        budget = FailureBudget(1, rng=random.Random(0))
        replay(path, driver_id, budget, Probation())
        budget.generation_started(0)
        return budget.failure("signal", 6)

    failed("earlier")
    failed("this")
    assert isinstance(next_verdict("this"), Stop)
    assert isinstance(next_verdict("new"), Retry), "another fit() begins with a full budget"


def test_that_another_driver_was_fenced_or_stopped_ends_nothing_here(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("coordinator", driver="this", resumed=False)
    ledger.append("fenced", driver="earlier", reason="overtaken")
    ledger.append("stopped", driver="earlier", reason="x", error_type="TrainingFailed")
    budget = FailureBudget(1, rng=random.Random(0))
    assert not replay(ledger.path, "this", budget, Probation()).outcome.ended
    ledger.append("fenced", driver="this", reason="overtaken")
    assert replay(ledger.path, "this", budget, Probation()).outcome.error_type == "Fenced"


def test_what_a_restarted_coordinator_has_to_know_is_in_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("coordinator", driver="this", resumed=False)
    ledger.append("agent", agent="this/agent-1", rank=0)
    ledger.append("failure", generation=4, cause="oom", step=5, exit_code=None, restore_failed=None)
    before = replay(ledger.path, "this", FailureBudget(1, rng=random.Random(0)), Probation())
    assert (before.judged, before.agents, before.outcome.ended) == (4, {"this/agent-1"}, False)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["generation", "from_memory"]), st.integers(0, 30)),
            st.tuples(st.just("commit"), st.integers(1, 30)),
            st.tuples(st.sampled_from(["exception", "hang", "signal", "agent_lost", "drain"]), st.integers(0, 40)),
            st.tuples(st.just("restore_failed"), st.just(0)),
        ),
        max_size=25,
    )
)
def test_a_coordinator_that_comes_back_counts_and_suspects_as_the_one_before(happened: list[tuple[str, int]]) -> None:
    budget, probation = FailureBudget(3, rng=random.Random(0)), Probation()
    with tempfile.TemporaryDirectory() as directory:
        ledger = Ledger(Path(directory) / "ledger.jsonl")
        ledger.append("coordinator", driver="this", resumed=False)
        for kind, step in happened:
            match kind:
                case "generation":
                    ledger.append("generation", restored_step=step, source="checkpoint", checkpoint=f"c{step}")
                    budget.generation_started(step)
                    probation.generation_started(f"c{step}")
                case "from_memory":
                    began = {"restored_step": step, "source": "memory", "parent_generation": 1, "checkpoint": None}
                    ledger.append("generation", **began)
                    budget.generation_started(step)
                    probation.generation_started(f"memory of step {step}, generation 1")
                case "commit":
                    ledger.append("commit", step=step, checkpoint=f"c{step}")
                    budget.committed(step)
                    probation.committed(f"c{step}", step)
                case _:
                    failed = kind if kind == "restore_failed" else None
                    entry = {"generation": 1, "cause": kind, "step": step, "exit_code": -11, "restore_failed": failed}
                    ledger.append("failure", **entry)
                    judge(entry, budget, probation)
        again, again_probation = FailureBudget(3, rng=random.Random(0)), Probation()
        replay(ledger.path, "this", again, again_probation)
    assert vars(again_probation) == vars(probation)
    for state in (vars(budget), vars(again)):
        state.pop("_rng")
    assert vars(again) == vars(budget)


def test_rays_own_list_of_checkpoints_may_be_cut_short_or_name_what_is_gone(tmp_path: Path) -> None:
    index = tmp_path / "run" / "checkpoint_manager_snapshot.json"
    index.parent.mkdir()
    index.write_text('{"latest_checkpoint_result": {"checkpoint_dir_na')
    kept = index.with_name("ledger.jsonl")
    kept.touch()
    driver.prepare_run_dir(index.parent)
    driver.prepare_storage(index.parent, None)
    driver.forget_ray_index(index.parent)
    assert not index.exists(), "Ray reads this when it starts, and would refuse to"
    assert kept.exists()
    assert sorted(os.listdir(index.parent)) == ["checkpoints", "generations", "ledger.jsonl"]


def test_every_test_that_the_list_of_cases_names_exists() -> None:
    tests = Path(__file__).parents[1]
    named = set(re.findall(r"`(test_\w+)`", (tests.parent / "docs" / "cases.md").read_text()))
    defined = {name for path in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named
    assert named <= defined, named - defined
