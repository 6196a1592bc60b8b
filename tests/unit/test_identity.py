"""A run knows whether it is still the run that was saved."""

import enum
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import CallerError
from workers.state.identity import Identity, capture_identity, check_identity, compare


class Loader:
    def __init__(self, revision: str) -> None:
        self.revision = revision

    def identity(self) -> dict[str, Any]:
        return {"revision": self.revision, "sizes": (1, 2)}


def identity_of(config: Any, **other: Any) -> Identity:
    return capture_identity(**{"config": config, "data": Loader("v1"), "world_size": 2, "threads": 1, **other})


def saved(identity: Identity) -> dict[str, Any]:
    return json.loads(json.dumps(identity.document))


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclass
class Nested:
    rate: float = 0.1
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def test_the_same_run_has_no_differences() -> None:
    config = {"lr": 0.1, "nested": Nested(), "path": Path("/a"), "kind": Kind.A, "fn": len, "n": None}
    config["tensor"] = torch.ones(2)
    assert compare(saved(identity_of(config)), identity_of(config).document) == []
    assert check_identity(saved(identity_of(config)), identity_of(config)) == []


@pytest.mark.parametrize(
    ("was", "now", "field_name"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, "config.lr"),
        ({"lr": 1}, {"lr": 1.0}, "config.lr"),
        ({"lr": 1}, {"lr": True}, "config.lr"),
        ({"lr": "1"}, {"lr": 1}, "config.lr"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "config.a.b"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "config.a.1"),
        ({"a": [1]}, {"a": [1, 3]}, "config.a.1"),
        ({"a": 1}, {"a": 1, "b": None}, "config.b"),
        ({"a": 1, "b": {}}, {"a": 1}, "config.b"),
        ({"n": Nested()}, {"n": Nested(rate=0.2)}, "config.n.rate"),
        ({"k": Kind.A}, {"k": Kind.B}, "config.k"),
        ({"f": len}, {"f": max}, "config.f"),
        ({"p": Path("a")}, {"p": Path("b")}, "config.p"),
        ({"t": torch.zeros(2)}, {"t": torch.tensor([0.0, -0.0])}, "config.t"),
        ({"t": np.arange(2000)}, {"t": np.append(np.arange(1000), np.zeros(1000))}, "config.t"),
    ],
)
def test_a_changed_added_or_removed_key_is_refused_by_name_unless_allowed(was: Any, now: Any, field_name: str) -> None:
    before, after = saved(identity_of(was)), identity_of(now)
    (difference,) = compare(before, after.document)
    assert (difference.field, difference.kind) == (field_name, "refuse")
    with pytest.raises(CallerError, match=rf'{field_name} .* session\.restore\(allow=\["{field_name}"\]\)'):
        check_identity(before, after)
    assert check_identity(before, after, allow=[field_name]) == []
    assert check_identity(before, after, allow=["config"]) == []
    with pytest.raises(CallerError):
        check_identity(before, after, allow=[field_name[:-1], "config.other"])


def test_another_data_revision_or_world_size_is_refused_with_both_values() -> None:
    before = saved(identity_of({}))
    with pytest.raises(CallerError, match=r"data\.revision \(saved: 'v1', now: 'v2'\)"):
        check_identity(before, identity_of({}, data=Loader("v2")))
    with pytest.raises(CallerError, match=r"world_size \(saved: 2, now: 3\)"):
        check_identity(before, identity_of({}, world_size=3))
    with pytest.raises(CallerError, match="mesh"):
        check_identity(before, identity_of({}, mesh=[{"names": ["dp"], "ranks": [0, 1]}]))


@pytest.mark.parametrize("name", ["threads", "torch_build", "cpu_capability", "versions.torch", "code"])
def test_what_only_changes_the_last_bits_is_a_warning_that_names_it(name: str) -> None:
    before = saved(identity_of({}))
    before[name] = "another"
    (warning,) = check_identity(before, identity_of({}))
    assert warning.startswith(f"{name} (saved: 'another', now: ")


def test_numerical_settings_are_part_of_the_identity() -> None:
    before = saved(identity_of({}))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        (warning,) = check_identity(before, identity_of({}))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert "numerics.float32_matmul_precision" in warning


@given(st.text(alphabet=st.characters(min_codepoint=97, max_codepoint=122), min_size=12))
def test_no_value_of_the_configuration_is_stored_or_shown(secret: str) -> None:
    before, after = identity_of({"token": secret, "deep": [{"key": secret}]}), identity_of({"token": "x"})
    assert secret not in json.dumps(before.document)
    with pytest.raises(CallerError) as caught:
        check_identity(saved(after), before)
    assert secret not in str(caught.value)


def test_the_digest_is_the_same_in_another_process() -> None:
    config = {"s": {"b", "a", "c"}, "f": len, "o": object(), "t": (1, 2.5), "p": Path("x")}
    program = (
        "import json\nfrom pathlib import Path\nfrom workers.state.identity import capture_identity\n"
        "config = {'s': {'b', 'a', 'c'}, 'f': len, 'o': object(), 't': (1, 2.5), 'p': Path('x')}\n"
        "print(json.dumps(capture_identity(config=config, data=None, world_size=1, threads=1).document))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = capture_identity(config=config, data=None, world_size=1, threads=1)
    assert compare(json.loads(other.stdout), here.document) == []
    assert "config.t.1" in here.document
