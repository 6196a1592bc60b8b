"""What ranks say they hold alike, compared: who is odd, what a refused save ends, which checkpoints are suspect."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_commit import Driven, commit, generation, persist, shard

from orchestrator.corruption import is_repeated
from orchestrator.decide.commit import ALL_STEPS, Abandon, Commit, CommitMachine, Corruption, Persist, Release, Skip
from orchestrator.decide.replicas import (
    LAYOUT,
    Compared,
    Difference,
    culprit,
    describe,
    differences,
    odd_ranks,
    suspects,
)


def said(holders: tuple[int, ...], layout: str = "l", values: Mapping[str, Any] | None = None, **digests: str) -> Any:
    """What a rank says of one set; each tensor has 8 bytes unless its digest says where it starts, as in "8:digest"."""
    ranges = {}
    for name, digest in digests.items():
        start, _, content = digest.rpartition(":")
        ranges[name] = [int(start or 0), int(start or 0) + 8, content]
    return {"holders": list(holders), "layout": layout, "digests": ranges, "values": dict(values or {})}


def of(*sets: Any) -> dict[str, Any]:
    return {"sets": list(sets)}


def votes(*digests: str) -> dict[int, dict[str, Any]]:
    """One tensor, held by as many ranks as there are digests."""
    holders = tuple(range(len(digests)))
    return {rank: of(said(holders, w=digest)) for rank, digest in enumerate(digests)}


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        (("a", "b"), ()),
        (("a", "a", "b"), (2,)),
        (("b", "a", "a"), (0,)),
        (("a", "b", "c"), ()),
        (("a", "a", "b", "b"), ()),
        (("a", "b", "a", "a"), (1,)),
        (("a", "a", "b", "c"), ()),
        (("a", "a", "b", "a", "c"), (2, 4)),
    ],
)
def test_the_odd_ranks_are_those_against_whom_more_than_half_agree(
    digests: tuple[str, ...], odd: tuple[int, ...]
) -> None:
    (found,) = differences(votes(*digests))
    assert found == Difference(what="w", holders=tuple(range(len(digests))), odd=odd, start=0, stop=8)
    assert odd_ranks([found]) == odd
    assert culprit([found]) == (odd[0] if len(odd) == 1 else -1)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=7))
def test_no_rank_is_called_odd_without_a_majority_against_it_and_none_within_it(digests: list[str]) -> None:
    found = differences(votes(*digests))
    assert bool(found) == (len(set(digests)) > 1)
    for difference in found:
        agreeing = {digests[rank] for rank in range(len(digests)) if rank not in difference.odd}
        if difference.odd:
            assert len(agreeing) == 1
            assert 2 * digests.count(agreeing.pop()) > len(digests)
        else:
            assert max(map(digests.count, digests)) * 2 <= len(digests)


def test_equal_ranks_and_ranks_that_say_nothing_raise_no_alarm() -> None:
    assert differences(votes("a", "a", "a")) == ()
    assert differences({0: {}, 1: {}}) == ()
    assert differences({}) == ()
    alone = votes("a", "b")
    assert differences({0: alone[0], 1: {}}) == ()


def test_a_missing_rank_leaves_the_others_to_be_compared() -> None:
    four = votes("a", "b", "a", "a")
    assert differences({rank: four[rank] for rank in (0, 1, 2)})[0].odd == (1,)
    assert differences({rank: four[rank] for rank in (0, 1)})[0].odd == ()


def test_ranks_that_looked_at_different_bytes_are_not_compared() -> None:
    holders = (0, 1)
    assert differences({0: of(said(holders, w="a")), 1: of(said(holders, w="8:b"))}) == ()


def test_each_set_of_holders_is_judged_by_itself() -> None:
    ranks = {
        0: of(said((0, 2), w="a"), said((0, 1, 2, 3), v="x")),
        1: of(said((1, 3), w="c"), said((0, 1, 2, 3), v="x")),
        2: of(said((0, 2), w="a"), said((0, 1, 2, 3), v="x")),
        3: of(said((1, 3), w="d"), said((0, 1, 2, 3), v="y")),
    }
    assert differences(ranks) == (
        Difference(what="v", holders=(0, 1, 2, 3), odd=(3,), stop=8),
        Difference(what="w", holders=(1, 3), odd=(), stop=8),
    )
    assert culprit(differences(ranks)) == 3, "rank 3 explains both"
    ranks[1] = of(said((1, 3), w="d"), said((0, 1, 2, 3), v="x"))
    ranks[2] = of(said((0, 2), w="b"), said((0, 1, 2, 3), v="x"))
    assert culprit(differences(ranks)) == -1, "rank 3 does not explain what ranks 0 and 2 disagree on"


def test_other_learning_rates_and_other_tensors_are_differences_too() -> None:
    holders = (0, 1, 2)
    same = of(said(holders, w="a", values={"lr.optimizer": ["0.1"]}))
    other_rate = of(said(holders, w="a", values={"lr.optimizer": ["0.2"]}))
    other_names = of(said(holders, "m", w="a", values={"lr.optimizer": ["0.1"]}))
    assert differences({0: same, 1: other_rate, 2: same}) == (
        Difference(what="lr.optimizer", holders=holders, odd=(1,)),
    )
    assert differences({0: same, 1: same, 2: other_names}) == (Difference(what=LAYOUT, holders=holders, odd=(2,)),)


def test_a_difference_is_put_into_words_that_name_tensors_and_ranks() -> None:
    holders = (0, 1, 2)
    odd = of(said(holders, a="x", b="x", c="x", d="x"))
    good = of(said(holders, a="y", b="y", c="y", d="y"))
    assert describe(differences({0: good, 1: good, 2: odd})) == (
        "a, b, c and 1 more differ on rank 2 from what the other ranks hold"
    )
    assert describe(differences(votes("a", "b"))) == "w differs between ranks 0, 1, and nobody can tell which is right"


# ---------------------------------------------------------------- the save is refused


def receipts(run: Driven, step: int, *digests: str, gen: int = 1) -> list[Any]:
    decisions: list[Any] = []
    for rank, document in votes(*digests).items():
        decisions += run.machine.shard_persisted(rank, gen, step, 1, shard(rank), said=document, at=0.0)
    return decisions


def test_a_save_whose_replicas_are_equal_is_committed() -> None:
    run = Driven()
    run.snapshot(20)
    assert receipts(run, 20, "a", "a") == [commit(20)]


def test_a_save_whose_replicas_differ_is_never_committed_and_nor_is_anything_else_of_its_generation() -> None:
    run = Driven()
    run.snapshot(20)
    run.snapshot(30)
    run.snapshot(40, ranks=(0,))
    decisions = receipts(run, 20, "a", "b")
    difference = Difference(what="w", holders=(0, 1), odd=(), stop=8)
    reason = describe([difference])
    assert decisions == [
        Corruption(generation=1, step=20, attempt=1, differences=(difference,)),
        Abandon(generation=1, step=20, attempt=1, reason=reason, final=True),
        Skip(generation=1, step=30, reason=reason),
        Skip(generation=1, step=40, reason=reason),
        Release(generation=1, upto_step=ALL_STEPS, keep=()),
    ]
    assert run.machine.idle
    assert run.machine.in_flight == frozenset()
    for step in (20, 40, 50):
        assert all(isinstance(decision, Release) for decision in run.snapshot(step))
    assert run.persisted(20) == []
    assert run.machine.snapshotted(0, 1, 20, again=True, at=0.0) == [
        Release(generation=1, upto_step=ALL_STEPS, keep=())
    ]


def test_the_next_generation_saves_again() -> None:
    run = Driven()
    run.snapshot(20)
    receipts(run, 20, "a", "b")
    run.machine.generation_ended(1, at=0.0)
    run.machine.generation_started([generation(1), generation(2)], at=0.0)
    assert persist(20, gen=2) in run.snapshot(20, gen=2)
    assert receipts(run, 20, "a", "a", gen=2) == [commit(20, gen=2)]


def test_corruption_in_a_generation_that_is_over_leaves_the_saves_of_the_running_one_alone() -> None:
    run = Driven()
    run.snapshot(20)
    run.machine.generation_ended(1, at=0.0)
    run.machine.generation_started([generation(1), generation(2, parent=1, step=20)], at=0.0)
    run.snapshot(30, gen=2)
    decisions = receipts(run, 20, "a", "b")
    assert [type(decision) for decision in decisions[:2]] == [Corruption, Abandon]
    assert persist(30, gen=2) in decisions
    assert receipts(run, 30, "a", "a", gen=2) == [commit(30, gen=2)]


def test_a_coordinator_that_comes_back_refuses_the_save_as_well() -> None:
    machine = CommitMachine(rebuilding=True)
    machine.generation_started([generation(1)], at=0.0)
    for rank, document in votes("a", "b").items():
        for step in (20, 30):
            machine.snapshotted(rank, 1, step, attempt=1 if step == 20 else 0, at=0.0)
        machine.shard_persisted(rank, 1, 20, 1, shard(rank), said=document, at=0.0)
    decisions = machine.rebuilt(at=0.0)
    assert isinstance(decisions[0], Corruption)
    assert not [decision for decision in decisions if isinstance(decision, Commit | Persist)]
    assert machine.idle


# ---------------------------------------------------------------- what else may hold it


def compared(name: str, gen: int, document: dict[str, Any] | None) -> Compared:
    return Compared(name=name, generation=gen, said=document)


FOUND = (Difference(what="w", holders=(0, 1), odd=(), start=0, stop=8),)
HAS_IT = of(said((0, 1), w="a"))
ELSEWHERE = of(said((0, 1), w="8:a"))


def test_checkpoints_at_which_the_same_bytes_were_compared_are_good() -> None:
    assert suspects(FOUND, 1, [compared("c30", 1, HAS_IT), compared("c20", 1, HAS_IT)]) == ((), None)
    assert suspects(FOUND, 1, []) == ((), None)


def test_suspect_are_those_since_the_same_bytes_were_compared_last() -> None:
    checkpoints = [
        compared("c50", 1, ELSEWHERE),
        compared("c40", 1, None),
        compared("c30", 1, of()),
        compared("c20", 1, HAS_IT),
        compared("c10", 1, ELSEWHERE),
    ]
    assert suspects(FOUND, 1, checkpoints) == (("c50", "c40", "c30"), None)
    two = (*FOUND, Difference(what="v", holders=(0, 1), odd=(), start=0, stop=8))
    assert suspects(two, 1, checkpoints) == (("c50", "c40", "c30", "c20"), "c10"), "v was never compared"


def test_what_the_generation_restored_is_good_for_it_had_all_replicas_alike_then() -> None:
    checkpoints = [compared("c40", 2, ELSEWHERE), compared("c30", 1, ELSEWHERE)]
    assert suspects(FOUND, 2, checkpoints) == (("c40",), None)
    assert suspects(FOUND, 1, checkpoints) == ((), "c30"), "a later generation's say nothing of this one's"


# ---------------------------------------------------------------- again and again


def entry(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **fields}


def found_in(generation: int, step: int = 30) -> Corruption:
    return Corruption(generation=generation, step=step, attempt=1, differences=FOUND)


def test_corruption_at_the_same_step_twice_in_a_row_is_repeated() -> None:
    began = entry("coordinator", resumed=False)
    first = entry("corruption", generation=1, step=30)
    assert not is_repeated([began], found_in(1))
    assert is_repeated([began, first], found_in(2))
    assert is_repeated([began, first, entry("coordinator", resumed=True)], found_in(2))
    assert not is_repeated([began, first], found_in(2, step=40))
    assert not is_repeated([began, first, entry("corruption", generation=2, step=40)], found_in(3))
    assert not is_repeated([began, first], found_in(1)), "the same one, found again by a coordinator that came back"
    assert not is_repeated([began, first, began], found_in(2)), "another driver gets a chance of its own"
