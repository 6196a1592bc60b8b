"""Who keeps copies for whom."""

import random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.ring import ring

NODES = st.lists(st.text("abcdef0123", min_size=1, max_size=6), unique=True, max_size=12)


@given(NODES)
def test_each_node_keeps_for_one_other_and_all_are_on_one_ring(nodes: list[str]) -> None:
    keepers = ring(nodes)
    if len(nodes) < 2:
        assert keepers == {}
        return
    assert set(keepers) == set(keepers.values()) == set(nodes)
    assert all(node != keeper for node, keeper in keepers.items())
    seen, node = [], nodes[0]
    while node not in seen:
        seen.append(node)
        node = keepers[node]
    assert len(seen) == len(nodes)


@given(NODES, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_named_does_not_matter(nodes: list[str], rng: random.Random) -> None:
    shuffled = [*nodes, *nodes[:2]]
    rng.shuffle(shuffled)
    assert ring(shuffled) == ring(nodes)


@given(NODES.filter(lambda nodes: len(nodes) > 2), st.data())
def test_a_node_that_leaves_changes_only_who_keeps_for_the_one_before_it(nodes: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(nodes))
    before, after = ring(nodes), ring(node for node in nodes if node != gone)
    changed = {node for node in after if after[node] != before[node]}
    assert changed == {node for node, keeper in before.items() if keeper == gone} - {gone}
