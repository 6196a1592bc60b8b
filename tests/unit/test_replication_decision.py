"""Which sets are copied when; and that no moment exists at which losing one node loses all sets that were copied."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.decide.replication import NONE, Copy, Keep, Replication

NODES = ("a", "b", "c")
PLACES = {0: "a", 1: "a", 2: "b", 3: "c"}


def test_the_shards_of_each_node_go_to_the_next_one() -> None:
    replication = Replication()
    orders = replication.complete((1, 10), PLACES, NODES)
    assert orders == [
        Copy(key=(1, 10), node="a", to="b", ranks=(0, 1), keep=NONE),
        Copy(key=(1, 10), node="b", to="c", ranks=(2,), keep=NONE),
        Copy(key=(1, 10), node="c", to="a", ranks=(3,), keep=NONE),
    ]


def copied(replication: Replication, key: tuple[int, int]) -> list[Copy | Keep]:
    return [order for rank in PLACES for order in replication.copied(rank, key)]


def test_one_set_is_copied_at_a_time_and_the_newest_is_next() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    assert replication.complete((1, 12), PLACES, NODES) == []
    assert replication.complete((1, 14), PLACES, NODES) == []
    assert replication.wanted == {(1, 10)}
    orders = copied(replication, (1, 10))
    assert orders[0] == Keep(key=(1, 10), ranks=4)
    assert {(order.key, order.keep) for order in orders[1:] if isinstance(order, Copy)} == {((1, 14), (1, 10))}
    assert replication.wanted == {(1, 10), (1, 14)}
    copied(replication, (1, 14))
    assert replication.replicated == (1, 14)
    assert replication.wanted == {(1, 14)}


def test_a_set_counts_only_when_all_its_shards_are_copied_and_a_report_counts_once() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    for rank in (0, 1, 1, 0, 2):
        assert replication.copied(rank, (1, 10)) == []
    assert replication.replicated == NONE
    assert replication.copied(3, (1, 12)) == []  # of another set
    assert replication.copied(3, (1, 10)) == [Keep(key=(1, 10), ranks=4)]


def test_a_failed_copy_gives_way_to_the_next_set_and_the_one_before_stays() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    copied(replication, (1, 10))
    replication.complete((1, 12), PLACES, NODES)
    replication.complete((1, 14), PLACES, NODES)
    orders = replication.failed((1, 12))
    assert {order.key for order in orders} == {(1, 14)}
    assert replication.failed((1, 12)) == []  # of another rank
    assert replication.replicated == (1, 10)


def test_with_one_node_nothing_is_copied_and_what_was_is_given_up() -> None:
    replication = Replication()
    here = dict.fromkeys(PLACES, "a")
    assert replication.complete((1, 2), here, NODES) == []
    replication.complete((1, 10), PLACES, NODES)
    copied(replication, (1, 10))
    assert replication.complete((2, 12), here, NODES) == [Keep(key=(2, 12), ranks=0)]
    assert replication.wanted == frozenset()
    assert replication.complete((2, 14), here, NODES) == []


def test_what_a_lost_keeper_had_is_copied_anew_and_stays_wanted_meanwhile() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    copied(replication, (1, 10))
    assert replication.complete((1, 10), PLACES, NODES) == []
    replication.keeper_lost("b")
    assert replication.wanted == {(1, 10)}
    assert {order.key for order in replication.complete((1, 10), PLACES, NODES)} == {(1, 10)}


def test_a_node_that_is_lost_on_the_way_ends_the_copy() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    assert replication.keeper_lost("b") == []
    assert copied(replication, (1, 10)) == []
    assert replication.replicated == NONE


def test_a_set_that_was_on_its_way_when_its_generation_ended_stays_until_the_next_is_copied() -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    copied(replication, (1, 10))
    replication.complete((1, 12), PLACES, NODES)
    replication.generation_ended()
    assert copied(replication, (1, 12)) == []
    assert replication.wanted == {(1, 10), (1, 12)}
    replication.generation_started((1, 10))
    assert replication.wanted == {(1, 10)}
    replication.complete((2, 12), PLACES, NODES)
    copied(replication, (2, 12))
    assert replication.wanted == {(2, 12)}


@pytest.mark.parametrize(("step", "left"), [(None, set()), (10, {(1, 12)}), (12, {(1, 10)})])
def test_what_is_not_to_be_used_is_not_kept(step: int | None, left: set[tuple[int, int]]) -> None:
    replication = Replication()
    replication.complete((1, 10), PLACES, NODES)
    copied(replication, (1, 10))
    replication.complete((1, 12), PLACES, NODES)
    replication.drop(1, step)
    assert replication.wanted == left


# ---------------------------------------------------------------- all of it together


@dataclass
class Keeper:
    """What a keeper has: its ranks' slots, three each, and copies, two a rank at most."""

    own: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    copies: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    kept: tuple[int, int] = NONE

    def put(self, rank: int, key: tuple[int, int], keep: tuple[int, int]) -> None:
        self.keep(keep)
        self.copies[rank] = {old for old in self.copies.get(rank, set()) if old == self.kept} | {key}

    def keep(self, key: tuple[int, int]) -> None:
        self.kept = max(self.kept, key)
        self.copies = {rank: {k for k in keys if k >= self.kept} for rank, keys in self.copies.items()}


class CopiesOfARun(RuleBasedStateMachine):
    """Four ranks on three nodes train and take snapshots; transfers finish in any order, and words arrive late."""

    @initialize()
    def start(self) -> None:
        self.replication = Replication()
        self.keepers = {node: Keeper(own={r: set() for r, at in PLACES.items() if at == node}) for node in NODES}
        self.step = 0
        self.taken = dict.fromkeys(PLACES, 0)
        self.newest = NONE
        self.transfers: list[tuple[int, str, str, tuple[int, int], tuple[int, int]]] = []
        self.reports: list[tuple[int, tuple[int, int], bool]] = []
        self.words: list[tuple[str, tuple[int, int]]] = []

    def carry_out(self, orders: list[Copy | Keep]) -> None:
        for order in orders:
            if isinstance(order, Copy):
                self.transfers += [(rank, order.node, order.to, order.key, order.keep) for rank in order.ranks]
            else:
                self.words += [(node, order.key) for node in NODES]

    def release(self) -> None:
        """Slots are free unless they hold the newest complete set, a newer one, or what is wanted for copies."""
        for keeper in self.keepers.values():
            for rank, keys in keeper.own.items():
                keeper.own[rank] = {k for k in keys if k >= self.newest or k in self.replication.wanted}

    @rule(rank=st.sampled_from(sorted(PLACES)))
    def snapshot(self, rank: int) -> None:
        step = self.taken[rank] + 1
        if step > min(self.taken.values()) + 1:
            return
        self.taken[rank] = step
        own = self.keepers[PLACES[rank]].own[rank]
        if len(own) < 3:
            own.add((1, step))
        complete = min(self.taken.values())
        if complete == step and all((1, step) in self.keepers[at].own[r] for r, at in PLACES.items()):
            self.newest = (1, step)
            self.carry_out(self.replication.complete(self.newest, PLACES, NODES))
            self.release()

    @precondition(lambda self: self.transfers)
    @rule(index=st.integers(0, 20), good=st.sampled_from([True, True, True, False]))
    def transfer(self, index: int, good: bool) -> None:
        rank, node, to, key, keep = self.transfers.pop(index % len(self.transfers))
        good = good and key in self.keepers[node].own[rank]
        if good:
            self.keepers[to].put(rank, key, keep)
        self.reports.append((rank, key, good))

    @precondition(lambda self: self.reports)
    @rule()
    def report(self) -> None:
        rank, key, good = self.reports.pop(0)
        self.carry_out(self.replication.copied(rank, key) if good else self.replication.failed(key))
        self.release()

    @precondition(lambda self: self.words)
    @rule(index=st.integers(0, 20))
    def word(self, index: int) -> None:
        node, key = self.words.pop(index % len(self.words))
        self.keepers[node].keep(key)

    @invariant()
    def losing_any_node_leaves_a_set_that_is_at_least_as_new_as_what_was_copied(self) -> None:
        if not hasattr(self, "replication") or self.replication.replicated == NONE:
            return
        for lost in NODES:
            left = [keeper for node, keeper in self.keepers.items() if node != lost]
            whole = [
                key
                for key in {(1, step) for step in range(1, max(self.taken.values()) + 1)}
                if all(any(key in k.own.get(r, set()) | k.copies.get(r, set()) for k in left) for r in PLACES)
            ]
            assert max(whole, default=NONE) >= self.replication.replicated, (lost, whole)


CopiesOfARun.TestCase.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
TestCopiesOfARun = CopiesOfARun.TestCase
