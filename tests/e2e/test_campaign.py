"""A whole campaign on real Ray: faults as planned, a run that finishes, and a judge that finds nothing."""

import json
from pathlib import Path

import pytest
import ray

from chaos.campaign.plan import Plan, load_plan
from chaos.campaign.runner import Campaign, run_campaign, with_overrides
from chaos.history import History
from chaos.judge.judge import CHECKS
from chaos.verdict import Outcome, Verdict, exit_code

pytestmark = pytest.mark.usefixtures("ray_cluster")

USERS_LOOP = """
import random

import numpy
import torch
from torch.distributed.fsdp import fully_shard

import workers

TEXT = "the user's own module travels with the loop"


def train(config):
    assert TEXT
    session = workers.get_session()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(config["seed"])
    model = torch.nn.Linear(4, config["width"])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.track(model=model, optimizer=optimizer, scheduler=None, data=None)
    session.restore()
    while session.step < config["steps"]:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
"""


def attack(plan: Plan, storage: Path, seed: int, script: str | None = None) -> tuple[Campaign, dict[str, Verdict]]:
    campaign = Campaign(
        plan=plan,
        seed=seed,
        storage=storage,
        address=ray.get_runtime_context().gcs_address,
        script=script,
        say=print,
    )
    return campaign, {verdict.name: verdict for verdict in run_campaign(campaign)}


def assert_all_held(verdicts: dict[str, Verdict]) -> None:
    for verdict in verdicts.values():
        assert verdict.outcome in (Outcome.HELD, Outcome.SKIPPED), f"{verdict.name}: {verdict.detail}"
    assert exit_code(verdicts.values()) == 0


def test_smoke_campaign_strikes_as_planned_and_every_guarantee_holds(tmp_path: Path) -> None:
    campaign, verdicts = attack(load_plan("smoke"), tmp_path, seed=3)
    assert_all_held(verdicts)
    assert len(verdicts) >= len(CHECKS)
    for name in ("faults injected", "exact", "each sample once", "liveness", "false alarms zero"):
        assert verdicts[name].outcome is Outcome.HELD, verdicts[name].detail
    history = History(campaign.run_dir)
    assert len(history.faults) == 5, "four at planned moments, one at its fault point"
    assert len(history.generations) >= 2


@pytest.mark.slow
def test_users_own_loop_is_attacked_with_faults_from_within(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USERS_LOOP, encoding="utf-8")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        json.dumps(
            {
                "job": {"steps": 600, "config": {"width": 8}},
                "recovery": {"cadence": 20, "max_failures": 50},
                "faults": {
                    "count": 6,
                    "mix": {"raise": 1, "exit_zero": 1, "crash_rank": 1, "stop_rank": 1},
                    "gap_seconds": {"uniform": [0.1, 0.4]},
                },
            }
        ),
        encoding="utf-8",
    )
    _, verdicts = attack(load_plan(str(plan)), tmp_path, 1, f"{script}:train")
    assert_all_held(verdicts)
    assert verdicts["exact"].outcome is Outcome.HELD


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mid-save", "cascade", "spot-market", "storage-hell", "network", "everything", "bad-loss"]
)
def test_ready_campaign_finds_nothing(tmp_path: Path, name: str) -> None:
    _, verdicts = attack(load_plan(name), tmp_path, seed=5)
    assert_all_held(verdicts)


@pytest.mark.slow
def test_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    _, verdicts = attack(with_overrides(load_plan("soak"), kills=20, steps=None), tmp_path, seed=2)
    assert_all_held(verdicts)
    assert verdicts["no leaks"].outcome is Outcome.HELD
