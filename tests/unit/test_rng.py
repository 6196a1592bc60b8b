"""The global generators continue after a restore as if nothing had happened."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from memory_source import MemoryCheckpoint

from workers.checkpoint.tensors import CapturedState
from workers.errors import CallerError, EnvironmentProblem
from workers.state.objects import ObjectPart
from workers.state.pieces import Restorer, assign
from workers.state.rng import GlobalGenerators


def draw() -> list[Any]:
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(70)),
        *(np.random.rand(), np.random.randn(), np.random.permutation(9).tolist()),
        *(torch.rand(3).tolist(), torch.randn(3).tolist(), torch.dropout(torch.ones(20), 0.5, True).tolist()),
    ]


def saved(part: ObjectPart) -> MemoryCheckpoint:
    pieces, document = part.capture()
    return MemoryCheckpoint([CapturedState(tensors=assign(pieces, 0), document=document)])


def restore(part: ObjectPart, checkpoint: MemoryCheckpoint) -> None:
    source = checkpoint.source()
    part.check(source.document(), Restorer(source))
    part.apply(source.document(), Restorer(source))


@pytest.mark.parametrize("drawn_before", range(4), ids=lambda count: f"{count} draws before")
def test_every_generator_draws_after_a_restore_what_it_would_have_drawn(drawn_before: int) -> None:
    for _ in range(drawn_before):
        # An odd number of normal deviates leaves the second one of a pair behind: part of the state.
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(1)
    part = ObjectPart("rng", GlobalGenerators(), 0, kind="rng")
    checkpoint = saved(part)
    expected = draw()
    draw()
    restore(part, checkpoint)
    assert draw() == expected


def test_a_numpy_generator_of_another_algorithm_comes_back() -> None:
    before = np.random.get_state(legacy=False)
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        part = ObjectPart("rng", GlobalGenerators(), 0, kind="rng")
        checkpoint = saved(part)
        expected = np.random.rand()
        restore(part, checkpoint)
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(bits)
        np.random.set_state(before)


def test_capturing_and_hashing_draw_nothing() -> None:
    part = ObjectPart("rng", GlobalGenerators(), 0, kind="rng")
    before = GlobalGenerators().digests()
    part.capture()
    assert GlobalGenerators().digests() == before


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_the_digest_names_the_generator_that_was_drawn_from(name: str) -> None:
    before = GlobalGenerators().digests()
    {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}[name]()  # type: ignore[operator]
    after = GlobalGenerators().digests()
    assert [key for key in before if before[key] != after[key]] == [name]


def test_more_cuda_generators_than_devices_is_an_error() -> None:
    states = {**GlobalGenerators().state_dict(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}
    with pytest.raises(EnvironmentProblem, match="99 CUDA devices"):
        GlobalGenerators().load_state_dict(states)


@pytest.mark.gpu
def test_the_generators_of_cuda_devices_come_back() -> None:
    torch.rand(1, device="cuda")
    part = ObjectPart("rng", GlobalGenerators(), 0, kind="rng")
    checkpoint = saved(part)
    expected = torch.rand(4, device="cuda").tolist()
    restore(part, checkpoint)
    assert torch.rand(4, device="cuda").tolist() == expected
    assert "cuda.0" in GlobalGenerators().digests()


@pytest.mark.parametrize(
    ("build", "use"),
    [
        (lambda: torch.Generator().manual_seed(5), lambda own: torch.rand(2, generator=own).tolist()),
        (lambda: random.Random(5), lambda own: own.gauss(0, 1)),
        (lambda: np.random.default_rng(5), lambda own: own.normal(size=3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(5)), lambda own: own.normal(size=3).tolist()),
    ],
    ids=["torch", "python", "numpy", "numpy MT19937"],
)
def test_a_generator_of_the_users_own_can_be_tracked(build: Any, use: Any) -> None:
    own = build()
    use(own)
    checkpoint = saved(ObjectPart("noise", own, 0, kind="object"))
    expected = use(own)
    other = build()
    restore(ObjectPart("noise", other, 0, kind="object"), checkpoint)
    assert use(other) == expected


def test_an_object_without_a_state_is_refused_with_its_name() -> None:
    with pytest.raises(CallerError, match=r"^thing: an object of type object has no state_dict"):
        ObjectPart("thing", object(), 0, kind="object")
    with pytest.raises(CallerError, match=r"^data: the loader of type DataLoader is iterable, but is not resumable"):
        ObjectPart("data", torch.utils.data.DataLoader([1, 2]), 0, kind="data")  # type: ignore[arg-type]
