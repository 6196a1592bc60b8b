"""The demo's data depends on the RNG that its loader restores, and its model is as large as it says."""

import random

import pytest
import torch

from chaos.demo.model import CONTEXT_BYTES, ByteGPT, SourceText, standard_library_text

TEXT = bytes(range(256)) * 40


def test_target_is_the_input_one_byte_further_on() -> None:
    inputs, targets = SourceText(TEXT, 100)[50]
    assert inputs.shape == targets.shape == (CONTEXT_BYTES,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert bytes(inputs.tolist() + targets[-1:].tolist()) in TEXT


def test_same_random_state_gives_the_same_window_and_another_gives_another() -> None:
    data = SourceText(TEXT, 100)
    random.seed(3)
    first = data[50][0]
    random.seed(3)
    assert torch.equal(data[50][0], first)
    assert any(not torch.equal(data[50][0], first) for _ in range(10))


@pytest.mark.parametrize("windows", [1, 7, len(TEXT)])
def test_every_window_lies_inside_the_text(windows: int) -> None:
    data = SourceText(TEXT, windows)
    assert len(data) == windows
    for index in {0, windows // 2, windows - 1}:
        assert all(sample.shape == (CONTEXT_BYTES,) for sample in data[index])


def test_revision_changes_with_the_text() -> None:
    assert SourceText(TEXT, 9).revision != SourceText(TEXT[:-1] + b"!", 9).revision


def test_text_too_short_for_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        SourceText(b"short", 1)


def test_standard_library_is_there_and_large_enough_to_learn_from() -> None:
    assert len(standard_library_text()) > 1_000_000


def test_model_has_about_one_and_a_half_million_parameters_and_is_causal() -> None:
    model = ByteGPT().eval()
    assert 1.4e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.6e6
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    with torch.no_grad():
        assert torch.equal(model(text)[:, :-1], model(changed)[:, :-1])
