"""All states of a small run recover, larger ones are drawn, and every mutant of the protocol is caught."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from chaos.crash_states import campaign, object_search, rival_search, search
from chaos.crash_states.check import GUARANTEES, Judge
from chaos.crash_states.command import crash_states
from chaos.crash_states.enumerate import Tree, draw
from chaos.crash_states.model import Fate, content, situations
from chaos.crash_states.mutants import mutants
from chaos.crash_states.object_mutants import object_mutants
from chaos.crash_states.ops import ROOT, Make, Mark, SyncDir, describe
from chaos.crash_states.promises import promises
from chaos.crash_states.rivals import Schedule
from chaos.crash_states.scenario import Plan, Recording, record, record_requests
from chaos.crash_states.search import Tally, look_at_all, look_at_mutant, look_at_some
from chaos.crash_states.turns import Killed, Turns
from chaos.verdict import Outcome, exit_code

SMALL = Plan(seed=1, ranks=2, saves=(2, 0), shard_bytes=64, keep_last=1, order="in step")
PLAN_ON_OBJECTS = Plan(seed=1, ranks=2, keep_last=1, order="in step")


@pytest.fixture(scope="module")
def small() -> Recording:
    return record(SMALL, scratch=search.scratch())


def last_tree(recording: Recording) -> Tree:
    """What is there if nothing is lost."""
    last = [*situations([*recording.ops, *(SyncDir(f) for f in list(situations(recording.ops))[-1].folders)])][-1]

    def tree(folder: str) -> Tree:
        return {
            name: tree(node)
            if node in last.folders
            else content(last.contents[node], last.parts.get(node, ()), [Fate.DONE] * len(last.parts.get(node, ())))
            for name, node in last.names[folder].items()
        }

    return tree(ROOT)


def test_all_states_of_a_small_run_recover() -> None:
    tally = look_at_all([replace(SMALL, saves=(1, 0))], 0, 1)
    assert tally.violations == 0, tally.examples
    assert len(tally.states) > 200 and 5 < len(tally.classes) < len(tally.states)


def test_parts_of_all_states_are_all_states_once() -> None:
    plans = [replace(SMALL, saves=(1, 0)), replace(SMALL, saves=(1, 0), order="one by one")]
    whole, parts = look_at_all(plans, 0, 1), [look_at_all(plans, part, 2) for part in range(2)]
    assert set().union(*(part.states for part in parts)) == whole.states
    assert sum(part.checks for part in parts) == whole.checks


@pytest.mark.parametrize("seed", range(4))
def test_states_of_larger_runs_recover_and_are_the_same_each_time(seed: int) -> None:
    tally = look_at_some(seed, draws=40)
    assert tally.violations == 0, tally.examples
    assert tally.on_disk == 2 and len(tally.states) > 15
    assert look_at_some(seed, draws=40).states == tally.states


@pytest.mark.parametrize("index", range(len(mutants())), ids=[mutant.name for mutant in mutants()])
def test_each_mutant_of_the_protocol_is_caught(index: int) -> None:
    found = look_at_mutant(index, seed=1)
    assert found["caught"], found
    assert found["guarantee"] in GUARANTEES and found["detail"]


@pytest.mark.parametrize("where", ["while the run directory is prepared", "around the commit"])
def test_a_kill_and_then_a_power_loss_lose_nothing_that_was_relied_on(where: str) -> None:
    plan = replace(SMALL, saves=(1, 0))
    commit = search.kills_in_commit(record(plan, scratch=search.scratch()))
    for killed_after in commit if where == "around the commit" else range(6):
        recording = record(replace(plan, killed_after=killed_after), scratch=search.scratch())
        judge, owed, rng = Judge(recording), promises(recording.ops), random.Random(killed_after)
        for situation, promise in list(zip(situations(recording.ops), owed, strict=True))[killed_after:]:
            for _ in range(6):
                verdict = judge.check(draw(situation, rng).tree, promise)
                assert verdict.violations == (), (killed_after, situation.last and describe(situation.last), verdict)


def test_what_was_promised_is_read_from_the_marks() -> None:
    marks = [
        Mark("generation created", {"number": 1, "parent": None}),
        Mark("commit begins", {"name": "one"}),
        Mark("committed", {"name": "one"}),
        Mark("commit begins", {"name": "two"}),
        Mark("committed", {"name": "two"}),
        Mark("delete begins", {"name": "one"}),
        Mark("generation begins", {"number": 2, "parent": "one"}),
        Mark("generation created", {"number": 2, "parent": "one"}),
        Mark("recorded", {"seq": 4}),
        Mark("generation begun", {"number": 2, "parent": "one"}),
    ]
    found = promises(marks)
    assert [sorted(promise.acceptable) for promise in found] == [
        [],
        [],
        ["one"],
        ["one"],
        ["one", "two"],
        ["two"],
        ["two"],
        ["one", "two"],
        ["one", "two"],
        ["one", "two"],
        ["one"],
    ]
    assert [promise.fresh for promise in found] == [True] * 3 + [False] * 8
    assert found[5].kept == {"one", "two"} and found[6].kept == {"two"}
    assert found[-1].generation == 2 and found[-1].recorded == {4}


def damaged(tree: Tree, path: str, left: bytes | None) -> Tree:
    name, _, rest = path.partition("/")
    if rest:
        below = tree[name]
        assert not isinstance(below, bytes)
        return {**tree, name: damaged(below, rest, left)}
    return {**{key: child for key, child in tree.items() if key != name}, **({name: left} if left is not None else {})}


def test_the_judge_sees_what_is_damaged(small: Recording) -> None:
    whole, judge, promise = last_tree(small), Judge(small), promises(small.ops)[-1]
    assert judge.check(whole, promise).violations == ()
    (newest,) = promise.kept
    shard = f"checkpoints/{newest}/rank-00001-of-00002.safetensors"
    (right,) = small.expected[shard]
    for path, bytes_left, broken in (
        (shard, right[:-1] + bytes([right[-1] ^ 1]), {"never half", "commit means whole", "kept", "never torn"}),
        (shard, right[:-1], {"never half", "commit means whole", "kept", "never lost"}),
        (shard, None, {"commit means whole", "kept", "never lost"}),
        (f"checkpoints/{newest}/manifest.json", None, {"kept", "never lost"}),
        ("generations/00000002.json", None, {"number used once"}),
        ("ledger.jsonl", b"{}\n", {"recorded"}),
    ):
        violations = judge.check(damaged(whole, path, bytes_left), promise).violations
        assert {violation.guarantee for violation in violations} == broken, (path, violations)
    assert {one.guarantee for one in judge.check({}, promise).violations} >= {"never fresh", "kept", "number used once"}


def test_a_run_that_never_committed_has_to_start_afresh(small: Recording) -> None:
    at = next(at for at, op in enumerate(small.ops) if isinstance(op, Mark) and op.kind == "commit begins")
    name = small.ops[at].facts["name"]  # type: ignore[union-attr]
    tree: Tree = {"checkpoints": {name: {"manifest.json": b"{"}}}
    found = {one.guarantee for one in Judge(small).check(tree, promises(small.ops)[at]).violations}
    assert "recovers" in found


def test_a_recording_is_the_same_each_time_and_another_with_another_seed() -> None:
    plan = replace(SMALL, order="drawn")
    first, again = (record(plan, scratch=search.scratch()) for _ in range(2))
    assert first.ops == again.ops
    assert record(replace(plan, seed=2), scratch=search.scratch()).ops != first.ops


def test_ranks_interleave(small: Recording) -> None:
    made = [op.name for op in small.ops if isinstance(op, Make) and op.name.endswith(".safetensors.tmp")]
    renames = [at for at, op in enumerate(small.ops) if describe(op).startswith("rename") and "rank" in describe(op)]
    creates = [at for at, op in enumerate(small.ops) if isinstance(op, Make) and op.name.endswith(".safetensors.tmp")]
    assert len(made) == 4 and creates[1] < renames[0]


def test_turns_are_taken_as_picked_and_a_kill_reaches_everybody() -> None:
    seen: list[int] = []
    turns = Turns(max)

    def actor(number: int) -> None:
        for _ in range(3):
            turns.wait()
            seen.append(number)

    turns.run([lambda number=number: actor(number) for number in range(3)])  # type: ignore[misc]
    assert seen == [2, 2, 2, 1, 1, 1, 0, 0, 0]

    def killed() -> None:
        raise Killed

    with pytest.raises(Killed):
        turns.run([killed, killed])


def test_the_report_says_what_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(PLAN_ON_OBJECTS, saves=(1, 0))
    monkeypatch.setattr(campaign, "mutants", lambda: mutants()[:1])
    monkeypatch.setattr(campaign, "object_mutants", lambda: object_mutants()[:1])
    monkeypatch.setattr(search, "small_plans", lambda seed, ranks, drawn: [])
    monkeypatch.setattr(object_search, "object_plans", lambda seed: [one])
    monkeypatch.setattr(campaign, "rival_mutants", tuple)
    monkeypatch.setattr(rival_search, "schedules", lambda seed: [Schedule(play="takes over", turns=((1, 9), (0, 99)))])
    with pytest.raises(typer.Exit) as ended:
        crash_states(states=60, seed=3, jobs=1, out=tmp_path / "report", as_json=True)
    assert ended.value.exit_code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["states"] >= 60 and report["violations"] == 0 and report["seconds"] > 0
    objects = report["object_store"]
    assert objects["recordings"] == record_requests(one).calls + 1 and objects["states"] > 20
    assert report["states"] == objects["states"] + report["drawn"]["states"] + report["two_drivers"]["states"]
    assert report["two_drivers"]["recordings"] == 1
    caught = {mutant["name"]: mutant["caught"] for mutant in report["mutants"]}
    assert caught == {"no file is fsynced": True, "objects: the manifest comes before the shards": True}
    assert Path(report["report"]) == tmp_path / "report" / "report.html"
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [verdict["name"] for verdict in written["verdicts"]][:3] == [
        "states after a power loss",
        "states of object storage",
        "states after two drivers at once",
    ]
    assert written["command"] == "lastgood chaos crash-states --seed 3 --states 60"
    assert "mutant: no file is fsynced" in (tmp_path / "report" / "junit.xml").read_text()


def test_how_many_states_were_judged_is_told_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "mutants", list)
    monkeypatch.setattr(campaign, "object_mutants", list)
    told: list[int] = []
    found = campaign.search_all(seed=3, states=60, jobs=1, small=False, told=told.append)
    assert sum(told) == len(found.total.states) >= 60


def test_a_violation_and_an_uncaught_mutant_fail_the_check() -> None:
    plan = Plan(seed=1, ranks=2)
    caught: dict[str, Any] = {"name": "m", "caught": True, "states": 3, "detail": "x", "guarantee": "kept", "when": ""}
    found = campaign.Findings(seed=1, mutants=[caught])
    assert exit_code(campaign.verdicts(found)) == 0
    found.mutants.append({**caught, "name": "n", "caught": False, "detail": ""})
    assert exit_code(campaign.verdicts(found)) == 3
    found = campaign.Findings(seed=1, drawn=Tally())
    found.drawn.violated("kept", "gone", plan, "at the end")
    broken = campaign.verdicts(found)[0]
    assert broken.outcome is Outcome.BROKEN and GUARANTEES["kept"] in broken.detail and "--seed 1" in broken.replay
    peer = {"name": "p", "skipped": "", "states": 5, "violations": 2, "detail": "lost", "kinds": {"lost": 2}}
    assert exit_code(campaign.verdicts(campaign.Findings(seed=1, peers=[peer]))) == 0


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    record(replace(SMALL, killed_after=60), scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
